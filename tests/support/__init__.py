"""What tests and benchmarks share: small runs, harnesses, clusters, fakes."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
