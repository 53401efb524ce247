"""Devices and process groups: the one place that knows Gloo from NCCL."""
