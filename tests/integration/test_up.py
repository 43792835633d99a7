"""`galley up` as a process, over services that do nothing: what it prints, how it ends."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = """
import sys
from cli.main import app
from deploy.local import cluster
from tests.integration.test_launcher import fakes

cluster.plan_processes = fakes
app(["up", "--port=0", "--decode=2", f"--run-dir={sys.argv[1]}", f"model={sys.argv[1]}", *sys.argv[2:]])
"""

Up = subprocess.Popen[str]


@contextmanager
def galley_up(run_dir: Path, *arguments: str) -> Iterator[Up]:
    command = [sys.executable, "-c", SCRIPT, str(run_dir), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: Up, start: str) -> list[str]:
    """Lines up to the one that starts with `start`."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            return lines
    raise AssertionError("\n".join(lines))


def watched_pids(run_dir: Path) -> dict[str, int]:
    processes = json.loads((run_dir / "run.json").read_bytes())["processes"]
    return {process["name"]: os.pidfd_open(process["pid"]) for process in processes}


def assert_all_end(pidfds: dict[str, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for name, pidfd in pidfds.items():
        ended, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        assert ended, f"{name} still runs"
        os.close(pidfd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_tells_ready_and_curl_and_stops_all_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with galley_up(tmp_path) as process:
        lines = read_until(process, "curl ")
        url = json.loads((tmp_path / "run.json").read_bytes())["url"]
        assert lines[-2] == f"ready {url}"
        assert lines[-1].startswith(f"curl -N {url}/v1/chat/completions")
        pidfds = watched_pids(tmp_path)
        process.send_signal(number)
        process.send_signal(number)
        assert_all_end(pidfds, 6)
        assert process.wait(timeout=10) == 0


def test_status_looks_at_what_runs(tmp_path: Path) -> None:
    status = [sys.executable, "-m", "cli.main", "status", "--run-dir", str(tmp_path)]
    with galley_up(tmp_path) as process:
        read_until(process, "curl ")
        run = subprocess.run(status, capture_output=True, text=True, timeout=30, check=False)
        assert run.returncode == 0, run.stdout
        assert run.stdout.count("ready") == 6
        pidfds = watched_pids(tmp_path)
        signal.pidfd_send_signal(pidfds["decode-1"], signal.SIGKILL)
        read_until(process, "decode-1 ended")
        run = subprocess.run(status, capture_output=True, text=True, timeout=30, check=False)
        assert run.returncode == 1
        assert [line.split()[0] for line in run.stdout.splitlines() if "does not answer" in line] == [
            "decode-1"
        ]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)
        assert_all_end(pidfds, 1)
    run = subprocess.run(status, capture_output=True, text=True, timeout=30, check=False)
    assert (run.returncode, "no cluster runs here" in run.stdout) == (1, True)


def test_a_death_after_the_start_is_shown_and_in_the_exit_code(tmp_path: Path) -> None:
    with galley_up(tmp_path) as process:
        read_until(process, "curl ")
        pidfds = watched_pids(tmp_path)
        signal.pidfd_send_signal(pidfds["decode-1"], signal.SIGKILL)
        assert "decode-1 ended with code -9" in read_until(process, "decode-1 ended")[-1]
        process.send_signal(signal.SIGTERM)
        assert_all_end(pidfds, 6)
        assert process.wait(timeout=10) == 1


def test_a_death_at_the_start_is_shown_with_its_last_words(tmp_path: Path) -> None:
    with galley_up(tmp_path, "served_model_name=dies") as process:
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 1
    assert "gateway-0 ended with code 2 before it was ready" in out
    assert "no such architecture: Mamba" in out


def test_with_parent_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "--with-parent"]
    wrapper = f"import subprocess; subprocess.run({command!r})"
    with subprocess.Popen([sys.executable, "-c", wrapper], stdout=subprocess.PIPE, text=True) as parent:
        read_until(parent, "curl ")
        pidfds = watched_pids(tmp_path)
        parent.kill()
        assert_all_end(pidfds, 10)
