"""Acts through the API: each the same control command as its CLI verb."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fcil_protocol.errors import (
    ConfigError,
    FcilError,
    InternalError,
    Starting,
    StorageError,
    Timeout,
    Unreachable,
    UsageError,
    WireError,
)
from fcil_server.federation.api_tokens import ApiToken
from fcil_server.federation.operator_text import describe_done, seconds, start_command
from fcil_server.web.api import inputs
from fcil_server.web.api.past_acts import PastActs, key_of, request_digest
from fcil_server.web.requests import RefusedRequest, in_thread, one_of

ACTS = 2  # acts that are sent to the server at the same time
ACT_WAIT_S = 1.0  # for a turn: an act must not happen after its request was given up
ASK_S = 5.0  # for the server to answer
LONG_S = 25.0  # for acts that read a state or a folder, or rewrite the tables of all runs
_BY = "api"  # with the token's name: addition to the user's number in the audit log
_MANY = "the server has not answered other acts yet; nothing was done."
# After these an act may have been carried out: no answer came, a part of one, or the server's disk
# failed in the middle.
_UNSURE = (InternalError, StorageError, Timeout, Unreachable, WireError)

Ask = Callable[..., dict[str, Any]]
Told = Mapping[str, Any]


@dataclass(frozen=True)
class Act:
    """A control command, and the answer made from the server's.

    Attributes:
        op: the command. fields: its fields.
        view: makes the answer.
        refused: status of the answer when the server refuses.
        private: the answer, which is secret or names a client, is never written to disk.
        wait_s: for the server to carry it out; below the time limit of a request.
    """

    op: str
    fields: dict[str, Any] = field(default_factory=dict)
    view: Callable[[Told], dict[str, Any]] = dict
    refused: int = 409
    private: bool = False
    wait_s: float = ASK_S


class Acts:
    """Carries out acts.

    Args:
        ask: asks the running server: ``ask(op, wait_s, **fields)``.
        past: the remembered acts.
    """

    def __init__(self, ask: Ask, past: PastActs) -> None:
        self._ask = ask
        self._past = past
        self._turns = asyncio.Semaphore(ACTS)
        self._threads = ThreadPoolExecutor(max_workers=ACTS, thread_name_prefix="act")

    async def carry_out(
        self,
        act: Act,
        token: ApiToken,
        *,
        place: tuple[str, str],
        body: Told,
        key: str | None,
        status: int,
    ) -> tuple[int, dict[str, Any]]:
        """Carry out an act; return the status and the data of its answer.

        Args:
            act: the act.
            token: of the request.
            place: method and path of the request.
            body: of the request.
            key: its ``Idempotency-Key``; None: it is carried out each time.
            status: of a good answer.

        Raises:
            UsageError: the key is none.
            RefusedRequest: the server refuses; there are too many; or the key is of another or a
                lost act.
            Unreachable, Timeout: the server does not run, or does not answer.
        """
        name = None if key is None else key_of(token.digest, key)
        request = request_digest(*place, dict(body))

        def work() -> tuple[int, dict[str, Any]]:
            try:
                return self._once(act, token, name, request, status)
            except (UsageError, ConfigError) as error:  # the input has the form that it should have
                raise RefusedRequest(act.refused, error) from error

        async with one_of(self._turns, ACT_WAIT_S, _MANY):
            return await in_thread(self._threads, work)

    def _once(
        self, act: Act, token: ApiToken, key: str | None, request: str, status: int
    ) -> tuple[int, dict[str, Any]]:
        if key is None:
            return status, act.view(self._send(act, token))
        found = self._past.begin(key, request)
        if found is not None:
            return found
        try:
            content = act.view(self._send(act, token))
        except FcilError as error:
            if isinstance(error, _UNSURE) and not isinstance(error, Starting):
                self._past.lost(key)
            else:
                self._past.undone(key)
            raise
        except BaseException:
            self._past.lost(key)
            raise
        self._past.done(key, status, content, private=act.private)
        return status, content

    def _send(self, act: Act, token: ApiToken) -> dict[str, Any]:
        try:
            return self._ask(act.op, act.wait_s, **act.fields, by=_BY, token=token.name)
        except Starting:
            raise
        except Timeout as error:  # a sent command cannot be taken back
            raise Timeout(
                "the server did not answer in time; the act may still happen.",
                action="Check whether it did before you repeat it.",
            ) from error
        except Unreachable as error:  # its own message names the server's directory
            raise Unreachable("the server does not answer.", action="Try again later.") from error


# The acts.


def enrol(body: inputs.EnrolBody) -> Act:
    """Make a ticket."""
    fields: dict[str, Any] = {"name": body.name, "lasts_s": seconds(body.lasts)}
    fields["relay"] = body.relay
    if body.via is not None:
        fields["via"] = body.via

    def view(told: Told) -> dict[str, Any]:
        return {"name": body.name, **told, "run_this": start_command("FILE", relay=body.relay)}

    return Act("enrol", fields, view, private=True)


def revoke(client: str, body: inputs.RevokeBody) -> Act:
    """End a membership, or withdraw an open ticket of this name."""
    fields = {"name": client, "exact": True, "why": body.why, "keep": body.keep_update}

    def view(told: Told) -> dict[str, Any]:
        return {"withdrawn": False, "behind": [], "tickets": [], **told}

    return Act("revoke", fields, view, refused=404, private=True)


def erase(client: str) -> Act:
    """Erase all that identifies a client."""
    fields = {"name": client, "exact": True}
    return Act("erase", fields, refused=404, private=True, wait_s=LONG_S)


def submit(body: inputs.SubmitBody) -> Act:
    """Append a run to the queue."""
    return Act("submit_run", {"title": body.title, "settings": body.settings}, wait_s=LONG_S)


def cancel(number: int) -> Act:
    """Remove a waiting run from the queue."""
    return Act("cancel_run", {"number": number}, refused=404)


def export(body: inputs.ExportBody) -> Act:
    """Begin an export."""
    fields = {"format": body.format, "state": body.state}
    if body.run is not None:
        fields["run"] = body.run
    return Act("export", fields, wait_s=LONG_S)


def promote(body: inputs.PromoteBody) -> Act:
    """Choose the state whose model clients use."""
    return Act("promote", {"state": body.state}, wait_s=LONG_S)


def stop_run() -> Act:
    """End the newest run for good."""
    return Act("stop_run")


def set_mode(op: str) -> Act:
    """Pause, resume or drain."""
    return Act(op)


def close_round(body: inputs.CloseRoundBody) -> Act:
    """Close the round under way."""
    fields: dict[str, Any] = {"rest_of_task": body.rest_of_task}
    if body.only is not None:
        fields["only"] = body.only.model_dump()
    return Act("close_round", fields, lambda told: {"says": describe_done("close_round", told)})


def change_classes(change: str, names: list[str]) -> Act:
    """Change class names of the newest run."""
    return Act("classes", {"change": change, "names": names})
