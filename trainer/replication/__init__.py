"""What crosses replicas in a step: the lanes, the exact sum of gradients, the commit."""
