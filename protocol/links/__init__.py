"""What a link is worth: settled RTT, passive bandwidth, ages, path changes. Pure."""
