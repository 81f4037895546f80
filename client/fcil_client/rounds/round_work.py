"""The work of one round on a client: open the parts, have the worker train, seal the update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fcil_protocol
from fcil_adapters.backbones import engines
from fcil_adapters.contract import Context, Part, TaskInfo, registry
from fcil_adapters.contract.forgetting import classes_with_images
from fcil_adapters.contract.half_precision import describe_rounding_loss
from fcil_adapters.contract.late_images import classes_of
from fcil_adapters.contract.privacy import Privacy
from fcil_adapters.masks.exchanges import MASKING
from fcil_adapters.masks.record import without_masks
from fcil_adapters.worker.loop import context_fields
from fcil_adapters.worker.retry import UNKNOWN_BATCH, batch_of, persist
from fcil_client.data.inventory import Inventory
from fcil_client.link.downloads import open_part
from fcil_client.link.handshake import Terms, check_backbone
from fcil_client.rounds.class_ids import read_registry
from fcil_client.rounds.compute import Workplace
from fcil_client.rounds.masking import Masking, noises_sum
from fcil_client.rounds.model_keeper import ModelKeeper
from fcil_client.rounds.options import ClientOptions
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.outbox import Keeping, Outbox
from fcil_client.state.peers import PeerBook
from fcil_client.state.privacy_budget import PrivacyLedger, refuse_weak
from fcil_client.state.sent_journal import SentJournal
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.errors import (
    DataError,
    EgressRefused,
    NothingLeft,
    PrivacyRefused,
    SchemaMismatch,
    TooLarge,
    TrustError,
)
from fcil_protocol.ids import RoundKey, RunId
from fcil_protocol.messages.messages import BackboneClaim, RoundOpen, UseModel
from fcil_protocol.payloads.builtin import (
    EVALUATE,
    INVENTORY,
    LATE,
    REGISTRY,
    inventory_faults,
)
from fcil_protocol.payloads.payload import Payload, pieces, unpack
from fcil_protocol.payloads.schema import class_key
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys

KEPT_BYTES = 64 << 10  # parts up to this size, usually class names, stay open between rounds


@dataclass(frozen=True)
class _Begun:
    """The inputs of a round.

    Attributes:
        classes: the round's classes that this client holds, name -> id.
        past: those of earlier tasks, for a method that keeps exemplars of them.
        parts: the parts of the broadcast that the method receives.
        masks: those of the masked round under way.
        held: the classes that the server must name, of those that are in the round; None: this
            client has announced none.
        state: the method's, after the last counted update; None if none is needed.
    """

    classes: dict[str, int]
    past: dict[str, int]
    parts: dict[str, Payload]
    state: Payload | None
    masks: dict[str, Payload] = field(default_factory=dict)
    held: frozenset[str] | None = None

    @property
    def payloads(self) -> list[Payload]:
        """The worker's payloads: the state first, if it needs one."""
        return [*([] if self.state is None else [self.state]), *self.parts.values()]


