"""Content-addressed store and verified transfer between peers.

A holder *shows* the files of a model (``shelf``, ``serving``), a node with an assignment *fetches* what its stage lacks
(``fetcher``, ``download``, ``session``) into the store (``store``, ``partial_file``) and reads it through a directory of
links (``assembly``). Nothing that came from a peer is believed before its SHA-256 and the model's own digest agree.
"""
