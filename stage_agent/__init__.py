"""The node: process, measurements, engines. The only composition root."""
