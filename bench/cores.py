"""Cores as a bench's options write them, and servers that stay on them. Knows nothing of what is measured."""

import argparse
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from bench.frame import Frame
from bench.target import Target
from common.config import parse_cores
from deploy.local.spec import ClusterSpec


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


@asynccontextmanager
async def pinned_target(frame: Frame, cores: Iterable[int], spec: ClusterSpec) -> AsyncIterator[Target]:
    """The server to measure, with this process on other cores than `cores`, if there are any.

    A cluster of our own has every process on `cores`; where the user's runs is the user's matter.
    """
    before, own = os.sched_getaffinity(0), set(cores)
    os.sched_setaffinity(0, own)  # what is started inherits it
    try:
        async with frame.target(spec) as target:
            os.sched_setaffinity(0, (before - own) or before)
            yield target
    finally:
        os.sched_setaffinity(0, before)
