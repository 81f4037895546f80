"""``fcil-client peers``: the other clients of masked rounds, and those that the owner confirms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_client.cli.target_options import ServerOption, SlotOption
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.tables import console
from fcil_protocol.process.terminal import Format, chosen, emit, errors, printable

if TYPE_CHECKING:
    from fcil_client.state.home import Home


def peers(
    data: Annotated[Path, typer.Option(help="The client's data folder.")],
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="FINGERPRINT", help="Confirm a peer."),
    ] = None,
    unpin: Annotated[
        list[str] | None,
        typer.Option(metavar="FINGERPRINT", help="Take back a pin."),
    ] = None,
    server: ServerOption = None,
    slot: SlotOption = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Show the other clients of masked rounds, and pin those that this device's owner confirms."""
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_client.cli.member import enrolled
        from fcil_client.state.peers import PeerBook

        home, _ = enrolled(data, server, slot)
        book = PeerBook(home.directory)
        for fingerprints, pinned in ((pin, True), (unpin, False)):
            for fingerprint in fingerprints or ():
                book.pin(fingerprint, pinned=pinned)
        row = {
            "data": str(data),
            "fingerprint": _own_fingerprint(home),
            "peers": [vars(peer) for peer in book.peers()],
        }
        emit(row, form, lambda: _show(row), rows=row["peers"])


def _own_fingerprint(home: Home) -> str:
    from fcil_protocol.trust.keys import PrivateKeys

    return PrivateKeys.load(home.keys_path).public.fingerprint


def _show(row: dict[str, Any]) -> None:
    out = console()
    out.print(f"this client  {row['fingerprint']}")
    for peer in row["peers"]:
        mark = "  pinned" if peer["pinned"] else ""
        name = printable(peer["client"]) or "not met yet".ljust(26)
        out.print(f"{name}  {peer['fingerprint']}{mark}")
    if not row["peers"]:
        out.print("It has met no other client yet: that happens in the first masked round.")
    elif not any(peer["pinned"] for peer in row["peers"]):
        out.print(
            "None is pinned: the server is trusted not to invent clients "
            "(docs/secure-aggregation.md)."
        )
