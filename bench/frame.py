"""What every bench is made of and what it is given: the frame around a measurement.

Knows nothing of any one bench (bench/benches/) and of the command line (bench/__main__.py).
"""

import argparse
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

from rich.console import Console

from bench.cluster import own_cluster
from bench.progress import Advance, progress
from bench.report import Outcome
from bench.target import Target, find_target
from deploy.local.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class Frame:
    """The screen, and where the server is. `url` and `router_url` are the user's; None if not given."""

    console: Console
    url: str | None = None
    router_url: str | None = None

    @asynccontextmanager
    async def target(self, spec: ClusterSpec | None = None) -> AsyncIterator[Target]:
        """The server to measure: the user's, else a cluster of our own on free ports, made of `spec`, that
        is gone afterwards. Raises ClusterFailed when it does not come up."""
        if self.url is not None:
            yield await find_target(self.url, self.router_url)
            return
        async with own_cluster(spec or ClusterSpec(), self.console) as target:
            yield target

    def progress(self, what: str, total: int, *, still: bool = False) -> AbstractContextManager[Advance]:
        """See bench/progress.py."""
        return progress(self.console, what, total, still=still)

    def note(self, text: str) -> None:
        """One line for the reader beside the figures."""
        self.console.print(text, highlight=False, markup=False)


def http_url(text: str) -> str:
    """For argparse: a server's address without a slash at its end. Raises ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} does not begin with http://")
    return text.rstrip("/")


def no_options(_: argparse.ArgumentParser) -> None:
    """For benches without options of their own."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench: a module of bench/benches/ has it as BENCH and gives it its name.

    `about` is one line. `run` measures; what it raises besides the frame's own errors is a bug. `local`
    benches measure what they bring along and take no server's address.
    """

    about: str
    run: Callable[[Frame, argparse.Namespace], Awaitable[Outcome]]
    options: Callable[[argparse.ArgumentParser], None] = no_options
    local: bool = False
