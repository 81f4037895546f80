"""Operator actions on the dashboard: each the same control command as its CLI verb.

An action takes two steps. `PageActions.prepare` describes in a sentence the effect it would have
now and returns a confirmation token; `PageActions.carry_out` takes the token and carries out
exactly that.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import segno

from fcil_protocol.errors import NotNow, Timeout, UsageError
from fcil_server.federation.eligibility import REVOKED
from fcil_server.federation.operator_text import (
    check_ticket_lifetime,
    describe_done,
    local_only_warning,
    seconds,
    start_command,
)
from fcil_server.federation.roster import MAX_WHY, check_name, named
from fcil_server.ledger.enums import Role
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import ClientRow
from fcil_server.reports.results.client_history import ClientReader
from fcil_server.web.errors import begun
from fcil_server.web.page.access.sessions import BrowserSession
from fcil_server.web.page.actions.confirmations import GOOD_S, Confirmations, PlannedAct

Ask = Callable[..., dict[str, Any]]
Fields = Mapping[str, Any]

_BY = "page"  # addition to the user's number in the audit log

# Fields of each act: field -> type; a missing field has its type's empty value.
_TAKES: dict[str, dict[str, type]] = {
    "enrol": {"name": str, "lasts": str, "relay": bool, "via": str},
    "revoke": {"client": str, "name": str, "why": str, "keep_update": bool},
    "pause": {},
    "resume": {},
    "drain": {},
    "close_round": {"rest_of_task": bool},
}
NAMES = tuple(_TAKES)

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can hold an unpaired one; no file or ledger can


class PageActions:
    """The actions on one federation; several threads may use it.

    Args:
        directory: of the federation, whose ledger names the members concerned.
        ask: asks the running server: ``ask(op, **fields)``, as `process.control_socket.ask`.
        waiting: the actions that wait for their confirmation.
    """

    def __init__(self, directory: Path, ask: Ask, waiting: Confirmations | None = None) -> None:
        self._ledger = directory / LEDGER_NAME
        self._ask = ask
        self._waiting = Confirmations() if waiting is None else waiting

    def prepare(self, session: BrowserSession, fields: Fields) -> dict[str, Any]:
        """Describe the effect an action would have now, and return its confirmation token.

        Args:
            session: the caller's.
            fields: ``act`` and its fields.

        Raises:
            UsageError: there is no such action, or it cannot be done as requested.
            Unreachable: the server does not run.
        """
        request = _checked(fields)
        plan = self._plan(request)
        word = self._waiting.add(session.id, request, plan)
        return {"confirm": word, "says": plan.says, "act": plan.act, "good_s": GOOD_S}

    def carry_out(self, session: BrowserSession, fields: Fields) -> dict[str, Any]:
        """Carry out a confirmed action, and return the sentence about it.

        Raises:
            UsageError: the token is no longer good, or the server refuses.
            NotNow: the effect would no longer be as described.
            Unreachable, Timeout: the server does not run, or does not answer.
        """
        word = fields.get("confirm")
        if set(fields) != {"confirm"} or not isinstance(word, str):
            raise UsageError(
                "only what was confirmed is carried out: send the confirmation's token and "
                "nothing else."
            )
        request, plan = self._waiting.redeem(session.id, word)
        now = self._plan(request)
        if (now.op, now.fields, now.target) != (plan.op, plan.fields, plan.target):
            raise NotNow(
                f"nothing was done, because it is no longer what you confirmed. Now: {now.says}",
                action="Start again if you want that.",
            )
        try:
            told = self._ask(plan.op, **plan.fields, by=_BY)
        except Timeout as error:  # a sent command cannot be taken back
            raise Timeout(
                f"{error.message} What you confirmed may still happen.",
                action="Check whether it did, here or in the audit log, before you start again.",
            ) from error
        if plan.op == "enrol":
            return _issued(request, told)
        return {"says": describe_done(plan.op, told)}

    def _plan(self, request: Fields) -> PlannedAct:
        """Plan the effect of an action now, from the server's answer and the ledger."""
        live = self._ask("live")  # raises if the server does not run
        act = request["act"]
        if act == "enrol":
            with Ledger(self._ledger, read_only=True) as ledger:
                return _plan_enrol(ledger, request)
        if act == "revoke":
            with Ledger(self._ledger, read_only=True) as ledger:
                return _plan_revoke(ledger, request, live)
        if act == "close_round":
            return _plan_close(request, live)
        return PlannedAct(act, act, {}, (), _MODES[act](live))


def _checked(fields: Fields) -> dict[str, Any]:
    """Return an action's name and all of its fields, each of its type.

    Raises:
        UsageError: with the known names.
    """
    act = fields.get("act")
    takes = _TAKES.get(act) if isinstance(act, str) else None
    if takes is None:
        raise UsageError(f"there is no action {ascii(act)[:40]}; known are {', '.join(NAMES)}.")
    unknown = sorted(set(fields) - set(takes) - {"act"})
    if unknown:
        known = ", ".join(takes) or "no field"
        raise UsageError(f"{act} takes {known}; got {ascii(unknown[0])[:40]}.")
    request: dict[str, Any] = {"act": act}
    for name, kind in takes.items():
        value = fields.get(name, kind())
        if type(value) is not kind or (isinstance(value, str) and _SURROGATE.search(value)):
            words = {str: "a text", bool: "true or false"}[kind]
            raise UsageError(f"{name} of {act} is {words}, got {ascii(value)[:40]}.")
        request[name] = value
    return request