class RoundWork:
    """All computation of a client; the worker process does the computing itself.

    Args:
        place: its worker; None: one of its own.
        notify: receives a sentence when the worker fails, with the next attempt.

    Attributes:
        journal: records every envelope that is sealed here.
        outbox: keeps updates until the server has them.
        device: the worker's device, once reported.
        claim: digest, preprocessing and probe features of the loaded backbone.
        faults: images of the last round that vanished or broke since the scan.
        names: ids of the classes that this client holds, as of the last round.
        announced: the classes with training images of the last sealed inventory; None: there is
            none yet.
        known: those that it had announced before the last order: what the server knows by now.
        effort: number of images that fit into one pass, as far as failures have shown.
        place: its worker; its own, or one that many clients share.
        resources: its share of the machine.
    """

    def __init__(
        self,
        home: Home,
        enrolment: Enrolment,
        keys: PrivateKeys,
        options: ClientOptions,
        place: Workplace | None = None,
        *,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.journal = SentJournal(home.directory)
        self.device = ""
        self.claim: BackboneClaim | None = None
        self.faults: list[str] = []
        self.names: dict[str, int] = {}
        self.announced: frozenset[str] | None = None
        self.known: frozenset[str] | None = None
        self.place = place or Workplace(options, home.directory / "worker.log")
        self.effort = self.place.effort
        self.resources = self.place.resources
        self._notify = notify
        self._engine = "torch"
        self._home = home
        self._enrolment = enrolment
        self._keys = keys
        self._options = options
        self.outbox = Outbox(home)
        self._ledger = PrivacyLedger(home.directory)
        self._opened: dict[str, Payload] = {}  # small parts of the last order, by digest
        self._keeping = Keeping(home, self.outbox)
        self._model = ModelKeeper(home, enrolment.federation, options.weights)
        self._masking = Masking(home, enrolment.client_id, keys)
        self._host = self.place.host
        self._shared = place is not None

    @property
    def data(self) -> Path:
        """The data folder or zip file."""
        return self._options.data

    async def close(self) -> None:
        """End the worker, unless others use it."""
        if not self._shared:
            await self._host.stop()

    # --- backbone and data ------------------------------------------------------------------

    def choose_engine(self, terms: Terms) -> None:
        """Choose the engine that computes the backbone's features.

        Raises:
            MethodMismatch: the server's method cannot run with the packages installed here.
        """
        if terms.method.needs_backbone:
            self._engine = engines.choose_for(terms.method, self._options.engine)

    def check_able(self, kind: str, terms: Terms) -> None:
        """Check that this client can take part in rounds of a kind.

        Raises:
            MethodMismatch: they train, and the engine here computes no gradient.
            DataError: they use unlabelled images, and this client offers none.
        """
        exchange = terms.exchange(kind)
        if exchange is None:
            return
        if terms.method.needs_backbone:
            engines.check_round(terms.method, exchange.trains, self._engine)
        if exchange.unlabelled and self._options.unlabelled is None:
            raise DataError(
                "this client offers no unlabelled images.",
                action="Name a folder of them: "
                f"{self._home.command('join', '--unlabelled', 'FOLDER')}",
            )

    def _backbone_fields(self, terms: Terms) -> dict[str, Any]:
        weights = self._options.weights
        return {
            "name": terms.backbone.name,
            "weights": str(weights) if weights else None,
            "engine": self._engine,
            "device": self._options.device,
            "precision": self._options.precision,
            "image_size": terms.backbone.preprocessing.size,
        }

    async def load(self, terms: Terms) -> None:
        """Load the backbone that the server names and compute its probe features.

        Raises:
            BackboneMismatch: it is not the server's backbone.
        """
        if not terms.method.needs_backbone:
            self.device, self.claim = "cpu", None
            return
        if self._engine == "onnx" and (clash := engines.installed().clash):
            self._notify(clash)
        loaded = await self.place.backbone(self._backbone_fields(terms))
        self.device = loaded.device
        check_backbone(loaded.info, terms.backbone)
        self.claim = loaded.claim

    def _data_fields(self) -> dict[str, Any]:
        return {
            "data": str(self._options.data.resolve()),
            "partition": str(self._options.partition or ""),
            "slot": self._options.slot,
            "seat": self._home.seat,
            "cache": str(self._home.directory),
            "salt": self._home.salt(),
            "memory_bytes": self.resources.image_bytes,
            "threads": self.resources.threads,
        }

    async def scan(self) -> Inventory:
        """Scan the folder; unreadable images are listed, the others are used.

        Raises:
            DataError: the folder cannot be used at all.
            StorageError, WorkerError: the scan failed for another reason.
        """
        async with self.place.turn:
            reply, _ = await persist(self._host, self.effort, "scan", self._data_fields())
        return Inventory(
            train={str(name): int(n) for name, n in reply["counts"]["train"].items()},
            test={str(name): int(n) for name, n in reply["counts"]["test"].items()},
            faults=[*reply["faults"], *reply["notes"]],
            changes=list(reply["changes"]),
        )

    def seal_inventory(
        self, terms: Terms, server: PublicKeys, inventory: Inventory
    ) -> tuple[StoredEnvelope, str]:
        """Seal the list of classes; class names travel only in this form.

        Returns:
            The envelope and its digest.

        Raises:
            EgressRefused: the list is not of the form that may leave the device.
            DiskFull, StorageError: the journal cannot record it.
        """
        told = inventory.announceable(self.least(terms))
        payload = told.payload()
        _refuse("the list of classes holds", inventory_faults(payload))
        self.announced = frozenset(name for name, count in told.train.items() if count)
        self.known = self.announced if self.known is None else self.known
        key = RoundKey(RunId(terms.run), -1, INVENTORY, 0)
        return self._seal(payload, key, terms, server, base=0)

    def least(self, terms: Terms) -> int:
        """Return the number of images that a class needs to take part."""
        return max(terms.privacy.min_count, self._options.limits.min_count)

    # --- a round ----------------------------------------------------------------------------

    async def run(self, order: RoundOpen, terms: Terms, server: PublicKeys, progress: Any) -> str:
        """Do the work of a round and leave the sealed update in the outbox.

        Returns:
            The update's digest.

        Raises:
            DataError: the client has no image of the round's classes.
            SchemaMismatch: a part is not of the form that its kind has.
            StaleUpdate: a part was damaged on disk.
            DiskFull, StorageError: the outbox cannot store the update, or the journal cannot record
                it; nothing of it stays.
            EgressRefused: the method produced data that must not leave the device.
            PrivacyRefused: the terms or the budget do not allow it to take part.
            WorkerError: the computation failed, also when repeated.
        """
        if not self._options.training_metrics:
            terms = replace(terms, training_metrics=False)
        async with self.place.room:
            return await self._run(order, terms, server, progress)

    async def _run(self, order: RoundOpen, terms: Terms, server: PublicKeys, progress: Any) -> str:
        task = TaskInfo(order.task, tuple(order.classes), tuple(order.past))
        # An inventory may be on its way as an order comes; with the next order, it has arrived.
        held, self.known = self.known, self.announced
        if held is not None and self.announced is not None:
            held &= self.announced
        if order.kind in MASKING:
            envelope, digest = await asyncio.to_thread(
                self._seal_masking, order, terms, task, server
            )
            await self._keeping.keep(digest, envelope, None)
            return digest
        # Reading, hashing, sealing and syncing run in threads: few and long steps.
        begun = await asyncio.to_thread(self._begin, order, terms, task, server)
        ctx = Context(
            kind=order.kind,
            task=task,
            round=order.round,
            rounds=order.rounds,
            hparams=terms.hparams,
            backbone_info=terms.backbone,
            seed=tuple(order.seed),
            micro_batch=self.effort.most(order.kind),
            privacy=_privacy(terms, order.kind, task),
            forms=terms.method.forms,
        )
        async with self._model.beside(order, terms, ctx, self.names, self._notify):
            state, payload = await self._compute(ctx, terms, begun, progress)
        if order.kind == LATE:
            described = classes_with_images(payload, task.seen)
            names = [name for name, c in begun.classes.items() if c in described]
            await asyncio.to_thread(self._charge, terms, order.key, task, names)
        if terms.method.plain is not None and order.kind != EVALUATE:
            begun = replace(begun, held=held)
            payload = await asyncio.to_thread(self._mask, order, terms, task, begun, payload)
        del begun  # free the parts' memory before sealing
        envelope, digest = await asyncio.to_thread(
            self._seal_update, payload, order, terms, task, server
        )
        await self._keeping.keep(digest, envelope, state)
        return digest

    def _seal_masking(
        self, order: RoundOpen, terms: Terms, task: TaskInfo, server: PublicKeys
    ) -> tuple[StoredEnvelope, str]:
        """Make and seal the upload of a round of keys, shares, votes or unmasking."""
        refuse_weak(terms.privacy, self._options.limits)
        _, parts = self._parts(order, terms, task, server)
        payload = self._masking.upload(order, terms, parts)
        return self._seal_update(payload, order, terms, task, server)

    def _mask(
        self, order: RoundOpen, terms: Terms, task: TaskInfo, begun: _Begun, payload: Payload
    ) -> Payload:
        """Check the method's own upload as if it were sent, and hide it."""
        assert terms.method.plain is not None, "the run's rounds are masked"
        if begun.held is None:
            raise TrustError(
                "masked round: it came before this client had told the server its classes.",
                action="Nothing was sent. The client takes part when it is asked again.",
            )
        self._guard(replace(terms, method=terms.method.plain), order.kind, payload, task)
        parts = {**begun.parts, **begun.masks}
        return self._masking.masked(order, terms, task, parts, self.names, begun.held, payload)

    def _begin(self, order: RoundOpen, terms: Terms, task: TaskInfo, server: PublicKeys) -> _Begun:
        """Open the order's parts, and charge the round to the privacy budget.

        A round of late images is charged when it is known which classes it describes.
        """
        self.names, every = self._parts(order, terms, task, server)
        parts = without_masks(every)
        masks = {name: part for name, part in every.items() if name not in parts}
        exchange = terms.exchange(order.kind)
        if order.kind == EVALUATE and terms.method.plain is not None:
            self._masking.file.erase()  # the masked rounds before it are over
        if exchange is not None and exchange.unlabelled:
            self._charge(terms, order.key, task, [])  # the owner's limits hold here too
            return _Begun({}, {}, parts, self._home.state())
        wanted = set(task.seen if order.kind == EVALUATE else classes_of(order.kind, task))
        classes = {name: c for name, c in self.names.items() if c in wanted}
        if not classes:
            lacks = NothingLeft if order.kind == LATE else DataError
            raise lacks("this client holds no class of this round.")
        if order.kind == EVALUATE:
            return _Begun(classes, {}, parts, None)
        if order.kind == LATE:
            self._refuse_unmasked(terms)
            refuse_weak(terms.privacy, self._options.limits)
            return _Begun(classes, {}, parts, self._home.state())
        if exchange is not None and exchange.masking:
            self._masking.check_unused(order, terms, masks, classes)
        self._charge(terms, order.key, task, list(classes))
        keeps = terms.method.exemplars(terms.hparams)
        past = {name: c for name, c in self.names.items() if keeps and c in task.past}
        return _Begun(classes, past, parts, self._home.state(), masks)

    def _parts(
        self, order: RoundOpen | UseModel, terms: Terms, task: TaskInfo, server: PublicKeys
    ) -> tuple[dict[str, int], dict[str, Payload]]:
        """Open the order's parts: return the registry's names, and the parts for the method."""
        opened = {
            ref.digest: self._opened.get(ref.digest)
            or open_part(self._home, ref, self._keys, server)
            for ref in order.parts
        }
        self._opened = {
            ref.digest: opened[ref.digest] for ref in order.parts if ref.sealed_bytes <= KEPT_BYTES
        }
        parts = {ref.name: opened[ref.digest] for ref in order.parts}
        names = read_registry(parts.pop(REGISTRY, None))
        for name, part in parts.items():
            faults = registry.part_faults(
                terms.method, terms.hparams, terms.backbone, task, Part(name, part)
            )
            if faults:
                raise SchemaMismatch(f"the server's {'; '.join(faults[:5])}.")
        return names, parts

    # --- a model outside of rounds ----------------------------------------------------------

    def keep_model(self, model: UseModel, terms: Terms, server: PublicKeys) -> str:
        """Make a model that the server offers the current one; return a sentence about it.

        Raises:
            SchemaMismatch: a part is not of the form that its kind has.
            StaleUpdate: a part was damaged on disk.
            DiskFull, StorageError: it cannot be kept; the previous model is intact.
        """
        task = TaskInfo(model.task, tuple(model.classes), tuple(model.past))
        names, _ = self._parts(model, terms, task, server)
        record = self._model.keep_offered(model, terms, names)
        if record is None:
            return "there is no model yet"
        why = "the operator promoted it" if record.promoted else "newer ones replace it"
        return f"predict uses the model {record.progress_text} of run {record.run}: {why}"

    def has_model(self, model: UseModel) -> bool:
        """Return True if an offered model is the current one."""
        return self._model.has(model)

    def release_model(self, run: str, promoted: int) -> None:
        """Let newer models replace a promoted one, unless it is the run's promoted state.

        Raises:
            DiskFull, StorageError: that cannot be recorded.
        """
        self._model.release(run, promoted)

    def _refuse_unmasked(self, terms: Terms) -> None:
        """Check that the run's rounds are masked, if the owner of this device has pinned peers.

        Raises:
            PrivacyRefused: they are not.
        """
        if not terms.privacy.masks and PeerBook(self._home.directory).pinned():
            raise PrivacyRefused(
                "the owner of this client has pinned other clients, so it trains in masked rounds "
                "alone, and those of this run are not masked.",
                action=f"Unpin them ({self._home.command('peers', '--unpin', 'FINGERPRINT')}) if "
                "that is enough, or ask the operator for privacy.secure = 'masks'.",
            )

    def _charge(self, terms: Terms, key: RoundKey, task: TaskInfo, classes: list[str]) -> None:
        self._refuse_unmasked(terms)
        names: list[str] = []
        if terms.privacy.noise_multiplier > 0:
            names = [s.name for s in terms.method.statistics(terms.hparams, key.kind, task)]
        keys = sorted({class_key(name) for name in classes})
        self._ledger.charge(terms.privacy, self._options.limits, key, keys, names)

    async def _compute(
        self,
        ctx: Context,
        terms: Terms,
        begun: _Begun,
        progress: Any,
    ) -> tuple[Payload | None, Payload]:
        fields = {
            "method": terms.method.name,
            "context": context_fields(ctx),
            "classes": begun.classes,
            "past": begun.past,
            "parts": list(begun.parts),
            "backbone": self._backbone_fields(terms),
            "min_count": self.least(terms),
            "unlabelled": str(self._options.unlabelled or ""),
            **self._data_fields(),
        }
        evaluate = ctx.kind == EVALUATE
        async with self.place.turn:
            reply, answer = await persist(
                self._host,
                self.effort,
                "evaluate" if evaluate else "run",
                fields,
                begun.payloads,
                batch=UNKNOWN_BATCH if evaluate else batch_of(ctx.hparams),
                on_progress=lambda p: progress(p.done, p.total),
                notify=self._notify,
            )
        self.faults = [str(f) for f in reply["faults"]]
        for sentence in (*reply.get("notes", ()), *describe_rounding_loss(reply.get("lost", {}))):
            self._notify(sentence)
        payloads = [unpack(blob) for blob in answer]
        if evaluate:
            return None, payloads[0]
        exchange = registry.find_exchange(terms.method, terms.hparams, terms.backbone, ctx.kind)
        upload = payloads[1]
        if terms.training_metrics:
            upload = replace(upload, meta={**upload.meta, **reply.get("trained", {})})
        return (payloads[0] if exchange.keeps_state else None), upload

    def _seal_update(
        self, payload: Payload, order: RoundOpen, terms: Terms, task: TaskInfo, server: PublicKeys
    ) -> tuple[StoredEnvelope, str]:
        """Check the method's upload, and seal it."""
        if order.kind == EVALUATE:
            payload = withhold(payload, max(order.min_count, self.least(terms)))
        self._guard(terms, order.kind, payload, task)
        return self._seal(payload, order.key, terms, server, base=order.base)

    def _guard(self, terms: Terms, kind: str, payload: Payload, task: TaskInfo) -> None:
        """Check that an upload holds only the fields that the schema of this exchange names."""
        _refuse("the method produced", terms.check_upload(kind, payload, task))

    def _core(self, terms: Terms, key: RoundKey, *, base: int) -> Core:
        return Core(
            protocol=fcil_protocol.PROTOCOL_VERSION,
            federation=self._enrolment.federation,
            run=key.run,
            direction="update",
            sender=self._enrolment.client_id,
            sender_key=self._keys.public.fingerprint,
            recipient="server",
            method=terms.method.name,
            schema=terms.schema_digest,
            task=key.task,
            round=key.round,
            kind=key.kind,
            base=base,
        )

    def _seal(
        self, payload: Payload, key: RoundKey, terms: Terms, server: PublicKeys, *, base: int
    ) -> tuple[StoredEnvelope, str]:
        plain = pieces(payload, compact=terms.compact)
        size = sum(map(len, plain))
        if size > terms.max_payload_bytes:
            raise TooLarge(
                f"an upload of {size} bytes exceeds the {terms.max_payload_bytes} that the "
                "server takes."
            )
        core = self._core(terms, key, base=base)
        sealed, content_key = seal(plain, core, self._keys)
        wrap = wrap_key(content_key, sealed.header, server)
        # Recorded before it can be sent: an envelope that the journal does not list never leaves.
        relay = terms.summing_relay(key.kind)
        opener = "" if relay is None else terms.relay_name
        self.journal.sealed(payload, terms.upload_schema(key.kind), sealed.parsed, opener)
        digest = str(sealed.parsed.update_id)
        if relay is not None:
            self.outbox.share(digest, wrap_key(content_key, sealed.header, relay))
        return sealed.stored(wrap), digest


def _refuse(what: str, faults: list[str]) -> None:
    if faults:
        raise EgressRefused(
            f"{what} data that must not leave the device: {'; '.join(faults[:10])}.",
            action=EgressRefused.default_action(),
        )


def _privacy(terms: Terms, kind: str, task: TaskInfo) -> Privacy:
    """Return the clipping and noise of a learner's statistics."""
    with_masks = noises_sum(terms, kind, task)
    return Privacy(0.0 if with_masks else terms.privacy.noise_multiplier, terms.privacy.clip)


def withhold(results: Payload, min_count: int) -> Payload:
    """Leave out the results of classes with fewer test images than ``min_count``."""
    kept = results.i64("total") >= min_count
    tensors = {name: results.i64(name)[kept] for name in ("classes", "correct", "total")}
    return Payload({**tensors, "n": tensors["total"].sum().reshape(1)})
