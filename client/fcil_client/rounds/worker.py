"""The client's worker process: images, backbone, learner, evaluation. No keys, no sockets.

Started by the daemon as ``python -m fcil_client.rounds.worker --fd N``. Every call is
self-contained, so a new process can take over at any call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fcil_adapters.contract import Context, Exchange, exemplars, local_images, registry
from fcil_adapters.contract.context import TrainingMetrics
from fcil_adapters.contract.exemplars import Exemplars
from fcil_adapters.contract.forgetting import classes_with_images
from fcil_adapters.contract.halves import learned
from fcil_adapters.contract.late_images import classes_of, tasks_of
from fcil_adapters.images.cache import CachedImages
from fcil_adapters.worker import loop as worker_ops
from fcil_adapters.worker.loop import Call, Reply
from fcil_adapters.worker.models import LoadedModels, evaluate, read_parts
from fcil_adapters.worker.pipe import Fields
from fcil_client.data import manifest as manifests
from fcil_client.data.held_data import HeldData, manifest_path, partition_of
from fcil_client.data.local_data import LocalData
from fcil_client.data.partition_file import Partition
from fcil_client.data.split import SIDES
from fcil_protocol.errors import DataError, NothingLeft, WireError
from fcil_protocol.payloads.builtin import TRAIN_ACCURACY, TRAIN_LOSS, metric_faults
from fcil_protocol.payloads.payload import Payload, unpack

_UNLABELLED = 0x756E  # purpose of the random stream that chooses unlabelled images


class ClientWorker:
    """The worker's operations, and the state that it keeps warm between calls."""

    def __init__(self) -> None:
        self._engine = LoadedModels()
        self._held = HeldData()

    def operations(self) -> dict[str, worker_ops.Operation]:
        """Return the operations by name."""
        return {
            "scan": self.scan,
            "backbone": self._engine.backbone,
            "run": self.run,
            "evaluate": self.evaluate,
        }

    def scan(self, call: Call) -> Reply:
        """Scan the data folder.

        Fields: ``data`` (path), ``cache`` (directory where the manifest is kept), ``salt``,
        and, if a partition divides the data, ``partition`` (path), ``slot``, and ``seat``, the
        name that both give to the client at its beginning.
        Result: ``counts`` {side: {class name: images}}, ``faults``, ``notes``, ``digest``,
        and ``changes`` since the previous scan, in sentences.
        """
        before = manifests.load(manifest_path(call.fields), call.fields["salt"])
        manifest = self._held.scan(call)
        renames = manifests.renames(before, manifest) if before is not None else []
        return {
            "counts": {side: manifest.counts(side) for side in SIDES},
            "faults": list(manifest.faults),
            "notes": [*manifest.notes, *renames],
            "digest": manifest.digest,
            "changes": manifests.diff(before, manifest) if before is not None else [],
        }, ()

    def run(self, call: Call) -> Reply:
        """Let the method's learner take part in one round.

        Fields: those of `LoadedModels.prepare` and `scan`, ``classes`` {name: id} of the task's
        classes, ``min_count`` (images without which a class takes no part), ``memory_bytes``,
        ``parts`` (names), ``past``, as ``classes`` of earlier tasks, for a method that keeps
        exemplars, and ``unlabelled``, the folder of unlabelled images or "".
        Payloads: state, then the parts. Result: ``images`` (number that the learner saw),
        ``faults``, ``lost`` (`Forms.rounding_loss`) in a task's first round if a tensor travels in
        half precision, ``exemplars`` (number of further images that it saw) if its method keeps
        any, ``trained`` (metadata, `payloads.builtin.TRAINING_METRICS`) after a training with
        gradients, and ``notes``, sentences for the user, in a task's first round if it is not the
        partition's;
        payloads: the new state and the upload.
        """
        method, ctx = self._engine.prepare(call)
        if not call.payloads:
            raise WireError("a run needs the client's state as its first payload.")
        state, *rest = call.payloads
        parts = read_parts(call, rest, ctx.forms)
        data = self._held.of(call, ctx.backbone_info.preprocessing)
        least = call.fields["min_count"]
        partition = partition_of(call.fields)
        exchange = registry.find_exchange(method, ctx.hparams, ctx.backbone_info, ctx.kind)
        learner = registry.load_half(method.learner)
        held, most = unpack(state), method.exemplars(ctx.hparams)
        images, faults = _shown(ctx, call.fields, data, partition, exchange, held)
        if exchange.unlabelled:
            digests = local_images.as_digests(images.digests)
            ctx = replace(ctx, digests=digests, min_count=least)
        if most:
            exemplars.check_state(held, most)
            shown, lost = _exemplars(
                ctx, call.fields, data, exemplars.exemplar_digests(held), images
            )
            ctx, faults = replace(ctx, exemplars=shown), lost
        told: list[TrainingMetrics] = []
        ctx = replace(ctx, trained=told.append)
        new_state, upload = learned(method.name, learner.run(ctx, held, parts, images))
        exemplars.check_state(new_state, most)
        declared = method.exchanges(ctx.hparams, ctx.backbone_info)
        if exchange.keeps_state and any(e.unlabelled for e in declared):
            named = frozenset(images.digests if exchange.unlabelled else ())
            local_images.check_counted(held, new_state, named)
        if exchange.counts_once:
            digests = local_images.as_digests(images.digests)
            described = classes_with_images(upload, classes_of(ctx.kind, ctx.task))
            new_state = local_images.with_described(new_state, described, images.labels, digests)
        if exchange.unlabelled and not upload.i64("n").any():
            raise DataError(f"none of {len(images)} unlabelled images is clearly of one class.")
        sent = ctx.forms.narrow(upload, exchange.upload)
        seen = images.faults if exchange.unlabelled else data.faults
        result: Fields = {"images": len(images), "faults": [*seen, *faults]}
        if ctx.exemplars is not None:
            result["exemplars"] = len(ctx.exemplars.images)
        if told and method.reports_training(exchange):
            result["trained"] = _metadata(told[-1])
        if ctx.round == 0:  # once a task is enough
            if ctx.forms.half:
                result["lost"] = ctx.forms.rounding_loss(upload, sent, parts.values())
            if partition is not None and not exchange.late:  # whose classes are of all tasks
                result["notes"] = list(partition.task_notes(call.fields["classes"], ctx.task.index))
        return result, [new_state, sent]

    def evaluate(self, call: Call) -> Reply:
        """Evaluate the global model on the client's test images.

        Fields: those of `run`, with ``classes`` of all classes seen so far. Payloads: the
        parts. Result: ``images``, ``faults``; payload: as ``payloads.builtin.EVALUATE`` travels.
        """
        method, ctx = self._engine.prepare(call)
        parts = read_parts(call, call.payloads, ctx.forms)
        data = self._held.of(call, ctx.backbone_info.preprocessing)
        images = data.test_images(_class_ids(call.fields, ctx.task.seen))
        counts = evaluate(method, ctx, parts, images)
        return {"images": len(images), "faults": list(data.faults)}, [counts]


