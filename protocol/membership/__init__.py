"""Who is in the mesh: failure detector, replicated node table, digests and deltas. Pure."""
