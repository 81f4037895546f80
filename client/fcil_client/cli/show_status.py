"""Output of ``fcil-client status`` and ``journal``, for clients in any state."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import typer

from fcil_adapters.contract import exemplars
from fcil_client.cli.show_privacy import describe_limits
from fcil_client.state import current_model, sent_journal
from fcil_client.state.home import Home, client_command
from fcil_client.swarm import status as swarm_status
from fcil_protocol.errors import FcilError, Starting, StorageError, Timeout, Unreachable
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.process import control_socket
from fcil_protocol.process.terminal import count_of, printable

STATUS_S = 5.0  # for a daemon to say how it is


def enrolment_of(home: Home) -> dict[str, Any]:
    """Return the enrolment of a directory, also of a damaged one or of a client that left.

    ``damaged`` describes the damage, if any; ``left`` says that the client has
    left its federation.
    """
    damaged, enrolment = "", None
    try:
        enrolment = home.enrolment()
    except StorageError as error:
        damaged = str(error)
    left = enrolment is None and not damaged
    enrolment = enrolment or home.former_enrolment()
    known = {
        "client": enrolment.client_id if enrolment else "",
        "name": enrolment.name if enrolment else "unknown",
        "federation": enrolment.federation if enrolment else home.directory.parent.name,
        "data": enrolment.data if enrolment else str(home.directory),
    }
    return {**known, "damaged": damaged, "left": left}


def one_status(home: Home) -> dict[str, Any]:
    """Return the status from a client's daemon, or from its files if no daemon answers."""
    model = current_model.summary(home)
    try:
        said = swarm_status.ask(home, STATUS_S)
    except (Unreachable, Timeout) as error:
        known = {k: v for k, v in enrolment_of(home).items() if k != "left"}
        return {
            **known,
            "seat": home.seat,
            "running": isinstance(error, Timeout),
            "answers": False,
            "starting": isinstance(error, Starting),
            "server": _addresses(home),
            "directory": str(home.directory),
            "outbox": len(home.outbox()),
            "model": model,
        }
    return {**said, "answers": True, "damaged": "", "model": model}


