"""Webhooks: news of the federation as signed HTTP requests to an address of the operator's.

The convention is that of Standard Webhooks (https://www.standardwebhooks.com): ``webhook-id``,
``webhook-timestamp`` and ``webhook-signature``, an HMAC-SHA256 over the three.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, ValidationError, field_validator

from fcil_protocol.errors import ConfigError, FcilError, LinkError
from fcil_protocol.formats import iso_time, with_iso_times
from fcil_protocol.storage.atomic_files import read_private
from fcil_server.federation.addresses import is_loopback
from fcil_server.reports.results.news import NewsItem
from fcil_server.reports.sinks.contract import Options

SECRET_PREFIX = "whsec_"  # noqa: S105 - how every secret of the convention begins
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
MAKE_ONE = "Make one: (umask 077; echo whsec_$(openssl rand -base64 32) > webhook.secret)"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

Event = Literal["round_closed", "task_learned", "run_done", "client_refused", "note"]


class WebhookOptions(Options):
    """Options of one webhook: its table in ``[webhooks]``."""

    url: str = Field(description="https, or http on the loopback address", max_length=2000)
    secret_file: str = Field(description="file (0600) with the secret that signs: `whsec_...`")
    events: list[Event] = Field(
        ["round_closed", "task_learned", "run_done", "client_refused"],
        min_length=1,
        description="kinds of news that are sent; `note`: all other notes",
    )
    timeout_s: float = Field(10.0, gt=0, le=60, description="for one request, in seconds")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = _split(url)
        if parts.username or parts.password:
            raise ValueError("an address with a password would be in files: use the secret")
        if not parts.hostname or parts.fragment:
            raise ValueError("expected an address such as https://hooks.example/fcil")
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname)):
            raise ValueError("expected https, or http on the loopback address")
        return url


def _split(url: str) -> SplitResult:
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("an address has printable ASCII characters without spaces")
    parts = urlsplit(url)
    _ = parts.port  # raises for a port that is no number
    return parts


@dataclass(frozen=True)
class Webhook:
    """A webhook with its options, checked."""

    name: str
    options: WebhookOptions


def choose_webhooks(given: Mapping[str, Any]) -> list[Webhook]:
    """Check the webhooks of a configuration, and their secrets.

    Raises:
        ConfigError: one message that names every fault.
    """
    found, faults = [], []
    for name, options in given.items():
        try:
            found.append(choose_webhook(name, options))
        except ConfigError as error:
            faults.append(str(error).rstrip("."))
    if faults:
        raise ConfigError(f"{'; '.join(faults)}.")
    return found


def choose_webhook(name: str, given: Any) -> Webhook:
    """Check one webhook.

    Raises:
        ConfigError: one message that names every fault.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"webhooks.{name[:40]}: expected a name of 1 to 32 small letters, digits and dashes."
        )
    try:
        options = WebhookOptions.model_validate(given)
    except ValidationError as error:
        # No value: an address may hold a password, and errors go to logs.
        faults = [
            f"{'.'.join(str(x) for x in ('webhooks', name, *e['loc']))}: "
            f"{e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        raise ConfigError(f"{'; '.join(faults)}.") from error
    # Relative to where the server is started, also for the process.
    place = str(Path(options.secret_file).absolute())
    options = options.model_copy(update={"secret_file": place})
    read_secret(name, options)
    return Webhook(name, options)


def read_secret(name: str, options: WebhookOptions) -> bytes:
    """Return the secret of a webhook.

    Raises:
        ConfigError: its file is missing, readable by others, or holds no secret.
    """
    place = f"webhooks.{name}.secret_file"
    try:
        text = read_private(Path(options.secret_file)).decode("ascii").strip()
        if not text.startswith(SECRET_PREFIX):
            raise ValueError(place)
        secret = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except FcilError as error:
        raise ConfigError(f"{place}: {error.message}", action=error.action) from error
    except (ValueError, binascii.Error) as error:
        text = f"{place}: {options.secret_file} does not hold {SECRET_PREFIX} and base64."
        raise ConfigError(text, action=MAKE_ONE) from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{place}: a secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, "
            f"got {len(secret)}.",
            action=MAKE_ONE,
        )
    return secret


@dataclass(frozen=True)
class SignedRequest:
    """One request of a webhook."""

    headers: Mapping[str, str]
    body: bytes


def sign(federation: str, item: NewsItem, at: float, now: float, secret: bytes) -> SignedRequest:
    """Return the request for one piece of news.

    Args:
        federation: name of the federation.
        item: the news.
        at: when it happened, unix seconds.
        now: unix seconds; a receiver refuses an old signature.
        secret: of the webhook.
    """
    content = {
        "type": item.kind.value,
        "timestamp": iso_time(at),
        "federation": federation,
        "data": with_iso_times(item.data),
    }
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    # The same at every attempt, so that a receiver knows what it has. The position is not: what
    # else came before the item may differ when the news is read again. The time tells federations
    # of the same name apart, and one from its restored backup.
    told = f"{federation}\n{item.kind}\n{item.key}\n{at!r}"
    number = f"msg_{hashlib.sha256(told.encode()).hexdigest()[:32]}"
    signed = f"{number}.{int(now)}.".encode() + body
    mac = base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "fcil",
        "webhook-id": number,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": f"v1,{mac}",
    }
    return SignedRequest(headers, body)


def send(options: WebhookOptions, request: SignedRequest) -> None:
    """Post a request; a redirection is a failure.

    Raises:
        LinkError: it was not answered with a status of 200 to 299.
    """
    parts = urlsplit(options.url)
    host, port = parts.hostname or "", parts.port
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
    more: dict[str, Any] = {}
    if parts.scheme == "https":
        connect, more = http.client.HTTPSConnection, {"context": ssl.create_default_context()}
    connection = connect(host, port, timeout=options.timeout_s, **more)
    # The library's limit is for each read: a receiver could answer a byte at a time.
    late = threading.Event()
    ending = threading.Timer(options.timeout_s, _cut, (connection, late))
    ending.daemon = True
    ending.start()
    try:
        connection.request("POST", path, request.body, dict(request.headers))
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        why = "timed out" if late.is_set() else str(error) or type(error).__name__
        raise LinkError(f"{host} did not take a webhook: {why[:120]}.") from error
    finally:
        ending.cancel()
        connection.close()
    if not 200 <= answer.status < 300:
        raise LinkError(f"{host} answered a webhook with the status {answer.status}.")


def _cut(connection: http.client.HTTPConnection, late: threading.Event) -> None:
    """End a connection that has taken too long: a read that waits for its data fails."""
    late.set()
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
