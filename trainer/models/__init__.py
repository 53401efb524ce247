"""Models: where they come from and where their initial weights do."""
