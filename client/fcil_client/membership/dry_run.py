"""Preview of the uploads of this device, from schemas and counts before any is sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fcil_adapters.contract import Exchange, TaskInfo
from fcil_adapters.images.sources import LooseSource
from fcil_client.data import manifest as manifests
from fcil_client.data.inventory import Inventory
from fcil_client.data.partition_source import open_data
from fcil_client.link.handshake import Terms
from fcil_client.membership.ask_terms import TaskClasses, TermsPreview
from fcil_client.state.home import SALT_BYTES, Home
from fcil_client.state.privacy_budget import NO_LIMITS, PrivacyLimits, refuse_weak
from fcil_client.state.sent_journal import describe_fields, describe_tensors
from fcil_protocol.envelopes.header import sealed_size
from fcil_protocol.errors import PrivacyRefused
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.builtin import EVALUATE, INVENTORY_SCHEMA, inventory_faults
from fcil_protocol.payloads.payload import WIRE_DTYPES, MetaValue, Payload, pack
from fcil_protocol.payloads.schema import PayloadSchema, TensorBound, class_key

_ZERO: Mapping[str, MetaValue] = {"int": 0, "float": 0.0, "bool": False}
_LONGEST = -1.234e-300  # as text, of the 4 digits that a training metric has


def count_images(
    data: Path, home: Home | None, partition: Path | None = None, slot: int = -1
) -> Inventory:
    """Scan a folder as the client would, in this process.

    A folder that is not enrolled has no salt yet: its test images are drawn when it joins, so the
    counts of both sides are estimates.

    Raises:
        DataError: the folder cannot be used at all.
        StorageError: the manifest of an enrolled folder cannot be stored.
    """
    salt = home.salt() if home else os.urandom(SALT_BYTES)
    source, fractions = open_data(data, partition, slot)
    with closing(source):
        cache = home.directory / manifests.NAME if home else None
        manifest = manifests.scan(source, cache, salt, fractions)
    faults = [*manifest.faults, *manifest.notes]
    return Inventory(manifest.counts("train"), manifest.counts("test"), faults)


def dry_run(
    data: Path,
    preview: TermsPreview,
    inventory: Inventory,
    *,
    enrolled: bool,
    limits: PrivacyLimits = NO_LIMITS,
    unlabelled: Path | None = None,
    training_metrics: bool = True,
    link_only: bool = False,
) -> dict[str, Any]:
    """Return all data that would leave, as plain data.

    Args:
        data: the image folder.
        preview: terms and tasks that the client would meet.
        inventory: images in the folder.
        enrolled: enrolment or a partition has fixed the split into sides; else any image may be on
            either side.
        limits: the client's own.
        unlabelled: folder of images without classes that it would offer.
        training_metrics: False if loss and accuracy of its training stay here.
        link_only: it would use no object store.
    """
    if not training_metrics:
        preview = replace(preview, terms=replace(preview.terms, training_metrics=False))
    terms = preview.terms
    least = max(terms.privacy.min_count, limits.min_count)
    asked = preview.source not in ("method", "default")  # else no server has set any terms
    declined = _declined(terms.privacy, limits) if asked else ""
    possible = (inventory if enrolled else _either_side(inventory)).announceable(least)
    return {
        "data": str(data.resolve()),
        "enrolled": enrolled,
        "source": preview.source,
        "told": preview.told,
        "run": terms.run or None,
        "method": terms.method.name,
        "version": terms.method.version,
        "backbone": terms.backbone.name if terms.method.needs_backbone else None,
        "privacy": terms.privacy.model_dump(),
        "relay": terms.relay_name,
        "object_store": (not link_only and terms.object_store) or None,
        "exemplars": terms.method.exemplars(terms.hparams),
        "unlabelled": _unlabelled(terms, unlabelled),
        "announcement": _announcement(preview.terms, inventory.announceable(least), exact=enrolled),
        "least": least,
        "declined": declined,
        "tasks": list(
            _tasks(preview, possible, offers=unlabelled is not None, declined=bool(declined))
        ),
        "faults": inventory.faults,
    }


def _declined(privacy: PrivacyTerms, limits: PrivacyLimits) -> str:
    """Return why the client would decline all rounds but evaluations; "": it would not."""
    try:
        refuse_weak(privacy, limits)
    except PrivacyRefused as error:
        return error.message
    return ""


def _either_side(inventory: Inventory) -> Inventory:
    """Return counts with all images on both sides: the split that decides is not drawn yet."""
    counts = {n: sum(sides.values()) for n, sides in inventory.counts().items()}
    return Inventory(counts, counts)


def _unlabelled(terms: Terms, folder: Path | None) -> dict[str, Any] | None:
    """Return how unlabelled images would be used; None: the method uses none."""
    most = max((e.unlabelled for e in terms.exchanges), default=0)
    if not most:
        return None
    images = 0 if folder is None else len(LooseSource(folder).listing().entries)
    return {"folder": None if folder is None else str(folder), "images": images, "most": most}


def _announcement(terms: Terms, inventory: Inventory, *, exact: bool) -> dict[str, Any]:
    payload = inventory.payload()
    return {
        "classes": [{"name": n, **counts} for n, counts in inventory.counts().items()],
        "exact": exact,
        "tensors": describe_tensors(payload, INVENTORY_SCHEMA),
        "fields": describe_fields(payload, INVENTORY_SCHEMA),
        "tensor_bytes": payload.tensor_bytes,
        "sealed_bytes": sealed_size(len(pack(payload, compact=terms.compact))),
        "refused": inventory_faults(payload),
    }


# --- tasks ----------------------------------------------------------------------------------


def _tasks(
    preview: TermsPreview, inventory: Inventory, *, offers: bool, declined: bool
) -> Iterator[dict[str, Any]]:
    """Yield the uploads of every task that is not over.

    ``offers``: unlabelled images, too; ``declined``: evaluations alone.
    Late images of all classes may leave after the last task, too, when it is over.
    """
    past: list[str] = []
    expected = _expected(preview, inventory)
    for number, task in enumerate(expected):
        told = _task(preview, inventory, number, task, past, offers=offers, declined=declined)
        if not task.closed or (number == len(expected) - 1 and told["exchanges"]):
            yield told
        past.extend(task.classes)


def _expected(preview: TermsPreview, inventory: Inventory) -> list[TaskClasses]:
    """Return all known tasks, and the task that this folder would start."""
    tasks = list(preview.tasks or ())
    if preview.tasks is not None and preview.waiting is None:
        return tasks  # listed
    met = {class_key(n) for task in tasks for n in task.classes}
    coming = {class_key(n): n for n in preview.waiting or ()}
    new = {class_key(n): n for n in inventory.train if class_key(n) not in met}
    if new:
        tasks.append(TaskClasses(tuple({**new, **coming}.values()), known=False))
    return tasks


def _task(
    preview: TermsPreview,
    inventory: Inventory,
    number: int,
    task: TaskClasses,
    past: Sequence[str],
    *,
    offers: bool,
    declined: bool,
) -> dict[str, Any]:
    first = len(past)
    info = TaskInfo(
        number, tuple(range(first, first + len(task.classes))), tuple(range(first))
    )  # ids: only their number matters
    mine = {class_key(n) for n in task.classes}
    held = {n: count for n, count in inventory.train.items() if class_key(n) in mine and count}
    seen = mine | {class_key(n) for n in past}
    known = {n for n, count in inventory.train.items() if class_key(n) in seen and count}
    tested = [n for n, count in inventory.test.items() if class_key(n) in seen and count]
    tests = tested and preview.evaluate is not False and not task.closed
    takes_part = not (task.closed or declined)
    return {
        "task": number,
        "classes": len(task.classes),
        "past": first,
        "known": task.known,
        "held": sorted(held),
        "images": sum(held.values()),
        "exchanges": [
            *(_exchanges(preview, info, _is_of_task) if held and takes_part else ()),
            *(_exchanges(preview, info, _is_late) if known and not declined else ()),
            *(_exchanges(preview, info, _is_unlabelled) if offers and takes_part else ()),
            *(_results(preview, len(tested)) if tests else ()),
        ],
    }


def _is_late(exchange: Exchange) -> bool:
    return exchange.late


def _is_unlabelled(exchange: Exchange) -> bool:
    return exchange.unlabelled > 0


def _is_of_task(exchange: Exchange) -> bool:
    return not (exchange.late or exchange.unlabelled)


def _exchanges(
    preview: TermsPreview, info: TaskInfo, chosen: Callable[[Exchange], bool]
) -> Iterator[dict[str, Any]]:
    """Yield the chosen exchanges of a task.

    Of late ones there are as many as images come late; the rounds of masks come with each masked
    one.
    """
    terms = preview.terms
    some = [e for e in terms.exchanges if e.in_task(info.index) and chosen(e)]
    hidden = [_rounds(preview, e) for e in some if e.masking and e.additive]
    masked = None if None in hidden else sum(filter(None, hidden))
    for exchange in some:
        of_masks = exchange.masking and not exchange.additive
        rounds = masked if of_masks else _rounds(preview, exchange)
        dims = terms.dims(info, exchange.kind)
        yield _exchange(terms, exchange.kind, dims, None if exchange.late else rounds)


def _rounds(preview: TermsPreview, exchange: Exchange) -> int | None:
    return preview.rounds_per_task if exchange.rounds is None else exchange.rounds


def _results(preview: TermsPreview, classes: int) -> Iterator[dict[str, Any]]:
    """Yield the evaluation: at most one row per class with test images here."""
    tests = 1 + any(e.unlabelled for e in preview.terms.exchanges)
    yield _exchange(preview.terms, EVALUATE, {"seen": classes}, tests)


def _exchange(
    terms: Terms, kind: str, dims: Mapping[str, int], rounds: int | None
) -> dict[str, Any]:
    schema = terms.upload_schema(kind)
    bounds = schema.bounds(dims)
    at_most = not all(bound.exact for bound in bounds) or any(m.optional for m in schema.meta)
    # A smaller payload can have a longer compact header, so a bound takes the other form.
    compact = terms.compact and not at_most
    return {
        "kind": kind,
        "rounds": rounds,
        "tensors": [_tensor(bound) for bound in bounds],
        "fields": [{"name": m.name, "type": m.type, "values": 1} for m in schema.meta],
        "tensor_bytes": sum(bound.bytes for bound in bounds),
        "sealed_bytes": _sealed_bytes(schema, bounds, compact=compact),
        "at_most": at_most,
    }


def _tensor(bound: TensorBound) -> dict[str, Any]:
    return {
        "name": bound.spec.name,
        "kind": str(bound.spec.kind),
        "shape": list(bound.shape),
        "dtype": bound.spec.dtype,
        "bytes": bound.bytes,
        "at_most": not bound.exact,
        "optional": bound.spec.optional,
    }


def _sealed_bytes(schema: PayloadSchema, bounds: Sequence[TensorBound], *, compact: bool) -> int:
    """Return the size of the envelope's body: sealing does not compress, so zeros suffice."""
    largest = Payload(
        {b.spec.name: np.zeros(b.shape, WIRE_DTYPES[b.spec.dtype]) for b in bounds},
        {m.name: _LONGEST if m.optional else _ZERO[m.type] for m in schema.meta},
    )
    return sealed_size(len(pack(largest, compact=compact)))
