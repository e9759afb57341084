"""The only modules that touch asyncio, sockets and aioquic: identity, endpoint, peers, streams, conditioner."""

from config.absent import absent

# aioquic checks certificates against authorities with these; ours are pinned (`mutual.py`, CERT_NONE): 1.8 MB
with absent("OpenSSL", "certifi", "service_identity"):
    import aioquic.tls as _tls  # noqa: F401 - first of all that imports aioquic