def all_status(*, members: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of all swarms, and of all clients that are in none (or ``members`` as well)."""
    homes = Home.all()
    inside = swarm_status.swarms_of(homes)
    swarms = {record.directory: record for record in inside.values()}
    # A member that was started with join runs alone for now.
    alone = [
        home
        for home in homes
        if members
        or home.directory not in inside
        or control_socket.socket_path(home.directory).exists()
    ]
    rows = [swarm_status.one_swarm(record, STATUS_S) for record in swarms.values()]
    return rows, [one_status(home) for home in alone]


def show_all(swarms: list[dict[str, Any]], clients: list[dict[str, Any]]) -> None:
    """Print what swarms and clients are doing."""
    swarm_status.show_swarms(swarms)
    if clients or not swarms:
        show_status(clients)


def check_alive(rows: list[dict[str, Any]]) -> None:
    """Raise unless every daemon that runs answers, and one at least, for supervisors.

    A directory without a daemon may be of an earlier federation, or of other data.

    Raises:
        Unreachable: one does not, or there is none.
    """
    some = any(row["answers"] for row in rows)
    silent = [
        str(row.get("data") or row["name"])
        for row in rows
        if not row["answers"] and (row.get("running") or not some)
    ]
    if silent or not some:
        raise Unreachable(
            f"no client's daemon answers{' for ' if silent else ''}{', '.join(silent)}."
        )


def _addresses(home: Home) -> list[str]:
    try:
        enrolment = home.enrolment()
    except FcilError:
        return []
    return list(enrolment.addresses) if enrolment else []


def one_journal(home: Home, since: datetime | None) -> dict[str, Any]:
    """Return what left through one client.

    Args:
        home: its directory.
        since: only envelopes that left or were answered from then on (UTC).
    """
    rows, damaged = sent_journal.read(home.directory)
    if since is not None:
        rows = [row for row in rows if sent_journal.last_event(row) >= since.replace(tzinfo=UTC)]
    return {
        **enrolment_of(home),
        "files": [str(path) for path in sent_journal.files(home.directory)],
        "damaged_lines": damaged,
        "envelopes": rows,
    }


def show_status(rows: list[dict[str, Any]]) -> None:
    """Print what clients are doing."""
    away = []
    if not rows:
        typer.echo("No folder of this user is enrolled. Join with: fcil-client join --data FOLDER")
    for row in rows:
        typer.echo(f"{printable(row['name'])}  ({printable(row['data'])})")
        if row["damaged"]:
            typer.echo(f"  {printable(row['damaged'])}")
            continue
        if row.get("starting"):
            typer.echo("  starting or stopping; ask again in a moment")
            continue
        if row["running"] and not row["answers"]:
            typer.echo("  running, but it does not answer: it is suspended, or its disk hangs")
            continue
        if not row["running"]:
            waiting = f", {row['outbox']} update waits in the outbox" if row["outbox"] else ""
            start = client_command("join", row["data"], seat=row["seat"])
            typer.echo(f"  not running{waiting}; start: {start}")
            _show_model(row)
            away.append(row)
            continue
        typer.echo(f"  link     {row['link']} to {', '.join(row['server'])}")
        doing = f"{row['work']} {row['round']}" if row["round"] else row["work"]
        if row["progress"] and row["round"]:
            phase, done, total = row["progress"]
            doing += f", {phase} {100 * done // max(total, 1)} %"
        manners = row.get("manners")  # a daemon that an earlier version started has none
        if manners and manners["share"] == 0:
            doing += ", paused"
        typer.echo(f"  work     {doing}")
        if manners:
            _show_manners(manners, row["resources"])
        if row["run"]:
            typer.echo(f"  run      {row['run']}, {row['method']} on {row['backbone']}")
        if row["privacy"]:
            typer.echo(f"  privacy  {_terms_line(row['privacy'])}")
        if again := exemplars.exemplar_notice(row.get("exemplars") or 0):
            typer.echo(f"  images   {again}")
        typer.echo(f"  device   {row['device'] or 'not loaded yet'}")
        for work, count in row["micro_batch"].items():
            typer.echo(f"  memory   {work}: at most {count_of(count, 'image')} in one pass fit")
        if row["classes"]:
            train = [c["train"] for c in row["classes"].values() if c["train"]]
            classes = f"{len(train)} class{'' if len(train) == 1 else 'es'}"
            typer.echo(f"  images   {sum(train)} for training in {classes}")
        typer.echo(f"  counted  {count_of(row['counted'], 'update')} since the start")
        _show_model(row)
    if away:
        data, seat = (away[0]["data"], away[0]["seat"]) if len(away) == 1 else ("FOLDER", "")
        leave = client_command("leave", data, "--without-server", seat=seat)
        typer.echo(f"To drop a client whose server is gone permanently: {leave}")


def _show_model(row: dict[str, Any]) -> None:
    typer.echo(f"  model    {printable(current_model.describe(row['model']))}")


def _show_manners(manners: dict[str, Any], resources: dict[str, Any]) -> None:
    if manners["rules"] or manners["why"]:
        typer.echo(f"  manners  {_manners_line(manners)}")
    typer.echo(f"  takes    {resources['words']}; {_sensors_line(manners)}")


def _manners_line(manners: dict[str, Any]) -> str:
    rules = ", ".join(manners["rules"]) or "works at any time"
    return f"{rules}; now {printable(manners['why']) or 'it may work'}"


def _sensors_line(manners: dict[str, Any]) -> str:
    power = {True: "on mains", False: "on battery", None: "battery: not reported"}
    said = [power[manners["on_mains"]]]
    if manners["battery"] is not None:
        said[0] += f" ({manners['battery']:.0f} %)"
    hottest = manners["hottest"]
    if hottest is None:
        said.append("temperature: not reported")
    else:
        name, now, mark = hottest
        said.append(f"{printable(name)} {now:.0f} °C" + (f" of {mark:.0f} °C" if mark else ""))
    return ", ".join(said)


def _terms_line(fields: dict[str, Any]) -> str:
    own = describe_limits(fields["own"])
    terms = PrivacyTerms.model_validate(fields).describe()
    return f"{terms}; own limits: {own}" if own else terms
