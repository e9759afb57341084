"""Fence and state machine of the stages this node runs; pure."""
