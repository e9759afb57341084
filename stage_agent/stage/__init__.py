"""The fence and the stage state machine. Pure."""
