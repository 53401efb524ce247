"""From a store to tensors: which checkpoints there are, and checked reads of any part of them."""
