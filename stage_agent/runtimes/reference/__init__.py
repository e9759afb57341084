"""A small numpy decoder that runs a layer range of a GGUF and speaks stage frames: for verification, not production."""
