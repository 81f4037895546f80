"""The journal of data that left this device: append-only lines of JSON.

``egress.jsonl`` in the client's directory (0600) has one line for each event of a sealed envelope:
``sealed`` (its content: tensors and sizes, never values, and only the number of class names),
``sent`` (written at each offer before the first byte goes to the link), and ``acked`` or
``refused``. The first two are on disk before a byte of the envelope leaves: one sync, that of
``sent``, makes both durable. A full file is renamed to ``egress.0001.jsonl`` and so on; nothing is
ever removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fcil_protocol.envelopes.header import Header
from fcil_protocol.payloads.payload import Payload, dtype_name
from fcil_protocol.payloads.schema import PayloadSchema
from fcil_protocol.storage.append_log import AppendLog
from fcil_protocol.storage.atomic_files import storage_errors

NAME = "egress.jsonl"
SEGMENT_BYTES = 4 << 20  # about 5,000 envelopes of a few tensors
_WHAT = "write the journal of what leaves in"


class SentJournal:
    """Appends to the journal of one client directory; safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # The journal keeps every byte that it once wrote: half a line stays, as a damaged one.
        self._log = AppendLog(
            directory / NAME,
            _WHAT,
            keeps_half=True,
            full_at=SEGMENT_BYTES,
            full_name=self._next_name,
        )

    def sealed(
        self, payload: Payload, schema: PayloadSchema, header: Header, relay: str = ""
    ) -> None:
        """Record the content of a sealed envelope; the payload must have passed the guard.

        ``relay``: name of the relay that can open it too; empty: none.

        The line is on disk with the next `sent`. If a power cut takes it before that, `has_sealed`
        returns False: the envelope never left, and must not.

        Raises:
            DiskFull, StorageError: the line cannot be written; the envelope must not leave.
        """
        core = header.core
        self._append(
            {
                "event": "sealed",
                "time": _now(),
                "digest": header.update_id,
                "federation": core.federation,
                "run": core.run,
                "method": core.method,
                "task": core.task,
                "kind": core.kind,
                "round": core.round,
                "tensors": describe_tensors(payload, schema),
                "fields": describe_fields(payload, schema),
                "tensor_bytes": payload.tensor_bytes,
                "sealed_bytes": header.sealed_bytes,
                **({"relay": relay} if relay else {}),
            },
            sync=False,
        )

    def has_sealed(self, digest: str) -> bool:
        """Return True if the journal records an envelope's content.

        Raises:
            StorageError: a file cannot be read.
        """
        wanted = (b'"event":"sealed"', digest.encode())
        whole = (line for line in _lines(self._directory, newest=2) if line.endswith(b"}\n"))
        return any(all(word in line for word in wanted) for line in whole)

    def sent(self, digest: str) -> None:
        """Record that an envelope leaves now (again).

        Raises:
            DiskFull, StorageError: the line is not on disk; the envelope must not leave.
        """
        self._append({"event": "sent", "time": _now(), "digest": digest})

    def acked(self, digest: str) -> None:
        """Record that the server has an envelope.

        Raises:
            DiskFull, StorageError: the line cannot be written.
        """
        self._append({"event": "acked", "time": _now(), "digest": digest}, sync=False)

    def refused(self, digest: str, code: str) -> None:
        """Record that the server refuses an envelope.

        Raises:
            DiskFull, StorageError: the line cannot be written.
        """
        event = {"event": "refused", "time": _now(), "digest": digest, "code": code}
        self._append(event, sync=False)

    def _append(self, fields: dict[str, Any], *, sync: bool = True) -> None:
        self._log.append(json.dumps(fields, separators=(",", ":")).encode(), sync=sync)

    def _next_name(self) -> str:
        newest = max(_number(path) for path in files(self._directory))
        return f"egress.{newest + 1:04d}.jsonl"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def describe_tensors(payload: Payload, schema: PayloadSchema) -> list[dict[str, Any]]:
    """Return name, kind, shape, dtype and bytes of each tensor of a payload that keeps a schema."""
    kinds = {spec.name: str(spec.kind) for spec in schema.tensors}
    return [
        {
            "name": name,
            "kind": kinds[name],
            "shape": list(array.shape),
            "dtype": dtype_name(name, array),
            "bytes": int(array.nbytes),
        }
        for name, array in sorted(payload.tensors.items())
    ]


def describe_fields(payload: Payload, schema: PayloadSchema) -> list[dict[str, Any]]:
    """Return name, type and number of values of each metadata field, never the values."""
    types = {spec.name: spec.type for spec in schema.meta}
    return [
        {
            "name": name,
            "type": types[name],
            "values": len(value) if isinstance(value, list) else 1,
        }
        for name, value in sorted(payload.meta.items())
    ]


# --- reading --------------------------------------------------------------------------------


def files(directory: Path) -> list[Path]:
    """Return the journal's files, the oldest first."""
    full = [path for path in directory.glob("egress.*.jsonl") if _number(path)]
    newest = directory / NAME
    return [*sorted(full, key=_number), *([newest] if newest.exists() else [])]


def _number(path: Path) -> int:
    text = path.name.split(".")[1]
    return int(text) if text.isascii() and text.isdecimal() else 0


def read(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Return one row per envelope, in the order of sealing, and the number of damaged lines.

    A row has the fields of the ``sealed`` line (``relay`` is empty in most), ``sealed_at``,
    ``sent_at`` (a list), ``answer`` (``acked``, ``refused`` or None), ``code`` (of a refusal) and
    ``answered_at``.

    Raises:
        StorageError: a file cannot be read.
    """
    rows: dict[str, dict[str, Any]] = {}
    damaged = 0
    for line in _lines(directory):
        try:
            event = json.loads(line)
            name, at, digest = event.pop("event"), event.pop("time"), event.pop("digest")
            if datetime.fromisoformat(at).tzinfo is None:
                raise ValueError("a time without a zone")
            row = rows.setdefault(digest, _empty(digest))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            damaged += 1
            continue
        if name == "sealed":
            row.update(event, sealed_at=at)
        elif name == "sent":
            row["sent_at"].append(at)
        else:
            row.update(answer=name, code=event.get("code", ""), answered_at=at)
    return list(rows.values()), damaged


def _empty(digest: str) -> dict[str, Any]:
    """Return the row of an envelope whose ``sealed`` line is missing or damaged."""
    return {
        "digest": digest, "sealed_at": None, "federation": None, "run": None, "method": None,
        "task": None, "kind": None, "round": None, "tensors": [], "fields": [],
        "tensor_bytes": None, "sealed_bytes": None, "sent_at": [], "answer": None, "code": "",
        "answered_at": None, "relay": "",
    }  # fmt: skip


def _lines(directory: Path, newest: int = 0) -> Iterator[bytes]:
    """Yield the lines of all files, or of this many of the newest ones."""
    for path in files(directory)[-newest:]:
        with storage_errors("read", path), path.open("rb") as file:
            yield from (line for line in file if line.strip())


def last_event(row: dict[str, Any]) -> datetime:
    """Return the time of the last event recorded about an envelope."""
    times = [row["sealed_at"], *row["sent_at"], row["answered_at"]]
    return max(datetime.fromisoformat(at) for at in times if at)
