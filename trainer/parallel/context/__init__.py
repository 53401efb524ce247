"""Context parallelism: workers share the tokens of each sample, and attention is a ring."""
