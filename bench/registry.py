"""Which benches there are: every module of bench/benches/ that has a BENCH, under the module's name.

A new bench is a new file; nothing else has to be told.
"""

from importlib import import_module
from pkgutil import iter_modules

from bench import benches
from bench.frame import Bench


def all_benches() -> dict[str, Bench]:
    """By name as typed on the command line (`_` is written `-`), in alphabetical order.

    Raises TypeError for a module without a proper BENCH.
    """
    names = sorted(module.name for module in iter_modules(benches.__path__))
    return {name.replace("_", "-"): _bench_of(name) for name in names}


def _bench_of(name: str) -> Bench:
    found = getattr(import_module(f"{benches.__name__}.{name}"), "BENCH", None)
    if not isinstance(found, Bench):
        raise TypeError(f"bench/benches/{name}.py has no BENCH")
    return found
