"""Loopback TCP between nodes, inside the mesh's encrypted bulk streams."""
