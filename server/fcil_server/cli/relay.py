"""``fcil-server relay``: let a site's clients share one uplink."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_protocol.process.cli_options import grouped
from fcil_protocol.process.log_file import LogOptions
from fcil_protocol.process.terminal import errors

if TYPE_CHECKING:
    from fcil_protocol.process.log_file import LogFile
    from fcil_protocol.trust.ticket import Ticket
    from fcil_server.federation.allow_list import AllowList

app = typer.Typer()


@app.command()
@grouped
def relay(
    *,
    listen: Annotated[str, typer.Option(help="HOST:PORT for the clients of the site.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="The relay's directory, created if it does not exist.")
    ] = Path("relay"),
    ticket: Annotated[
        Path | None,
        typer.Option(help="The ticket of `enrol NAME --relay`, or - for standard input."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="HOST:PORT that clients should use, if different.")
    ] = None,
    cache_mb: Annotated[int, typer.Option(min=1, help="Disk for sealed chunks, MB.")] = 2000,
    sums: Annotated[
        bool,
        typer.Option(
            "--sums",
            help="Open the updates of its clients and send the server their sum, in runs with "
            "privacy.relay_sums.",
        ),
    ] = False,
    log: LogOptions,
) -> None:
    """Relay a site's clients to the server until Ctrl-C; each broadcast crosses the uplink once.

    Without --sums it can decrypt nothing and forge nothing. It sees who sends how much and when.
    """
    with errors():
        import asyncio
        import sys

        from fcil_protocol.link.descriptors import allow_many_files
        from fcil_protocol.storage.atomic_files import DirectoryLock
        from fcil_protocol.trust.ticket import read_ticket
        from fcil_server.sessions.relay.home import make_directory

        shown = read_ticket(ticket, sys.stdin.buffer) if ticket is not None else None
        make_directory(directory)
        allow_many_files()
        file = log.open()
        with DirectoryLock.acquire(directory, "relay"):
            asyncio.run(
                _relay(directory, shown, listen, advertise or listen, cache_mb, file, sums=sums)
            )


async def _relay(
    directory: Path,
    ticket: Ticket | None,
    listen: str,
    address: str,
    cache_mb: int,
    log: LogFile | None,
    *,
    sums: bool,
) -> None:
    import time

    from fcil_protocol.errors import UsageError
    from fcil_protocol.link.interface import ServerLink
    from fcil_protocol.link.zmq_link import Router
    from fcil_protocol.process import control_socket
    from fcil_protocol.process.log_file import DaemonOutput
    from fcil_protocol.process.supervisor import Service
    from fcil_protocol.trust.ticket import check_address
    from fcil_server.federation.addresses import split_address
    from fcil_server.sessions.conduct import Floods
    from fcil_server.sessions.relay.cache import Cache
    from fcil_server.sessions.relay.home import enrol, load_keys, save_record
    from fcil_server.sessions.relay.relay import Relay

    said, service = DaemonOutput(log), Service(log)

    def say(level: str, text: str) -> None:
        said(time.time(), level, text)
        service.news()

    host, port = split_address(listen)
    check_address(address, "Give --listen, or --advertise, an address that clients can reach.")
    record = await enrol(directory, ticket, lambda text: say("info", text))
    keys = load_keys(directory)

    def who(key: bytes) -> str:
        return f"the key {key.hex()[:16]}" if key else "a peer that sent nothing"

    def open_link(allow_list: AllowList) -> ServerLink:
        router = Router(
            curve_secret=keys.curve_secret,
            curve_public=keys.public.curve,
            admit=allow_list,
            allow=allow_list.allow,
            flooded=Floods(who, lambda text: say("warning", text)).cut,
        )
        try:
            router.bind(host, port)
        except BaseException:
            router.close()
            raise
        return router

    cache = Cache(directory / "cache", cache_mb * 1_000_000)
    running = Relay(
        record,
        keys,
        address=address,
        cache=cache,
        open_link=open_link,
        notify=say,
        keep=lambda newer: save_record(directory, newer),
        incoming=directory / "incoming" if sums else None,
    )

    async def command(op: str, _fields: dict[str, Any]) -> dict[str, Any]:
        if op == "status":
            return running.status()
        if op == "stop":
            running.stop()
            return {}
        raise UsageError(f"this relay knows no command {op!r}.")

    service.catch(running.stop, lambda text: say("info", text))
    listening = await control_socket.serve(directory, command)
    service.ready(running.line)
    try:
        await running.run()
    finally:
        service.stopping()
        listening.close()
        service.over()
        control_socket.socket_path(directory).unlink(missing_ok=True)
