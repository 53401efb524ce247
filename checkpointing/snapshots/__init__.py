"""Checkpoints in the same format that lie in the nodes' memory."""
