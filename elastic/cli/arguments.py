"""Kinds of numbers on the command line."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def positive(text: str) -> float:
    """Above 0, and finite."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    if number == math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return number


count.__name__ = positive.__name__ = "number"  # argparse puts it into its message
