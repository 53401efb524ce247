"""NVIDIA's Transformer Engine in the place of a model's linear layers and norms."""
