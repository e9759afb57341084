"""Finding peers on the local network: addresses to dial, and never a way in."""
