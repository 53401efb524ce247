"""Benchmarks: `python -m benchmarks.NAME`, or all of them with `make bench`.

Each measures our system and its peers side by side in one run, tells what it does on stderr, and
prints one JSON object as its last line.
"""
