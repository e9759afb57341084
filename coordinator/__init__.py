"""What the elected node decides. Pure: no I/O, no clock, no loop."""
