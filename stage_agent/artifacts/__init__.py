"""Content-addressed store and verified transfer between peers."""
