"""The client's worker process: images, backbone, learner, evaluation. No keys, no sockets.

Started by the daemon as ``python -m fcil_client.worker --fd N``. Every call carries all
that it needs, so a new process can take over at any call.
"""

from __future__ import annotations

from pathlib import Path

from fcil_adapters import registry, worker_ops
from fcil_adapters.contract import Context, Preprocessing, Progress
from fcil_adapters.images import open_source
from fcil_adapters.worker_models import Engine, evaluate, read_parts
from fcil_adapters.worker_ops import Call, Reply
from fcil_adapters.worker_pipe import Fields
from fcil_client import manifest as manifests
from fcil_client.local_data import LocalData
from fcil_client.manifest import Manifest
from fcil_client.split import SIDES
from fcil_protocol.errors import DataError, WireError
from fcil_protocol.payload import unpack


class ClientWorker:
    """The worker's operations and what it keeps warm between calls."""

    def __init__(self) -> None:
        self._engine = Engine()
        self._manifest: Manifest | None = None
        self._of = ("", "", b"")
        self._data: LocalData | None = None

    def operations(self) -> dict[str, worker_ops.Operation]:
        """Return the operations by name."""
        return {
            "scan": self.scan,
            "backbone": self._engine.backbone,
            "run": self.run,
            "evaluate": self.evaluate,
        }

    def scan(self, call: Call) -> Reply:
        """Look at the data folder.

        Fields: ``data`` (path), ``cache`` (directory where the manifest is kept), ``salt``.
        Result: ``counts`` {side: {class name: images}}, ``faults``, ``notes``, ``digest``,
        and ``changes`` since the scan before, in sentences.
        """
        before = manifests.load(_manifest_path(call.fields), call.fields["salt"])
        manifest = self._scan(call)
        return {
            "counts": {side: manifest.counts(side) for side in SIDES},
            "faults": list(manifest.faults),
            "notes": list(manifest.notes),
            "digest": manifest.digest,
            "changes": manifests.diff(before, manifest) if before is not None else [],
        }, ()

    def run(self, call: Call) -> Reply:
        """Let the method's learner take part in one round.

        Fields: those of `Engine.prepare` and `scan`, ``classes`` {name: id} of the
        task's classes, ``min_count`` (images without which a class takes no part),
        ``memory_bytes``, ``parts`` (names). Payloads: state, then the parts.
        Result: ``images`` (how many the learner saw), ``faults``, and ``lost`` (`Forms.lost`)
        in a task's first round if something travels in half precision; payloads: the new state
        and the upload.
        """
        method, ctx = self._engine.prepare(call)
        if not call.payloads:
            raise WireError("a run needs the client's state as its first payload.")
        state, *rest = call.payloads
        parts = read_parts(call, rest, ctx.forms)
        data = self._local_data(call, ctx)
        least = call.fields["min_count"]
        door = data.learner_door(_class_ids(call.fields, ctx.task.classes), least)
        if least > 1 and not len(door):
            raise DataError(f"no class of the current task has {least} images here.")
        learner = registry.load_half(method.learner)
        new_state, upload = learner.run(ctx, unpack(state), parts, door)
        exchange = registry.find_exchange(method, ctx.hparams, ctx.backbone_info, ctx.kind)
        sent = ctx.forms.narrow(upload, exchange.upload)
        result: Fields = {"images": len(door), "faults": list(data.faults)}
        if ctx.forms.half and ctx.round == 0:  # once a task is enough
            result["lost"] = ctx.forms.lost(upload, sent, parts.values())
        return result, [new_state, sent]

    def evaluate(self, call: Call) -> Reply:
        """Evaluate the global model on the client's test images.

        Fields: those of `run`, with ``classes`` of all classes seen so far. Payloads: the
        parts. Result: ``images``, ``faults``; payload: as ``wellknown.EVALUATE`` travels.
        """
        method, ctx = self._engine.prepare(call)
        parts = read_parts(call, call.payloads, ctx.forms)
        data = self._local_data(call, ctx)
        door = data.evaluator_door(_class_ids(call.fields, ctx.task.seen))
        counts = evaluate(method, ctx, parts, door)
        return {"images": len(door), "faults": list(data.faults)}, [counts]

    def _scan(self, call: Call) -> Manifest:
        fields = call.fields
        source = open_source(Path(fields["data"]))
        try:
            manifest = manifests.scan(
                source,
                _manifest_path(fields),
                fields["salt"],
                threads=fields.get("threads", 0),
                on_progress=lambda done, total: call.progress(Progress(done, total)),
            )
        except BaseException:
            source.close()
            raise
        if self._data is not None and self._key(fields) == self._of:
            self._data.refresh(source, manifest)
        else:
            self._drop_data()
            source.close()
        self._manifest, self._of = manifest, self._key(fields)
        return manifest

    def _local_data(self, call: Call, ctx: Context) -> LocalData:
        preprocessing = ctx.backbone_info.preprocessing
        if self._manifest is None or self._of != self._key(call.fields):
            self._scan(call)
        if self._data is None or not self._fits(preprocessing):
            self._drop_data()
            assert self._manifest is not None
            self._data = LocalData(
                open_source(Path(call.fields["data"])),
                self._manifest,
                preprocessing,
                memory_bytes=call.fields["memory_bytes"],
                threads=call.fields.get("threads", 0),
            )
        self._data.tell(call.alive)
        return self._data

    def _fits(self, preprocessing: Preprocessing) -> bool:
        return self._data is not None and self._data.preprocessing == preprocessing

    def _drop_data(self) -> None:
        if self._data is not None:
            self._data.close()
        self._data = None

    @staticmethod
    def _key(fields: Fields) -> tuple[str, str, bytes]:
        return fields["data"], fields["cache"], fields["salt"]


def _manifest_path(fields: Fields) -> Path:
    return Path(fields["cache"]) / manifests.NAME


def _class_ids(fields: Fields, allowed: tuple[int, ...]) -> dict[str, int]:
    """Return the named classes; none but those of the task may be opened."""
    ids: dict[str, int] = fields["classes"]
    extra = sorted(set(ids.values()) - set(allowed))
    if extra:
        raise WireError(f"class ids {extra[:5]} do not belong to this exchange.")
    return ids


if __name__ == "__main__":
    worker_ops.main(ClientWorker().operations())
