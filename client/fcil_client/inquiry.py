"""Ask for a run's terms without taking part: a dry run changes no server's list of clients.

Three ways, in this order: a method that is named, with what is installed here; a server of
this user on this machine, through its control socket; else the server that the folder is
enrolled with, by a Hello that is followed by a Bye.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fcil_adapters import registry
from fcil_adapters.describe import NO_BACKBONE
from fcil_adapters.vit_sizes import backbone_by_name
from fcil_client import greeting
from fcil_client.connection import Connection
from fcil_client.daemon import ADDRESS_S
from fcil_client.enrolment import JoinFile, find_enrolled, find_server, load_keys
from fcil_client.greeting import Terms
from fcil_client.home import Enrolment, Home
from fcil_client.outbox import MAX_PLAIN_BYTES
from fcil_protocol import control
from fcil_protocol.dialling import REFUSALS, Dial, dial
from fcil_protocol.errors import (
    ConfigError,
    Locked,
    TrustError,
    Unreachable,
    UsageError,
    WireError,
    from_code,
)
from fcil_protocol.files import DirectoryLock
from fcil_protocol.messages import NONCE_BYTES, Bye, Nack, Received, Welcome, parse
from fcil_protocol.overrides import apply_override
from fcil_protocol.transport import LinkNews

ANSWER_S = 15.0  # for a server to answer a Hello
_NAME_IT = "name the method: --method NAME"


@dataclass(frozen=True)
class Task:
    """One class increment by the names of its classes.

    Attributes:
        known: the server says so; else it is what would be if the folder were alone.
        closed: it is over; only evaluations still meet its classes.
    """

    classes: tuple[str, ...]
    known: bool = True
    closed: bool = False


@dataclass(frozen=True)
class Outlook:
    """What a client of a folder would meet.

    Attributes:
        source: ``method``, ``control`` or ``hello``.
        told: where the terms are from, in a sentence.
        tasks: those that exist or are listed; None if that is not known.
        waiting: names that the next task will have; None if there is none or it is not known.
        rounds_per_task, evaluate: None if that is not known.
    """

    terms: Terms
    source: str
    told: str
    tasks: tuple[Task, ...] | None = None
    waiting: tuple[str, ...] | None = None
    rounds_per_task: int | None = None
    evaluate: bool | None = None


def look(
    data: Path, server: str | None, method: str | None, overrides: Sequence[str], make: Dial = dial
) -> tuple[Outlook, Home | None]:
    """Find the terms that a folder would have to meet, and its home if it is enrolled.

    Args:
        data: the image folder.
        server: as in ``enrolment.find``.
        method: take this installed one, and ask nobody.
        overrides: ``method.option=value`` or ``run.backbone=name``, with ``method`` only.
        make: starts a link to one address.

    Raises:
        UsageError: nobody can be asked, since the folder is not enrolled.
        FcilError: the terms cannot be had.
    """
    if method is None and overrides:
        raise UsageError(
            "options were given, but not of which method.",
            action="For example: --method pilora -c method.rank=8",
        )
    if method is not None:
        known = Home.known(data)
        return _installed(method, overrides), known[0] if len(known) == 1 else None
    join = find_server(server)
    if join is not None:
        home = next((h for h in Home.known(data) if _is_of(h, join)), None)
        try:
            return _ask_control(join), home
        except Unreachable:
            server = join.federation  # it left its join file; perhaps it is elsewhere now
    enrolled = find_enrolled(data, server)
    if enrolled is None:
        raise UsageError(
            f"{data} is not enrolled with a server that could be asked, and a dry run enrols "
            "nobody.",
            action=f"Start the server on this machine, or {_NAME_IT}",
        )
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


def _installed(name: str, overrides: Sequence[str]) -> Outlook:
    fields: dict[str, Any] = {}
    for override in overrides:
        apply_override(fields, override)
    options, run = fields.pop("method", {}), fields.pop("run", {})
    named = run.pop("backbone", "embedded")
    extra = [*fields, *(f"run.{key}" for key in run)]
    if extra:
        raise ConfigError(
            f"a dry run of a method has no use for {', '.join(extra)[:200]}.",
            action="It takes method.OPTION=VALUE and run.backbone=NAME.",
        )
    method = registry.load_method(name)
    hparams = registry.make_hparams(method, options)
    backbone = backbone_by_name(str(named)) if method.needs_backbone else NO_BACKBONE
    registry.check_uploads(method, hparams, backbone)
    digest = registry.schema_digest(method, hparams, backbone)
    terms = Terms("", method, hparams, backbone, digest, MAX_PLAIN_BYTES, credit=1)
    return Outlook(terms, "method", "as the method is installed here; no server was asked")


# --- a server of this machine ---------------------------------------------------------------


def _ask_control(join: JoinFile) -> Outlook:
    reply = control.ask(join.directory, "outlook")
    try:
        welcome = Welcome(
            server_nonce=bytes(NONCE_BYTES), certificate=b"", ready=False, **reply["terms"]
        )
        tasks = tuple(Task(tuple(t["classes"]), closed=t["closed"]) for t in reply["tasks"])
        waiting = reply["waiting"]
        return Outlook(
            terms=greeting.read_terms(welcome),
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


async def say_hello(home: Home, enrolment: Enrolment, make: Dial = dial) -> Outlook:
    """Say Hello to the server of an enrolled folder, take the terms, and leave.

    The server notes that this client connected and left; no class is announced.

    Raises:
        Unreachable: no address answers.
        TrustError, MethodMismatch, WireError: why this client could not take part.
    """
    line = Connection(enrolment, load_keys(home.keys_path), make)
    line.open()
    try:
        async with asyncio.timeout(ANSWER_S):
            terms = await _terms(line, enrolment)
    except TimeoutError as error:
        raise Unreachable(
            f"no server at {', '.join(enrolment.addresses)} answered within {ANSWER_S:.0f} s.",
            action=Unreachable.default_action(),
        ) from error
    finally:
        line.send(Bye(reason="a dry run asked for the terms"))
        await asyncio.sleep(0.05)  # let the goodbye leave the socket
        line.close()
    return Outlook(
        terms,
        "hello",
        f"as the server at {line.address} runs it (run {terms.run}); it noted that this client "
        "connected and left",
    )


async def _terms(line: Connection, enrolment: Enrolment) -> Terms:
    while True:
        news = await line.recv()
        if isinstance(news, LinkNews):
            await _link_news(line, enrolment, news)
        elif (terms := _answer(line, enrolment, parse(news))) is not None:
            return terms


async def _link_news(line: Connection, enrolment: Enrolment, news: LinkNews) -> None:
    if news.state == "up":
        line.begin()
        methods, _ = greeting.installed_methods()
        line.send(
            greeting.hello(
                enrolment,
                nonce=line.nonce,
                package=version("fcil"),
                methods=methods,
                device=f"{platform.system()} {platform.machine()}",
                terms=None,
                claim=None,
                ready=False,
            )
        )
    elif news.state == "refused":
        raise TrustError(f"{line.address}: {REFUSALS[news.reason]}")
    elif news.reason == "unreachable" and line.has_other_addresses:
        await asyncio.sleep(ADDRESS_S)
        line.turn()


def _answer(line: Connection, enrolment: Enrolment, received: Received) -> Terms | None:
    message = received.message
    if isinstance(message, Welcome) and message.nonce == line.nonce:
        server = greeting.read_server(message, enrolment)
        line.accept(received, message, server)
        return greeting.read_terms(message)
    if isinstance(message, Nack):
        line.check(received)
        raise from_code(message.code, message.text, message.action)
    return None
