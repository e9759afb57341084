"""`stagemesh demo`: a real mesh of real processes on one machine, over pretended hardware and links."""
