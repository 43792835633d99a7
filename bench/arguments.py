"""What options of benches take, for argparse: each raises ArgumentTypeError for anything else.

Knows nothing of any one bench.
"""

import argparse
from pathlib import Path


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def new_file(text: str) -> Path:
    """A long bench should not find out at its end that it cannot write."""
    path = Path(text)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a file in an existing folder")
    return path
