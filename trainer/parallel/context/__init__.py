"""Context parallelism: the tokens of each sample divided over workers, whose attention is a ring."""
