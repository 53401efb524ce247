"""What runs in every worker beside the training loop: roles, the line out, saves, restores."""