def _plan_enrol(ledger: Ledger, request: Fields) -> PlannedAct:
    name = check_name(request["name"])
    ledger.clients.refuse_taken(name)
    lasts_s = check_ticket_lifetime(seconds(request["lasts"]))
    relay = request["relay"]
    fields: dict[str, Any] = {"name": name, "lasts_s": lasts_s, "relay": relay}
    way = ""
    if request["via"]:
        fields["via"] = request["via"]
        named(ledger, request["via"])  # the server decides if it can take one
        way = f" through the relay {request['via']!r}"
    older = " The open ticket of this name becomes useless." if ledger.tickets.is_open(name) else ""
    says = (
        f"Makes a ticket that lets one new {'relay' if relay else 'client'} join as {name!r}"
        f"{way}, once, within {request['lasts']}. It holds a secret and is shown once: hand it "
        f"over as you would a key.{older}"
    )
    return PlannedAct("enrol", "enrol", fields, (), says)


def _plan_revoke(ledger: Ledger, request: Fields, live: Fields) -> PlannedAct:
    name = request["client"] or request["name"]
    if ledger.clients.by_name(name) is None and ledger.tickets.is_open(name):
        says = f"Withdraws the open ticket for {name!r}: no client can join with it any more."
        fields = {"name": name, "ticket": True}
        return PlannedAct("revoke", "revoke", fields, ("ticket", name), says)
    row = named(ledger, name)
    why, keep = request["why"][:MAX_WHY], request["keep_update"]
    fields = {"name": row.client_id, "why": why, "keep": keep}
    update = f" {_update_stays(live, keep)}" if row.role is Role.CLIENT else ""
    says = (
        f"Revokes {_who(ledger, row)}: its connection ends now and its key is refused from now "
        f"on.{update} Reason given to it: {why or REVOKED!r}."
    )
    return PlannedAct("revoke", "revoke", fields, ("client", row.client_id), says)


def _who(ledger: Ledger, row: ClientRow) -> str:
    """Return a member in words: name, id, and its part in rounds."""
    known = f"{row.name!r} (id {row.client_id[:8]}"
    if row.role is Role.RELAY:
        behind = len(ledger.clients.behind(row.client_id))
        return f"the relay {known}), through which {behind} members connect"
    rounds = ClientReader(ledger.database).counted(row.client_id)
    return f"{known}, counted in {rounds} round{'' if rounds == 1 else 's'})"


def _update_stays(live: Fields, keep: bool) -> str:
    if live["round"] is None:
        return "No round is under way."
    kept = "still counts" if keep else "is excluded"
    return f"Its update to the round under way ({_place(live)}) {kept}."


def _plan_close(request: Fields, live: Fields) -> PlannedAct:
    under_way = live["round"]
    if under_way is None:
        raise UsageError(
            "no round is under way.", action="fcil-server status shows what the server is doing."
        )
    rest = request["rest_of_task"]
    answered, asked = under_way["answered"], under_way["asked"]
    left = (
        "the server does not wait for the others" if answered else "with no update, it is skipped"
    )
    more = " The remaining rounds of its task close too, at once." if rest else ""
    says = (
        f"Ends the round under way ({_place(live)}) with the updates received so far: {answered} "
        f"of {asked} have answered; {left}.{more}"
    )
    only = {key: under_way[key] for key in ("task", "kind", "round")}
    target = (live["run"], *only.values())
    fields = {"rest_of_task": rest, "only": only}
    return PlannedAct("close_round", "close_round", fields, target, says)


def _place(live: Fields) -> str:
    under_way = live["round"]
    return f"task {under_way['task']}, {under_way['kind']} {under_way['round']}"


def _pause(live: Fields) -> str:
    if live["mode"] == "paused":
        return "The server is already paused; nothing changes."
    if live["round"] is not None:
        return (
            f"The round under way ({_place(live)}) continues to its end; then no round opens until "
            "you resume."
        )
    return "From now on no round opens until you resume."


def _resume(live: Fields) -> str:
    return {
        "paused": "Rounds continue: the next one opens as soon as it can.",
        "draining": "Cancels the drain: the server does not stop, and rounds continue.",
    }.get(live["mode"], "Rounds are running already; nothing changes.")


def _drain(live: Fields) -> str:
    when = "now" if live["round"] is None else f"when the round under way ({_place(live)}) is over"
    return (
        f"Stops the server {when}; no other round opens. This dashboard stops with it. Start it "
        "again with: fcil-server serve."
    )


_MODES: dict[str, Callable[[Fields], str]] = {"pause": _pause, "resume": _resume, "drain": _drain}


def _issued(request: Fields, told: Fields) -> dict[str, Any]:
    """Return the view of a new ticket; this is the only time that it is shown."""
    text = str(told["ticket"])
    return {
        "says": f"The ticket for {request['name']!r} is valid once, within {request['lasts']}.",
        "ticket": text,
        "qr": qr_svg(text),
        "expires": told["expires"],
        "addresses": list(told["addresses"]),
        "fingerprint": told["fingerprint"],
        "run_this": start_command("FILE", relay=request["relay"]),
        "warning": begun(local_only_warning(told["addresses"]).replace("`", "")),
    }


def qr_svg(text: str) -> str:
    """Return a ticket as a picture for a phone's camera, black on white in any theme."""
    out = io.BytesIO()
    # Alphanumeric mode: a ticket has only capitals and digits.
    segno.make(text, error="l", micro=False).save(
        out, kind="svg", xmldecl=False, border=4, light="white", omitsize=True, svgclass="qr"
    )
    return out.getvalue().decode("utf-8").strip()
