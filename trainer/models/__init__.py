"""Models: where they come from and how each worker fills just its slice of the weights."""