def _metadata(metrics: TrainingMetrics) -> dict[str, float]:
    """Return a training's metrics as they travel: 4 digits, and only those that are possible."""
    named = {TRAIN_LOSS: metrics.loss, TRAIN_ACCURACY: metrics.accuracy}
    short = {name: float(f"{value:.4g}") for name, value in named.items() if value is not None}
    return {} if metric_faults(short) else short


def _shown(
    ctx: Context,
    fields: Fields,
    data: LocalData,
    partition: Partition | None,
    exchange: Exchange,
    state: Payload,
) -> tuple[CachedImages, Sequence[str]]:
    """Open the images that the learner gets; name unlabelled files that cannot be used."""
    if exchange.unlabelled:
        return _unlabelled(ctx, fields, data, exchange, state)
    if exchange.counts_once:
        return _uncounted(ctx, fields, data, partition, exchange, state), ()
    return _labelled(ctx, fields, data, partition), ()


def _labelled(
    ctx: Context, fields: Fields, data: LocalData, partition: Partition | None
) -> CachedImages:
    """Open the train images of the task's classes.

    Raises:
        DataError: there is none.
    """
    least, only = fields["min_count"], _choice(partition, fields, ctx)
    images = data.learner_images(_class_ids(fields, ctx.task.classes), least, only)
    if only is not None and not len(images):
        raise DataError(
            "the partition gives this client no image of this round's classes.",
            action="Give the server the partition's tasks (docs/partitions.md).",
        )
    if least > 1 and not len(images):
        raise DataError(f"no class of the current task has {least} images here.")
    return images


