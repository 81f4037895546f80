"""Ask for a run's terms without taking part: a dry run changes no server's list of clients.

Sources, in this order: a named method, as installed here; a server of this user on this machine,
through its control socket; the server that the folder is enrolled with, by a Hello that is followed
by a Bye; else the method that a server has by default is assumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import manifest_checks, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.half_precision import WEIGHTS, forms_of
from fcil_client.link import handshake
from fcil_client.link.handshake import Terms
from fcil_client.link.visit import visit
from fcil_client.membership.enrol import JoinFile, find_enrolled, find_server, no_server
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import (
    ConfigError,
    Locked,
    Unreachable,
    UsageError,
    WireError,
)
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.messages.messages import NONCE_BYTES, Bye, Welcome
from fcil_protocol.process import control_socket
from fcil_protocol.process.overrides import apply_override
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.trust.keys import PrivateKeys

_NAME_IT = "name the method: --method NAME"
DEFAULT_METHOD = "pilora"  # of a server whose federation.toml names none
_ASSUMED = (
    "assumed, as a server's default: none runs here, and a dry run does not enrol; the server's "
    "operator knows the method in use, and --method NAME shows another"
)
NO_LIMIT_BYTES = 1 << 40  # of a payload, if no server has reported its own limit


@dataclass(frozen=True)
class TaskClasses:
    """One class increment by the names of its classes.

    Attributes:
        known: the server lists the task; else it is an estimate, as if the folder were alone.
        closed: the task is over; only evaluations still use its classes, and late images count.
    """

    classes: tuple[str, ...]
    known: bool = True
    closed: bool = False


@dataclass(frozen=True)
class TermsPreview:
    """The terms and tasks that a client of a folder would meet.

    Attributes:
        source: ``method``, ``control``, ``hello`` or ``default``.
        told: source of the terms, as a sentence.
        tasks: those that exist or are listed; None if unknown.
        waiting: class names that the next task will have; None if there is none or it is unknown.
        rounds_per_task, evaluate: None if unknown.
    """

    terms: Terms
    source: str
    told: str
    tasks: tuple[TaskClasses, ...] | None = None
    waiting: tuple[str, ...] | None = None
    rounds_per_task: int | None = None
    evaluate: bool | None = None


def look(
    data: Path,
    server: str | None,
    method: str | None,
    overrides: Sequence[str],
    make: Dial = dial,
    *,
    seat: str = "",
) -> tuple[TermsPreview, Home | None]:
    """Find the terms that a folder would have to meet, and its home if it is enrolled.

    Args:
        data: the image folder.
        server: as in ``enrol.find``.
        method: use this installed one, and contact no server.
        overrides: ``method.option=value`` or ``run.backbone=name``, with ``method`` only.
        make: starts a link to one address.
        seat: its seat among the clients that share the folder.

    Raises:
        UsageError: options without a method.
        LinkError: the selected server does not run here, and the folder is no member of it.
        FcilError: the terms cannot be obtained.
    """
    if method is None and overrides:
        raise UsageError(
            "options were given, but no method.",
            action="For example: --method pilora -c method.rank=8",
        )
    if method is not None:
        known = Home.known(data, seat)
        return _installed(method, overrides), known[0] if len(known) == 1 else None
    asked, join = server, find_server(server)
    if join is not None:
        home = next((h for h in Home.known(data, seat) if _is_of(h, join)), None)
        try:
            return _ask_control(join), home
        except Unreachable:
            server = join.federation  # it left its join file; it may be elsewhere now
    enrolled = find_enrolled(data, server, seat)
    if enrolled is None:
        if asked is not None and join is None:
            raise no_server(data, asked)
        return replace(_installed(DEFAULT_METHOD, ()), source="default", told=_ASSUMED), None
    home, enrolment = enrolled
    try:
        lock = DirectoryLock.acquire(home.directory, "client")
    except Locked as error:  # a second link with its key would look like a stolen one
        raise Locked(error.message, action=f"Stop that client, or {_NAME_IT}") from error
    with lock:
        return asyncio.run(say_hello(home, enrolment, make)), home


def _is_of(home: Home, join: JoinFile) -> bool:
    enrolment = home.enrolment()
    return enrolment is not None and enrolment.federation == join.federation


# --- an installed method --------------------------------------------------------------------


def _installed(name: str, overrides: Sequence[str]) -> TermsPreview:
    fields: dict[str, Any] = {}
    for override in overrides:
        apply_override(fields, override)
    options, run, wire = (fields.pop(name, {}) for name in ("method", "run", "wire"))
    half, compact = wire.pop("half", WEIGHTS), wire.pop("compact", True)
    if not isinstance(compact, bool):
        raise ConfigError(f"wire.compact should be true or false, got {str(compact)[:40]!r}.")
    named = run.pop("backbone", "embedded")
    extra = [*fields, *(f"run.{key}" for key in run), *(f"wire.{key}" for key in wire)]
    if extra:
        raise ConfigError(
            f"a dry run of a method has no use for {', '.join(extra)[:200]}.",
            action="It takes method.OPTION=VALUE, run.backbone=NAME, wire.half=KINDS and "
            "wire.compact=BOOLEAN.",
        )
    method = registry.load_method(name)
    hparams = registry.make_hparams(method, options)
    backbone = backbone_by_name(str(named)) if method.needs_backbone else NO_BACKBONE
    manifest_checks.check_manifest(method, backbone, hparams)
    method = registry.with_forms(method, forms_of(half, name, method.half))
    manifest_checks.check_uploads(method, hparams, backbone)
    digest = registry.schema_digest(method, hparams, backbone)
    terms = Terms(
        "", method, hparams, backbone, digest, NO_LIMIT_BYTES, credit=1,
        compact=compact, training_metrics=True,
    )  # fmt: skip
    return TermsPreview(terms, "method", "as the method is installed here; no server was asked")


# --- a server of this machine ---------------------------------------------------------------


def _ask_control(join: JoinFile) -> TermsPreview:
    reply = control_socket.ask(join.directory, "outlook")
    try:
        welcome = Welcome(
            server_nonce=bytes(NONCE_BYTES), certificate=b"", ready=False, **reply["terms"]
        )
        tasks = tuple(TaskClasses(tuple(t["classes"]), closed=t["closed"]) for t in reply["tasks"])
        waiting = reply["waiting"]
        return TermsPreview(
            terms=handshake.read_terms(welcome),
            source="control",
            told=f"as the server {join.name} on this machine runs it (run {welcome.run})",
            tasks=tasks,
            waiting=None if waiting is None else tuple(waiting),
            rounds_per_task=reply["rounds_per_task"],
            evaluate=reply["evaluate"],
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise WireError(
            f"the server {join.name} answers in a form of another version.",
            action="Install the same fcil version on both sides.",
        ) from error


# --- a server elsewhere ---------------------------------------------------------------------


async def say_hello(home: Home, enrolment: Enrolment, make: Dial = dial) -> TermsPreview:
    """Send Hello to the server of an enrolled folder, take the terms, and leave.

    The server records that this client connected and left; no class is announced.

    Raises:
        Unreachable: no address answers.
        TrustError, MethodMismatch, WireError: the reason why this client could not take part.
    """
    async with visit(enrolment, PrivateKeys.load_or_new(home.keys_path), make) as (line, welcome):
        terms = handshake.read_terms(welcome)
        line.send(Bye(reason="a dry run asked for the terms"))
        await asyncio.sleep(0.05)  # let the goodbye leave the socket
        address = line.address
    return TermsPreview(
        terms,
        "hello",
        f"as the server at {address} runs it (run {terms.run}); it noted that this client "
        "connected and left",
    )
