"""Who coordinates, under which ballot, and when the view is calm enough to plan; pure."""
