"""Linear layers whose matrix products are computed in 8-bit floating point."""
