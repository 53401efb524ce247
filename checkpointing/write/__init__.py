"""From tensors in memory to a published checkpoint: who writes what, how, and the commit."""
