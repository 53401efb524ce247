"""Kinds of numbers on the command line."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def positive(text: str) -> float:
    """Above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


count.__name__ = positive.__name__ = "number"  # argparse puts it into its message
