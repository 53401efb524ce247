"""Servers that answer as real ones do, and fail on demand."""
