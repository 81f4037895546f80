"""Swarms of this user, for ``status`` and the doctor: one line each, or their members."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import typer

from fcil_client.state.home import Home, state_home
from fcil_protocol.errors import Timeout, Unreachable
from fcil_protocol.process import control_socket
from fcil_protocol.process.terminal import count_of, printable

RECORD = "swarm.json"  # in a swarm's directory: its members


def swarms() -> Path:
    """Return the folder of this user's swarm directories."""
    return state_home() / "swarms"


@dataclass(frozen=True)
class SwarmRecord:
    """Content of a swarm's record file.

    Attributes:
        start: the arguments that start it again.
        members: name -> the member's home.
    """

    directory: Path
    name: str
    start: str
    members: dict[str, str]


def record_bytes(name: str, start: str, members: dict[str, str]) -> bytes:
    """Return the bytes of a record file."""
    return json.dumps({"name": name, "start": start, "members": members}).encode()


def records() -> list[SwarmRecord]:
    """Return the swarms that have run here, in order of start; running ones come last.

    A damaged record is left out.
    """
    found = []
    for path in sorted(swarms().glob(f"*/{RECORD}"), key=_runs_and_began):
        record = _record(path, path.stat().st_mtime_ns)
        if record is not None:
            found.append(record)
    return found


def _runs_and_began(path: Path) -> tuple[bool, int]:
    return control_socket.socket_path(path.parent).exists(), path.stat().st_mtime_ns


@lru_cache(maxsize=64)
def _record(path: Path, _stamp: int) -> SwarmRecord | None:
    try:
        fields = json.loads(path.read_bytes())
        return SwarmRecord(
            path.parent, str(fields["name"]), str(fields["start"]), fields["members"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # rewritten at the swarm's next start


def record_of(directory: Path) -> dict[str, str]:
    """Return the members in a swarm's record; none before its first start."""
    path = directory / RECORD
    record = _record(path, path.stat().st_mtime_ns) if path.exists() else None
    return record.members if record is not None else {}


def swarms_of(homes: Sequence[Home]) -> dict[Path, SwarmRecord]:
    """Return home -> swarm for those of these homes in one: the running swarm, or the newest."""
    of = {Path(where): record for record in records() for where in record.members.values()}
    return {home.directory: of[home.directory] for home in homes if home.directory in of}


def ask(home: Home, timeout_s: float) -> dict[str, Any]:
    """Return the status of a running client, alone or in a swarm.

    Raises:
        Unreachable: it is not running.
        Timeout: its process does not answer.
    """
    try:
        return control_socket.ask(home.directory, "status", timeout_s, wait=False)
    except Unreachable:
        record = swarms_of([home]).get(home.directory)
        if record is None or not control_socket.socket_path(record.directory).exists():
            return control_socket.ask(home.directory, "status", timeout_s)  # it may be starting
        return control_socket.ask(record.directory, "member", timeout_s, home=str(home.directory))


def one_swarm(record: SwarmRecord, timeout_s: float) -> dict[str, Any]:
    """Return a swarm's status, or its record if it does not answer."""
    known = {"name": record.name, "start": record.start, "directory": str(record.directory)}
    try:
        said = control_socket.ask(record.directory, "status", timeout_s)
    except (Unreachable, Timeout) as error:
        runs = isinstance(error, Timeout)
        return {**known, "members": len(record.members), "running": runs, "answers": False}
    return {**said, **known, "answers": True}


def show_swarms(rows: Sequence[dict[str, Any]]) -> None:
    """Print swarms, one block each."""
    for row in rows:
        typer.echo(f"{printable(row['name'])}  (a swarm of {count_of(row['members'], 'client')})")
        if row["answers"]:
            typer.echo(f"  work     {printable(line(row))}")
            for name, why in list(row["failed"].items())[:5]:
                typer.echo(f"  failed   {printable(name)}: {printable(why)}")
        elif row["running"]:
            typer.echo("  running, but it does not answer: it is suspended, or its disk hangs")
        else:
            typer.echo(f"  not running; start: fcil-client swarm {printable(row['start'])}")
        typer.echo("  members  fcil-client status --members")


def line(told: dict[str, Any]) -> str:
    """Return a summary in one line."""
    words = [f"{told['connected']} of {told['members']} connected"]
    if told["enrolled"] + len(told["failed"]) < told["members"]:
        words.append(f"{told['enrolled']} enrolled")
    at_work = [f"{told[w]} {w}" for w in ("fetching", "working", "sending") if told[w]]
    if told["round"]:
        words.append(f"{told['round']}: {', '.join(at_work)}")
    words.append(f"{count_of(told['counted'], 'update')} counted")
    words.append(f"{told['bytes_up'] / 1e6:.1f} MB up, {told['bytes_down'] / 1e6:.1f} MB down")
    if told["failed"]:
        words.append(f"{len(told['failed'])} failed")
    return "; ".join(words)
