"""A step of one worker without memory and without peers: what it would need, and would send."""
