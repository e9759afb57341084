"""Which nodes, in which order, with which cuts. Pure."""
