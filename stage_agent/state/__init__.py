"""What must survive a restart, durable before it is used."""
