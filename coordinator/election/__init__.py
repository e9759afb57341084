"""Who coordinates, under which term. Pure."""
