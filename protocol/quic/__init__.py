"""The only modules that touch asyncio, sockets and aioquic: identity, endpoint, peers, streams, conditioner."""