def _uncounted(
    ctx: Context,
    fields: Fields,
    data: LocalData,
    partition: Partition | None,
    exchange: Exchange,
    state: Payload,
) -> CachedImages:
    """Open the train images that the state does not name as counted, each content once.

    Raises:
        NothingLeft: there is none.
    """
    allowed, tasks = classes_of(ctx.kind, ctx.task), tasks_of(ctx.kind, ctx.task)
    counted = local_images.counted_digests(state)
    least = max(fields["min_count"], exchange.least_images)
    only = None
    if partition is not None and partition.redraws:
        # Such an exchange has one round in each task.
        choices = [partition.round_choice(fields["slot"], task, 0) for task in tasks]
        only = frozenset[str]().union(*(choice for choice in choices if choice is not None))
    images = data.uncounted_images(_class_ids(fields, allowed), counted, least, only)
    if not len(images) and not counted:
        few = f"no class of this round has {least} images here."
        raise NothingLeft(
            few if least > 1 else "this client has no image of this round's classes.",
            action="If a partition divides the images, give the server its tasks "
            "(docs/partitions.md).",
        )
    if not len(images):
        few = f", or fewer than {least} of their class" if least > 1 else ""
        raise NothingLeft(f"all images of this round's classes are counted already{few}.")
    return images


def _unlabelled(
    ctx: Context, fields: Fields, data: LocalData, exchange: Exchange, state: Payload
) -> tuple[CachedImages, tuple[str, ...]]:
    """Open unlabelled images that the state does not name; report files that cannot be used."""
    folder, counted = Path(fields["unlabelled"]), local_images.counted_digests(state)
    return data.unlabelled_images(folder, exchange.unlabelled, counted, ctx.rng(_UNLABELLED))


def _choice(partition: Partition | None, fields: Fields, ctx: Context) -> frozenset[str] | None:
    """Return the images that a partition lets this round see, by name; None: all of the client."""
    if partition is None:
        return None
    return partition.round_choice(fields["slot"], ctx.task.index, ctx.round)


def _exemplars(
    ctx: Context, fields: Fields, data: LocalData, kept: list[str], images: CachedImages
) -> tuple[Exemplars, list[str]]:
    """Open the view of a state's images of past classes; report the number that is gone."""
    past = _class_ids({"classes": fields["past"]}, ctx.task.past)
    again = data.exemplar_images(past, kept, fields["min_count"])
    lost = len(kept) - len(again)
    faults = [f"{lost} of {len(kept)} exemplars are gone or too few; the others are used."]
    digests = [local_images.as_digests(one.digests) for one in (again, images)]
    return Exemplars(again, *digests), faults if lost else []


def _class_ids(fields: Fields, allowed: tuple[int, ...]) -> dict[str, int]:
    """Return the named classes; refuse any that is not the task's."""
    ids: dict[str, int] = fields["classes"]
    extra = sorted(set(ids.values()) - set(allowed))
    if extra:
        raise WireError(f"class ids {extra[:5]} do not belong to this exchange.")
    return ids


if __name__ == "__main__":
    worker_ops.main(ClientWorker().operations())
