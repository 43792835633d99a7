"""`galley status`: what run.json says was started, and what its processes answer now."""

import asyncio
from pathlib import Path

import aiohttp
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table

from deploy.local import readiness


class RunProcess(BaseModel):
    """One process of run.json; `http_url` of nats is its NATS address."""

    name: str
    role: str
    instance: str
    pid: int
    http_url: str
    log: str


class RunFile(BaseModel):
    """What `galley up` writes to run.json once the cluster is ready, and removes when it stops."""

    url: str
    topology: str
    launcher: int
    processes: list[RunProcess]


async def run(run_dir: Path, console: Console) -> int:
    """Print a table; 0 when every process is ready, 1 when not or when nothing runs."""
    try:
        content = RunFile.model_validate_json((run_dir / "run.json").read_bytes())
    except FileNotFoundError:
        console.print(f"no cluster runs here ({run_dir}/run.json is not there); start one with: make up")
        return 1
    except ValidationError as error:
        console.print(f"{run_dir}/run.json makes no sense: {error.error_count()} errors")
        return 1
    async with aiohttp.ClientSession() as session:
        states = await asyncio.gather(*(_state(session, process) for process in content.processes))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("process", "pid", "address", "state"):
        table.add_column(heading, overflow="fold")
    for process, state in zip(content.processes, states, strict=True):
        table.add_row(process.name, str(process.pid), process.http_url, state)
    console.print(f"{content.topology} at {content.url}, logs in {run_dir / 'logs'}", soft_wrap=True)
    console.print(table)
    return 0 if all(state == "ready" for state in states) else 1


async def _state(session: aiohttp.ClientSession, process: RunProcess) -> str:
    if process.role == "nats":
        return "ready" if await readiness.nats_greets(int(process.http_url.rsplit(":", 1)[1])) else "gone"
    return await readiness.probe(session, process.http_url) or "ready"
