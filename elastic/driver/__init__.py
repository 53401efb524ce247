"""What `fit()` does beside the run: what to go on from, resources, progress, a watch."""
