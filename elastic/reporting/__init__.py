"""The run's records, and what is made of them for people."""
