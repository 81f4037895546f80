"""A client's current global model: the newest completely fetched broadcast, kept on disk.

In the client's directory, next to the files of rounds::

    model.json          description of the model: run, task, state, method, backbone, class names
    model/<digest>.part its parts, sealed as received (the same files as in parts/: hard links)

``model.json`` is replaced when all parts of a newer state are on disk; only then are the parts
removed that it no longer names. So a command finds one complete model at any moment, with the
daemon running or not, also while a new round is fetched or after another run has opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fcil_adapters.contract import BackboneInfo, Context, Method, Predictor, registry
from fcil_adapters.worker.loop import context_from
from fcil_client.state.home import Home
from fcil_protocol.envelopes.envelope import ContentKey, open_body, unwrap_key, wrap_key
from fcil_protocol.envelopes.stored_envelope import EnvelopeFile, head_of
from fcil_protocol.errors import (
    CannotOpen,
    CorruptFile,
    DataError,
    MethodMismatch,
    StorageError,
    TrustError,
    WireError,
)
from fcil_protocol.ids import is_digest
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys

FORMAT = 2  # 1: none of its parts is compact
_TRIES = 5  # a daemon may remove the parts of the previous model while they are read
_AGAIN = "It is rebuilt in the next round that this client takes part in."


class ModelRecord(BaseModel):
    """Content of ``model.json``.

    Attributes:
        task, kind, round, rounds: the round that the parts were fetched for.
        begins: that round was the first of its task.
        state: number of the server's state that the parts describe.
        context: as `worker.loop.context_fields` returns it: options, backbone, classes, forms.
        parts: name -> digest, without the part of class names.
        names: class id -> name, of the classes that this client knows or knew in this run.
        weights: the file that the backbone was loaded from, if one was given.
        fetched: time when the parts had arrived, s since 1970.
        promoted: the operator wants this model: those of rounds do not replace it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: int
    federation: str
    run: str
    task: int
    kind: str
    round: int
    rounds: int
    begins: bool
    state: int
    method: str
    method_version: str
    context: dict[str, Any]
    parts: dict[str, str]
    names: dict[int, str]
    weights: str | None
    fetched: float
    promoted: bool = False

    @property
    def progress_text(self) -> str:
        """Progress of the model's learning, as a phrase."""
        if self.kind == EVALUATE:
            return f"after task {self.task}"
        if self.begins:
            return f"after task {self.task - 1}"
        if self.round:
            return f"in task {self.task}, after {self.round} of {self.rounds} {self.kind} rounds"
        return f"in task {self.task}, before its {self.kind} rounds"

    @property
    def last_task(self) -> int:
        """Index of the last task that it has learned, at least in part."""
        return self.task - self.begins

    @property
    def seen(self) -> tuple[int, ...]:
        """Ids of all classes of the tasks that had begun."""
        return (*self.context["past"], *self.context["classes"])

    @property
    def key(self) -> str:
        """SHA-256 (hex) of the model's run, method and parts; the same for the same model."""
        rows = [self.run, self.method, self.method_version, sorted(self.parts.items())]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@dataclass(frozen=True)
class CurrentModel:
    """The opened model.

    Attributes:
        method: the method, in the run's tensor forms.
        info: the run's backbone.
        parts: as a method's `Model` takes them.
    """

    record: ModelRecord
    method: Method
    info: BackboneInfo
    parts: Mapping[str, Payload]

    @property
    def names(self) -> Mapping[int, str]:
        """Class id -> name, as far as this client knows them."""
        return self.record.names

    def compose(self, backbone: Any, *, device: str, batch: int | None = None) -> Predictor:
        """Build the predictor that scores images.

        Args:
            backbone: the loaded backbone of `info`; None if the method needs none.
            device: torch's name of the backbone's device.
            batch: largest number of images in one pass.
        """
        ctx = self.context(backbone, device=device, batch=batch)
        predictor: Predictor = registry.load_half(self.method.model).compose(
            ctx, self.parts, backbone
        )
        return predictor

    def context(self, backbone: Any, *, device: str, batch: int | None = None) -> Context:
        """Return the context in which the model is evaluated."""
        fields = {**self.record.context, "kind": EVALUATE, "micro_batch": batch}
        return context_from(fields, self.method, device=device, backbone=backbone)


# --- reading --------------------------------------------------------------------------------


def read_record(home: Home) -> ModelRecord | None:
    """Return the current model's record; None before the first one.

    Raises:
        CorruptFile: the file is damaged, or written by a newer fcil.
        StorageError: it cannot be read.
    """
    path = home.model_path
    with storage_errors("read", path):
        data = path.read_bytes() if path.exists() else None
    if data is None:
        return None
    try:
        fields = json.loads(data)
        body = fields["model"]
        number = body["format"]
        if isinstance(number, int) and number > FORMAT:
            raise CorruptFile(
                f"{path} has format {number}; this fcil reads {FORMAT}.",
                action="Use the fcil that wrote it, or a newer one.",
            )
        if fields["sha256"] != _check(body):
            raise ValueError("its checksum does not match")
        record = ModelRecord.model_validate(body)
        if not all(is_digest(digest) for digest in record.parts.values()):
            raise ValueError("parts")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = "its fields" if isinstance(error, ValidationError) else str(error)[:120]
        raise CorruptFile(f"{path} is damaged ({reason}).", action=_AGAIN) from error
    return record


def load(home: Home) -> CurrentModel:
    """Open a client's current model; works with the daemon running or not, and offline.

    Raises:
        DataError: the client has no model yet.
        MethodMismatch: the method's package is not installed here in the model's version.
        CorruptFile, StorageError: it cannot be read.
    """
    record = read_record(home)
    for _ in range(_TRIES):
        if record is None:
            raise _none_yet(home)
        try:
            return _open(home, record)
        except (StorageError, CannotOpen):
            newer = read_record(home)
            if newer == record:
                raise
            record = newer
    raise StorageError(f"the model in {home.directory} changed while it was read.")


