"""What two nodes must agree on."""
