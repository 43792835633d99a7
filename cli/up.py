"""`galley up`: prepare the model, start the cluster, show it, keep it until told to stop."""

import asyncio
import shlex
import signal
from pathlib import Path

import orjson
import typer
from rich.console import Console

from deploy.local.cluster import ChildDied, LocalCluster
from deploy.local.model import prepare_model
from deploy.local.spec import ClusterSpec
from deploy.local.table import StartView

QUESTION = "What is the capital of France?"


def parse_assignment(text: str) -> tuple[str, str]:
    """KEY and VALUE of "KEY=VALUE"; the key may be in capitals, as make variables are."""
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE")
    return key.lower().replace("__", ".").replace("-", "_"), value


def curl_line(url: str, model: str, *, needs_key: bool = False) -> str:
    """A command that streams an answer from the cluster at `url`, with a place for the key it needs."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    headers = ["Content-Type: application/json", *(["Authorization: Bearer KEY"] if needs_key else [])]
    sent = " ".join(f"-H {shlex.quote(header)}" for header in headers)
    return f"curl -N {url}/v1/chat/completions {sent} -d {shlex.quote(orjson.dumps(body).decode())}"


async def run(spec: ClusterSpec, run_dir: Path, console: Console) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP. 0 after a clean run, 1 when a process died.

    Raises ConfigError when nothing can be started.
    """
    loop = asyncio.get_running_loop()
    view = StartView(console)
    cluster = LocalCluster(spec, run_dir, view)
    serving = loop.create_task(_serve(cluster, view))

    def stop() -> None:
        # make passes on what its whole process group got already: the second of a pair is no news.
        if not serving.cancelling():
            serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except ChildDied as error:
        view.line(f"galley: {error.message}; the end of {error.child.log}:")
        view.last_lines(error.child)
        return 1
    except asyncio.CancelledError:
        view.line("stopped")
    return 1 if cluster.died else 0


async def _serve(cluster: LocalCluster, view: StartView) -> None:
    cluster.check_ports()
    if not cluster.spec.splits:
        view.line(f"topology {cluster.spec.topology}: decode workers prefill; no prefill worker is started")
    await prepare_model(cluster.gateway_settings)
    with view:
        await cluster.start()
    try:
        view.line(f"ready {cluster.url}")
        settings = cluster.gateway_settings
        needs_key = settings.api_keys_file is not None
        view.line(curl_line(cluster.url, settings.model_name, needs_key=needs_key))
        await cluster.watch()
    finally:
        await cluster.stop()
