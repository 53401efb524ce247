"""What stands in for libraries that need a GPU: their calls, by the signatures of a release, and
what they compute, by torch. A test puts this folder on the path. `nvml.py` is imported as it is."""
