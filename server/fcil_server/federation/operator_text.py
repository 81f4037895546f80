"""The operator's orders, from commands and the dashboard: their values and their answers.

Both use the same sentences, so that a manual for one serves the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fcil_protocol.errors import UsageError
from fcil_protocol.process.terminal import printable
from fcil_server.federation.addresses import is_loopback

_NAMED = 8  # clients in one sentence
MIN_TICKET_S, MAX_TICKET_S = 60.0, 90 * 86_400.0

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds(text: str) -> float:
    """Read a duration such as 30m, 24h or 7d.

    Raises:
        UsageError: it is not one.
    """
    match = re.fullmatch(r"([0-9]{1,4})([mhd])", text)
    if match is None:
        raise UsageError(
            f"expected a duration such as 30m, 24h or 7d, got {text[:40]!r}.",
            action="Give a number and m, h or d.",
        )
    return int(match[1]) * _UNITS[match[2]]


def check_ticket_lifetime(lasts_s: Any) -> float:
    """Return a ticket's lifetime in seconds, if it is allowed.

    Raises:
        UsageError: it is no number, too short or too long.
    """
    if not isinstance(lasts_s, int | float) or not MIN_TICKET_S <= lasts_s <= MAX_TICKET_S:
        raise UsageError(
            f"a ticket lasts 1 minute to {MAX_TICKET_S / 86_400:.0f} days.",
            action="Give another --expires, such as 24h.",
        )
    return float(lasts_s)


def local_only_warning(addresses: Sequence[str]) -> str:
    """Return the warning about a ticket that is useless on other machines, or an empty string."""
    if not all(is_loopback(a.rpartition(":")[0].strip("[]")) for a in addresses):
        return ""
    return (
        "the ticket names only this machine's own address; for clients elsewhere set "
        "`[federation] listen` and `advertise`, then enrol again."
    )


def start_command(file: str, *, relay: bool) -> str:
    """Return the command for the device that will use the ticket in a file."""
    start = "fcil-server relay --listen HOST:PORT" if relay else "fcil-client join --data FOLDER"
    return f"{start} --ticket {file}"


def describe_done(op: str, told: Mapping[str, Any]) -> str:
    """Return the sentence for a completed order, from the server's answer to it."""
    match op:
        case "close_round":
            return "The round closes."
        case "pause":
            under_way = "The round under way continues to its end; then "
            first = under_way if told["round_open"] else "From now on "
            return f"{first}no round opens: fcil-server resume."
        case "resume":
            return "Rounds continue."
        case "drain":
            when = "when the round under way is over" if told["round_open"] else "now"
            return f"The server stops {when}."
        case "revoke":
            what = "ticket is withdrawn" if told.get("withdrawn") else "membership is revoked"
            behind, tickets = told.get("behind", ()), told.get("tickets", ())
            done = f"{printable(str(told['name']))}: the {what}."
            return f"{done}{_cut_off(behind)}{_withdrawn(tickets)}"
        case _:
            raise AssertionError(f"nothing is said of {op!r}")


def _cut_off(behind: Sequence[str]) -> str:
    """Return what becomes of the clients behind a revoked relay."""
    if not behind:
        return ""
    return (
        f" {_named(behind)} can connect only through it: revoke each and give it a new ticket "
        "to connect another way."
    )


def _withdrawn(tickets: Sequence[str]) -> str:
    """Return what becomes of the open tickets that lead through a revoked relay."""
    if not tickets:
        return ""
    return f" Open tickets that lead through it are withdrawn: {_named(tickets)}."


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(printable(name) for name in names[:_NAMED]) + more
