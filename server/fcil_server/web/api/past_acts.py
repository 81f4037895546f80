"""Acts that were requested with an ``Idempotency-Key``: a repeated request gets the first's answer.

They are remembered for a day, the newest `MAX_ACTS` of them, in ``api.requests`` (0600), so that
they outlive this process. An act is noted before it is sent to the server: one whose answer was
lost with a process is never carried out a second time. New tickets, which are secret, answers that
name a client, which may be erased, and long ones stay in memory: the file has no personal data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fcil_protocol.errors import CorruptFile, NotNow, StorageError, UsageError
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_server.federation.api_tokens import REQUESTS_NAME
from fcil_server.web.requests import RefusedRequest

LIFE_S = 86_400.0
MAX_ACTS = 1000
MAX_KEY = 200  # characters
MAX_CONTENT = 1000  # characters of an answer that is written
MAX_BYTES = 2 << 20  # of the file
VERSION = 1  # of its format
# What reading it may raise.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_REMEDY = "Remove it: requests that are repeated would then be carried out again."
_LOOK = "Look at the state or the audit log, and use another Idempotency-Key to do it again."


@dataclass(frozen=True)
class PastAct:
    """One act.

    Attributes:
        request: digest of its method, address and body.
        at: unix seconds of its request.
        status: of the answer; 0: there is none yet, or it was lost.
        content: of the answer; None: it is not written, or there is none.
    """

    request: str
    at: float
    status: int = 0
    content: dict[str, Any] | None = None


class PastActs:
    """The remembered acts; several threads may use it.

    Args:
        directory: of the federation.
        clock: unix seconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = directory / REQUESTS_NAME
        self._clock = clock
        self._lock = threading.Lock()
        self._acts: dict[str, PastAct] | None = None  # by key; the oldest first
        self._under_way: set[str] = set()
        self._unwritten: dict[str, dict[str, Any]] = {}  # answers that are not written

    def begin(self, key: str, request: str) -> tuple[int, dict[str, Any]] | None:
        """Note an act that will be carried out now; or return the answer to the same one.

        Args:
            key: `key_of` its request.
            request: digest of the request.

        Raises:
            RefusedRequest: the key was used for another request; or the first request is under
                way, or its answer was lost.
            CorruptFile, DiskFull, StorageError: nothing may be carried out.
        """
        with self._lock:
            acts = self._read()
            past = acts.get(key)
            if past is None:
                self._under_way.add(key)
                try:
                    self._write({**acts, key: PastAct(request, self._clock())})
                except BaseException:
                    self._under_way.discard(key)
                    raise
                return None
            if past.request != request:
                used = UsageError(
                    "this Idempotency-Key was used for another request.",
                    action="Give each act a key of its own.",
                )
                raise RefusedRequest(409, used)
            return self._replay(key, past)

    def _replay(self, key: str, past: PastAct) -> tuple[int, dict[str, Any]]:
        if key in self._under_way:
            busy = NotNow(
                "the first request with this Idempotency-Key is under way.",
                action="Repeat it in a few seconds.",
            )
            raise RefusedRequest(409, busy)
        if not past.status:
            lost = "the first request with this Idempotency-Key may have been carried out"
            raise RefusedRequest(409, NotNow(f"{lost}; its answer was lost.", action=_LOOK))
        content = self._unwritten.get(key) if past.content is None else past.content
        if content is None:
            gone = "this was carried out; its answer was private or long, and is not kept."
            raise RefusedRequest(409, NotNow(gone, action=_LOOK))
        return past.status, content

    def done(self, key: str, status: int, content: dict[str, Any], *, private: bool) -> None:
        """Remember an answer; a disk that is full costs no more than its repetition."""
        with self._lock:
            acts = self._read()
            unwritten = private or len(json.dumps(content)) > MAX_CONTENT
            kept = None if unwritten else content
            if unwritten:
                self._unwritten[key] = content
            self._under_way.discard(key)
            if key in acts:
                self._note({**acts, key: replace(acts[key], status=status, content=kept)})

    def undone(self, key: str) -> None:
        """Forget an act that was refused: nothing was done."""
        with self._lock:
            self._under_way.discard(key)
            self._note({k: act for k, act in self._read().items() if k != key})

    def lost(self, key: str) -> None:
        """Note that an act may or may not have been carried out."""
        with self._lock:
            self._under_way.discard(key)

    def tidy(self) -> None:
        """Remove acts from the file that are older than a day; a damaged file stays as it is."""
        with self._lock, contextlib.suppress(StorageError):
            self._read()

    def _read(self) -> dict[str, PastAct]:
        loaded = self._acts is None
        acts = _load(self._path) if self._acts is None else self._acts
        oldest = self._clock() - LIFE_S
        young = {key: act for key, act in acts.items() if act.at > oldest}
        if loaded and len(young) < len(acts):
            self._note(young)
        self._acts = young
        return young

    def _note(self, acts: dict[str, PastAct]) -> None:
        """Remember how acts ended; on a disk that is full, only in this process.

        After a restart the file then says that one may have been carried out, which is true.
        """
        self._acts = acts
        with contextlib.suppress(StorageError):
            self._write(acts)

    def _write(self, acts: dict[str, PastAct]) -> None:
        kept = dict(list(acts.items())[-MAX_ACTS:])
        rows = {key: asdict(act) for key, act in kept.items()}
        write_atomic(self._path, json.dumps({"version": VERSION, "acts": rows}).encode())
        self._acts = kept
        self._unwritten = {key: told for key, told in self._unwritten.items() if key in kept}


def key_of(token: str, given: str) -> str:
    """Return the name under which an act is remembered: keys of two tokens never meet.

    Args:
        token: digest of the token.
        given: the ``Idempotency-Key``.

    Raises:
        UsageError: it is too long, or not of printable ASCII.
    """
    if not 0 < len(given) <= MAX_KEY or not (given.isascii() and given.isprintable()):
        raise UsageError(
            f"an Idempotency-Key has 1 to {MAX_KEY} printable ASCII characters.",
            action="Use a UUID.",
        )
    return hashlib.sha256(f"{token}\n{given}".encode()).hexdigest()


def request_digest(method: str, path: str, fields: dict[str, Any]) -> str:
    """Return the digest by which a repeated request is known."""
    told = json.dumps([method, path, fields], sort_keys=True)
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


def _load(path: Path) -> dict[str, PastAct]:
    with storage_errors("read", path):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read() if size <= MAX_BYTES else b""
        except FileNotFoundError:
            return {}
    try:
        content = json.loads(data)
        if content["version"] != VERSION:
            raise ValueError(content["version"])
        return {str(key): _act(row) for key, row in content["acts"].items()}
    except _DAMAGE as error:
        raise CorruptFile(
            f"{path} is damaged: it has the acts of the last day.", action=_REMEDY
        ) from error


def _act(row: dict[str, Any]) -> PastAct:
    content = row["content"]
    if content is not None and not isinstance(content, dict):
        raise TypeError("an answer is an object")
    return PastAct(str(row["request"]), float(row["at"]), int(row["status"]), content)
