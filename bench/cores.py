"""Cores as a bench's options write them. Knows nothing of what runs on them."""

import argparse
import os

from common.config import parse_cores


def core_list(text: str) -> tuple[int, ...]:
    """For argparse: cores that this process may use. Raises ArgumentTypeError for any other."""
    try:
        cores = parse_cores(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    allowed = os.sched_getaffinity(0)
    if not cores or not set(cores) <= allowed:
        raise argparse.ArgumentTypeError(
            f"{text!r}: this machine gives {','.join(map(str, sorted(allowed)))}"
        )
    return cores
