"""The web console: one self-contained page that reads the API of the node that served it."""
