"""What can be set, and the data files that ship with it. Knows nothing of the other rooms."""
