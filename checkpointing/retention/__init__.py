"""Which checkpoints stay, which go, and what nobody may take away."""
