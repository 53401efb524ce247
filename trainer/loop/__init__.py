"""The training loop: one step, the steps of a generation, what is due in between."""
