"""A service's process from its start to its exit code, with a main of the test's own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SCRIPT = """
import asyncio, atexit, gc, os, signal, sys
from common.config import DecodeSettings, load
from common.errors import UnsupportedModel
from common.runtime.service import run_service

async def obeys(context):
    context.announce("http://127.0.0.1:1")
    await context.stopping.wait()

async def hangs(context):
    context.announce("http://127.0.0.1:1")
    await asyncio.Event().wait()

async def gives_up(context):
    raise UnsupportedModel("no such architecture: Mamba")

async def breaks(context):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(30))
        raise ZeroDivisionError("oops")

async def returns(context):
    pass

async def counts(context):
    atexit.register(lambda: print('{"left to collect": %d}' % len(gc.get_objects())))

async def is_hurried(context):
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    context.stopping.set()

run_service(load(DecodeSettings, sys.argv[2:]), globals()[sys.argv[1]])
"""


@contextmanager
def service(main: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and the file descriptor on which it announces itself."""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", SCRIPT, main, f"--announce-fd={writer}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=(writer,)) as process:
        os.close(writer)
        try:
            yield process, reader
        finally:
            process.kill()
            os.close(reader)


def end(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, str]]]:
    """Exit code and log lines."""
    out, _ = process.communicate(timeout=30)
    return process.returncode, [json.loads(line) for line in out.splitlines()]


def test_sigterm_drains_and_ends_with_0() -> None:
    with service("obeys", "--instance=decode-7") as (process, announcements):
        told = json.loads(os.read(announcements, 1000))
        assert told == {"http_url": "http://127.0.0.1:1", "pid": process.pid}
        process.send_signal(signal.SIGTERM)
        code, lines = end(process)
    assert code == 0
    assert [line["event"] for line in lines] == ["starting", "listening", "draining", "stopped"]
    assert {line["instance"] for line in lines} == {"decode-7"}


def test_a_second_signal_ends_a_drain_that_hangs() -> None:
    with service("hangs") as (process, announcements):
        os.read(announcements, 1000)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        while json.loads(process.stdout.readline())["event"] != "draining":
            pass
        process.send_signal(signal.SIGINT)
        code, lines = end(process)
    assert code == 0
    assert [line["event"] for line in lines] == ["stopping now", "stopped"]


@pytest.mark.parametrize(
    ("main", "code", "error"),
    [
        ("gives_up", 2, "no such architecture: Mamba"),
        ("breaks", 1, "ZeroDivisionError: oops"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(main: str, code: int, error: str) -> None:
    with service(main) as (process, _):
        ended, lines = end(process)
    assert ended == code
    failures = [line for line in lines if line["event"] == "failed"]
    assert [line["error"] for line in failures] == [error]
    assert ("exception" in failures[0]) == (code == 1)


def test_ending_unasked_is_a_failure() -> None:
    with service("returns") as (process, _):
        code, lines = end(process)
    assert code == 1
    assert "ended by itself" in [line["event"] for line in lines]


def test_cores_that_the_machine_does_not_give_are_told() -> None:
    with service("obeys", "--cores=4095") as (process, _):
        code, lines = end(process)
    assert code == 2
    assert "this process may use cores" in lines[-1]["error"]


def test_nothing_is_left_for_the_interpreters_last_collection() -> None:
    with service("counts") as (process, _):
        _, lines = end(process)
    assert int(lines[-1]["left to collect"]) < 1000


def test_a_signal_on_the_way_out_changes_nothing() -> None:
    with service("is_hurried") as (process, _):
        code, lines = end(process)
    assert (code, lines[-1]["event"]) == (0, "stopped")
