"""`python -m common.engine.compile_graph DIRECTORY LAYOUT CACHE_DIR`: the child that compiles a model.

Polite: nice 19 and idle scheduling, so that a step that wants the core has it at once; one thread; gone as
soon as its standard input ends. TMPDIR must be on the file system of CACHE_DIR. Knows nothing of serving.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import orjson

from common.engine.sealed import is_sound, locked, publish
from common.kv.layout import KVLayout


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.engine.compile_graph")
    parser.add_argument("directory", type=Path)
    parser.add_argument("layout", type=orjson.loads, help="a KVLayout as JSON")
    parser.add_argument("cache_dir", type=Path)
    arguments = parser.parse_args(argv)
    os.nice(19)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    threading.Thread(target=_die_with_parent, daemon=True).start()

    import torch
    from torch._inductor.utils import fresh_cache

    from common.engine import graph, kernels

    torch.set_num_threads(1)
    kernels.load_kernels(arguments.cache_dir)
    layout = KVLayout(**arguments.layout)
    target = graph.graph_path(arguments.directory, layout, arguments.cache_dir)
    with locked(target.with_suffix(".lock")):
        if not is_sound(target):
            made = Path(tempfile.gettempdir()) / target.name
            with fresh_cache():
                graph.compile_graph(arguments.directory, layout, made)
            publish(made, target)
    return 0


def _die_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    with suppress(ProcessLookupError):  # it leads a group, unless somebody started it by hand
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
