"""The launcher against real processes: a real nats-server and services that do nothing."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from common.errors import ConfigError
from deploy.local.cluster import STOP_S, ChildDied, LocalCluster
from deploy.local.processes import ChildProcess
from deploy.local.spec import ClusterSpec, ProcessSpec, plan_processes

SPEC = ClusterSpec(port=0, prefill=1, decode=2)


class Recorder:
    """A Watcher that remembers and lets a test wait for a state."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.exits: asyncio.Queue[str] = asyncio.Queue()

    def changed(self, child: ChildProcess) -> None:
        self.seen.append((child.name, child.state))
        if child.state == "exited":
            self.exits.put_nowait(child.name)


def fakes(spec: ClusterSpec) -> list[ProcessSpec]:
    return [
        replace(plan, module="tests.support.fake_service", argv=(plan.role, *plan.argv))
        for plan in plan_processes(spec)
    ]


def cluster(tmp_path: Path, spec: ClusterSpec = SPEC, timeout_s: float = 30) -> tuple[LocalCluster, Recorder]:
    recorder = Recorder()
    return LocalCluster(spec, tmp_path, recorder, plans=fakes(spec), start_timeout_s=timeout_s), recorder


def first_log_line(log: str) -> dict[str, str]:
    line: dict[str, str] = json.loads(Path(log).read_text().splitlines()[0])
    return line


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_starts_everything_writes_run_json_and_stops_without_a_trace(tmp_path: Path) -> None:
    launcher, recorder = cluster(tmp_path)
    async with launcher:
        run = json.loads((tmp_path / "run.json").read_bytes())
        processes = run["processes"]
        names = ["nats", "router-0", "prefill-0", "decode-0", "decode-1", "gateway-0"]
        assert [process["name"] for process in processes] == names
        assert run["url"] == launcher.url == processes[-1]["http_url"]
        async with aiohttp.ClientSession() as session:
            for process in processes[1:]:
                assert set(process) == {"name", "role", "instance", "pid", "http_url", "log"}
                async with session.get(f"{process['http_url']}/readyz") as response:
                    assert response.status == 200
                assert first_log_line(process["log"])["instance"] == process["instance"]
        assert all((process["name"], "ready") in recorder.seen for process in processes)
        assert processes[0]["http_url"].rpartition(":")[2] in (tmp_path / "worker.env").read_text()
    assert not [process["pid"] for process in processes if alive(process["pid"])]
    assert not (tmp_path / "run.json").exists()
    assert not (tmp_path / "worker.env").exists()
    assert launcher.died == []


async def test_a_service_that_dies_at_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    launcher, _ = cluster(tmp_path, replace(SPEC, settings={"served_model_name": "dies"}))
    with pytest.raises(ChildDied, match="gateway-0 ended with code 2") as caught:
        await launcher.start()
    words = caught.value.child.last_lines(20)
    assert any("no such architecture: Mamba" in line for line in words)
    assert not [child.name for child in launcher.children if child.pid and alive(child.pid)]


async def test_a_service_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    launcher, _ = cluster(tmp_path, replace(SPEC, settings={"served_model_name": "never_ready"}), timeout_s=8)
    with pytest.raises(ChildDied, match="gateway-0 was not ready within 8 s"):
        await launcher.start()


async def test_a_death_after_the_start_is_told_and_the_others_live_on(tmp_path: Path) -> None:
    launcher, recorder = cluster(tmp_path)
    async with launcher:
        watching = asyncio.create_task(launcher.watch())
        victim = next(child for child in launcher.children if child.name == "decode-1")
        os.kill(victim.pid, signal.SIGKILL)
        assert await recorder.exits.get() == "decode-1"
        assert victim.exit_code == -signal.SIGKILL
        assert [c.name for c in launcher.children if not alive(c.pid)] == ["decode-1"]
        watching.cancel()
    assert launcher.died == ["decode-1"]


async def test_a_service_that_does_not_stop_is_killed_in_time(tmp_path: Path) -> None:
    launcher, _ = cluster(tmp_path, replace(SPEC, settings={"served_model_name": "ignores_sigterm"}))
    loop = asyncio.get_running_loop()
    await launcher.start()
    begin = loop.time()
    await launcher.stop()
    assert loop.time() - begin < STOP_S + 1
    assert not [child.name for child in launcher.children if alive(child.pid)]


async def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launcher, recorder = cluster(tmp_path, replace(SPEC, port=port))
        with pytest.raises(
            ConfigError, match=f"port {port} on 127.0.0.1 is taken; choose another with PORT="
        ):
            await launcher.start()
    assert recorder.seen == []


async def test_two_clusters_in_one_directory_keep_apart(tmp_path: Path) -> None:
    first, _ = cluster(tmp_path)
    second, _ = cluster(tmp_path)
    async with first, second:
        assert first.run_dir == tmp_path
        assert second.run_dir == tmp_path / "port-0"
        assert first.url != second.url


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_launcher import Recorder, SPEC, fakes
from deploy.local.cluster import LocalCluster

async def main() -> None:
    async with LocalCluster(SPEC, Path(sys.argv[1]), Recorder(), plans=fakes(SPEC)) as cluster:
        sys.stdout.write(" ".join(str(child.pid) for child in cluster.children) + "\\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_children_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 6
        watched = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
    for pidfd in watched:
        assert select.select([pidfd], [], [], 10)[0], "a child outlived its launcher"
        os.close(pidfd)
