"""The command `galley`: start a cluster on this machine, and look at it.

Turns arguments into a ClusterSpec and results into text and exit codes; how a cluster is started is
deploy/local's business.
"""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from cli import status as status_command
from cli import up as up_command
from common.errors import GalleyError
from deploy.local.child import die_with_parent
from deploy.local.presets import Preset, checked_preset
from deploy.local.spec import DEFAULT_PORT, ClusterSpec
from services.gateway.http.keys import hash_line, new_key

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

RunDir = Annotated[Path, typer.Option(help="where logs and run.json are kept")]


@app.callback()
def galley() -> None:
    """Galley serves language models with prefill and decode on separate process fleets."""


@app.command()
def up(
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="settings of the services, e.g. model=DIR dtype=float32 num_blocks=512 ucx.tls=tcp; "
            "all of them: python -m services.decode --help",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="the gateway's port; 0: any")] = DEFAULT_PORT,
    router_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="default: 8001 beside port 8000, else any")
    ] = None,
    prefill: Annotated[int, typer.Option(help="prefill workers")] = 1,
    decode: Annotated[int, typer.Option(help="decode workers")] = 1,
    gateways: Annotated[int, typer.Option(help="gateways, which share the port")] = 1,
    topology: Annotated[
        str, typer.Option(help=", ".join(get_args(Preset)) + ": see deploy/config")
    ] = "disaggregated",
    cores: Annotated[str, typer.Option(help="cores that the workers share out, e.g. 0,2-3")] = "",
    config: Annotated[str, typer.Option(metavar="FILE", help="TOML file with settings of the services")] = "",
    run_dir: RunDir = Path(".galley"),
    with_parent: Annotated[bool, typer.Option(help="stop when the process that started this ends")] = False,
) -> None:
    """Start nats-server, router, workers and gateway here; Ctrl-C stops them all."""
    if with_parent:
        die_with_parent(signal.SIGTERM)
    settings = dict(up_command.parse_assignment(text) for text in assignments or ())
    try:
        spec = ClusterSpec(
            host=host,
            port=port,
            router_port=router_port,
            prefill=prefill,
            decode=decode,
            gateways=gateways,
            topology=checked_preset(topology),
            cores=cores,
            config=Path(config) if config else None,
            settings=settings,
        )
        code = asyncio.run(up_command.run(spec, run_dir, Console(highlight=False)))
    except GalleyError as error:
        typer.echo(f"galley: {error.message}", err=True)
        code = 2
    raise typer.Exit(code)


@app.command()
def key(
    remark: Annotated[str, typer.Argument(help="for whom, to stand beside the hash")] = "",
    hash_stdin: Annotated[
        bool, typer.Option(help="hash a key read from stdin, instead of a new one")
    ] = False,
) -> None:
    """Make an API key: the key goes to stderr, the line for api_keys_file to stdout."""
    if hash_stdin:
        made = sys.stdin.readline().strip()
        if not made:
            typer.echo("galley: stdin has no key", err=True)
            raise typer.Exit(2)
    else:
        made = new_key()
        typer.echo(made, err=True)
    typer.echo(hash_line(made, remark))


@app.command()
def status(run_dir: RunDir = Path(".galley")) -> None:
    """Show the cluster that `galley up` started here; exit code 0 when all of it is ready."""
    raise typer.Exit(asyncio.run(status_command.run(run_dir, Console(highlight=False))))


if __name__ == "__main__":
    sys.exit(app())
