"""``fcil-client``: join a federation with a folder of images, and look at the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_protocol.terminal import Format, Lines, chosen, emit, errors, printable

if TYPE_CHECKING:
    from fcil_client.notes import Note

app = typer.Typer(
    name="fcil-client",
    help="Let a folder of images take part in federated class-incremental learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FormatOption = Annotated[Format, typer.Option("--format", help="Form of the data on stdout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Short for --format json.")]


@app.callback()
def _root() -> None:
    """Keep the verbs as sub-commands, however many there are."""


@app.command()
def join(
    data: Annotated[
        Path,
        typer.Option(help="FOLDER/<class>/<image>, FOLDER/train/<class>/..., or a zip of either."),
    ],
    server: Annotated[
        str | None, typer.Option(help="Which server, if several could be meant: name or address.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    weights: Annotated[
        Path | None, typer.Option(help="Local safetensors file with the backbone's weights.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the worker; 0: all cores.")] = 0,
    micro_batch: Annotated[
        int, typer.Option(min=0, help="Most images in one pass; 0: the method's batch.")
    ] = 0,
    memory_mb: Annotated[int, typer.Option(min=16, help="Memory for decoded images, MB.")] = 2000,
) -> None:
    """Join the federation and stay: learn when asked, until Ctrl-C.

    Images, their names and everything else stay in the folder; what leaves is what the
    method's schema names. Started again, the client goes on where it was.
    """
    with errors():
        import asyncio

        from fcil_client.enrolment import find
        from fcil_client.home import find_data
        from fcil_client.rounds import Options
        from fcil_protocol.files import DirectoryLock

        folder = find_data(str(data))
        home, enrolment = find(folder, server)
        options = Options(
            data=folder,
            device=device,
            weights=weights,
            threads=threads,
            micro_batch=micro_batch or None,
            memory_bytes=memory_mb * 1_000_000,
        )
        lines = Lines()

        async def run() -> None:
            from fcil_client.daemon import Client

            def say(note: Note) -> None:
                lines(note.at, note.level, printable(note.text))

            await Client(home, enrolment, options, say=say).run()

        with DirectoryLock.acquire(home.directory, "client"):
            asyncio.run(run())


@app.command()
def status(
    data: Annotated[Path | None, typer.Option(help="Only the client of this folder.")] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Show what the clients of this machine and user are doing."""
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_client.home import Home

        homes = Home.known(data) if data is not None else Home.all()
        rows = [_one_status(h) for h in homes]
        emit({"clients": rows}, form, lambda: _show(rows), rows=rows)


def _one_status(home: Any) -> dict[str, Any]:
    from fcil_protocol import control
    from fcil_protocol.errors import Unreachable

    try:
        return control.ask(home.directory, "status")
    except Unreachable:
        enrolment = home.enrolment()
        return {
            "running": False,
            "client": enrolment.client_id,
            "name": enrolment.name,
            "federation": enrolment.federation,
            "server": list(enrolment.addresses),
            "data": enrolment.data,
            "directory": str(home.directory),
            "outbox": len(home.outbox()),
        }


def _show(rows: list[dict[str, Any]]) -> None:
    if not rows:
        typer.echo("No folder of this user is enrolled. Join with: fcil-client join --data FOLDER")
    for row in rows:
        typer.echo(f"{printable(row['name'])}  ({row['data']})")
        if not row["running"]:
            waiting = f", {row['outbox']} update waits in the outbox" if row["outbox"] else ""
            typer.echo(f"  not running{waiting}; start: fcil-client join --data {row['data']}")
            continue
        typer.echo(f"  link     {row['link']} to {', '.join(row['server'])}")
        doing = f"{row['work']} {row['round']}" if row["round"] else row["work"]
        if row["progress"] and row["round"]:
            phase, done, total = row["progress"]
            doing += f", {phase} {100 * done // max(total, 1)} %"
        typer.echo(f"  work     {doing}")
        if row["run"]:
            typer.echo(f"  run      {row['run']}, {row['method']} on {row['backbone']}")
        typer.echo(f"  device   {row['device'] or 'not loaded yet'}")
        if row["classes"]:
            train = sum(c["train"] for c in row["classes"].values())
            typer.echo(f"  images   {train} for training in {len(row['classes'])} classes")
        typer.echo(f"  counted  {row['counted']} updates since the start")


def main() -> None:
    """Run the command line."""
    app()