def _open(home: Home, record: ModelRecord) -> CurrentModel:
    method = _method(record)
    keys = _keys(home)
    parts = {name: _read_part(home, digest, keys) for name, digest in record.parts.items()}
    try:
        ctx = context_from(record.context, method)
    except WireError as error:
        raise CorruptFile(f"{home.model_path} is damaged: {error}", action=_AGAIN) from error
    parts = {name: ctx.forms.widen(part) for name, part in parts.items()}
    return CurrentModel(record, registry.with_forms(method, ctx.forms), ctx.backbone_info, parts)


def _read_part(home: Home, digest: str, keys: list[PrivateKeys]) -> Payload:
    """Open a part; a damaged one is removed: the client would take it for complete otherwise."""
    path = part_path(home, digest)
    try:
        with EnvelopeFile(path) as stored:
            header = stored.parsed
            if header.update_id != digest:
                raise CorruptFile(f"{path} is damaged: it holds another part.")
            key = _unwrap(stored, keys)
            try:
                return unpack(open_body(header, key, stored.steps()))
            except (CannotOpen, WireError) as error:
                raise CorruptFile(f"{path} is damaged ({error.message})") from error
    except (CannotOpen, WireError) as error:  # sealed for other keys, it may seem
        raise CorruptFile(f"{path} is damaged ({error.message})", action=_AGAIN) from error
    except CorruptFile as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise CorruptFile(error.message, action=_AGAIN) from error


def _unwrap(stored: EnvelopeFile, keys: list[PrivateKeys]) -> ContentKey:
    for one in keys[:-1]:
        with contextlib.suppress(CannotOpen):
            return unwrap_key(stored.wrap, stored.header, one)
    return unwrap_key(stored.wrap, stored.header, keys[-1])


def _keys(home: Home) -> list[PrivateKeys]:
    """Return the client's keys, and the next ones during a change of keys (`rewrap`)."""
    paths = (home.keys_path, home.next_keys_path)
    return [PrivateKeys.load(path) for path in paths if path == home.keys_path or path.exists()]


def _method(record: ModelRecord) -> Method:
    method = registry.load_method(record.method)
    if method.version != record.method_version:
        raise MethodMismatch(
            f"the model is one of method {record.method!r} version {record.method_version}; "
            f"version {method.version} is installed.",
            action="Install the version that the server of the model runs.",
        )
    return method


def _none_yet(home: Home) -> DataError:
    enrolment = home.enrolment()
    what = enrolment.data if enrolment else str(home.directory)
    return DataError(
        f"the client of {what} has no model yet: it has not fetched one.",
        action="It arrives with the first round after something was learned; let the client take "
        f"part: {home.command('join')}",
    )


def read_if_whole(home: Home) -> ModelRecord | None:
    """Return the current model's record, or None also if the file is damaged."""
    try:
        return read_record(home)
    except CorruptFile:
        return None


def part_path(home: Home, digest: str) -> Path:
    """Return a part's file."""
    return home.model_folder / f"{digest}.part"


def record_bytes(record: ModelRecord) -> bytes:
    """Return the content of ``model.json``."""
    body = json.loads(record.model_dump_json())  # integer keys become text, as when it is read
    return json.dumps({"sha256": _check(body), "model": body}, indent=1).encode()


def _check(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"fcil/1/model-file\0" + text.encode()).hexdigest()


# --- status ---------------------------------------------------------------------------------


def summary(home: Home, now: float | None = None) -> dict[str, Any] | None:
    """Return the status of a client's model, JSON-ready; None if there is none."""
    try:
        record = read_record(home)
    except StorageError as error:
        return {"damaged": str(error)}
    return None if record is None else summary_of(record, now)


def summary_of(record: ModelRecord, now: float | None = None) -> dict[str, Any]:
    """Return the status of a model, JSON-ready."""
    age_s = max(0.0, (time.time() if now is None else now) - record.fetched)
    return {
        "damaged": "",
        "run": record.run,
        "when": record.progress_text,
        "task": record.task,
        "state": record.state,
        "method": record.method,
        "backbone": record.context["backbone_info"]["name"],
        "classes": len(record.seen),
        "named": len(set(record.seen) & record.names.keys()),
        "promoted": record.promoted,
        "fetched_at": record.fetched,
        "age_s": round(age_s, 1),
    }


def describe(told: Mapping[str, Any] | None) -> str:
    """Return the result of `summary` in one line."""
    if told is None:
        return "none yet"
    if told["damaged"]:
        return str(told["damaged"])
    promoted = ", promoted by the operator" if told["promoted"] else ""
    return f"{told['when']} of run {told['run']}, {_age(told['age_s'])} old{promoted}"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{int(seconds)} s"


def rewrap(home: Home, old: PrivateKeys, new: PublicKeys) -> None:
    """Let the holder of new keys open the model that was sealed for the old ones.

    A part that cannot be opened stays as it is: an interrupted change may have rewrapped it before.

    Raises:
        DiskFull, StorageError: a part could not be written.
    """
    record = read_if_whole(home)
    for digest in record.parts.values() if record else ():
        path = part_path(home, digest)
        try:
            with EnvelopeFile(path) as stored:
                key = unwrap_key(stored.wrap, stored.header, old)
                wrap = wrap_key(key, stored.header, new)
                head = head_of(stored.header, stored.signature, wrap, stored.parsed.sealed_bytes)
                body = list(stored.steps())
        except (CorruptFile, TrustError, WireError):
            continue
        write_atomic(path, head, *body)
