"""Backbones and models in both workers; torch is imported at the first need only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fcil_adapters.backbones import engines
from fcil_adapters.backbones.probes import probe_features
from fcil_adapters.contract import BackboneInfo, Context, ImageSet, Method, registry, source_code
from fcil_adapters.contract.backbone_info import backbone_fields, preprocessing_digest
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.resources import machine, memory_limit
from fcil_adapters.worker import evaluation
from fcil_adapters.worker.feature_files import FeatureFiles
from fcil_adapters.worker.feature_folder import FeatureFolder
from fcil_adapters.worker.loop import Call, Reply, context_from
from fcil_adapters.worker.memory_files import Blob
from fcil_adapters.worker.pipe import Fields
from fcil_protocol.errors import BackboneMismatch, WireError
from fcil_protocol.payloads.payload import Payload, unpack


class LoadedModels:
    """The one backbone that a worker keeps loaded, and its device.

    Every call names the backbone under ``backbone``: ``{name, weights, device, image_size}``, with
    ``weights`` a path or None, ``device`` also ``auto``, and ``image_size`` also None, the model's
    own; a client adds its choice of ``precision`` and ``engine``, which is torch otherwise. So a
    restarted worker loads it again by itself. Only the engine torch imports torch.
    """

    def __init__(self) -> None:
        self._meant: tuple[str, str, str | None, str, int | None] | None = None
        self._loaded: Any = None
        self._store: FeatureFiles | None = None
        self._methods: dict[str, Method] = {}  # finding one reads every installed package

    def backbone(self, call: Call) -> Reply:
        """Load a backbone and describe it.

        Fields: see the class. Result: ``info`` (`contract.backbone_info.backbone_fields`),
        ``device`` (torch's name), ``description`` (of the device, for people); payload:
        ``probe``, the probe images' features (4, d).
        """
        loaded = self._load(call, call.fields)
        fields = {
            "info": backbone_fields(loaded.info),
            "device": loaded.device,
            "description": loaded.description,
        }
        return fields, [Payload({"probe": probe_features(loaded)})]

    def prepare(self, call: Call) -> tuple[Method, Context]:
        """Return the method that a call names, in the run's forms, and its context.

        The context has the device and the backbone.

        Fields: method, context (`loop.context_fields`), backbone (see the class).

        Raises:
            BackboneMismatch: the loaded backbone differs from the context's.
            ConfigError, WireError: the method or a field is wrong.
        """
        name = call.fields["method"]
        method = self._methods.get(name) or registry.load_method(name)
        self._methods[name] = method
        if not method.needs_backbone:
            memory_limit.enforce()
            ctx = context_from(call.fields["context"], method, progress=call.progress)
            return registry.with_forms(method, ctx.forms), ctx
        loaded = self._load(call, call.fields["backbone"])
        ctx = context_from(
            call.fields["context"],
            method,
            device=loaded.device,
            backbone=loaded,
            progress=call.progress,
        )
        _check_same(loaded.info, ctx.backbone_info)
        return registry.with_forms(method, ctx.forms), ctx

    def _load(self, call: Call, wanted: Fields) -> Any:
        name, weights, device = wanted["name"], wanted["weights"], wanted["device"]
        engine, image_size = wanted.get("engine", "torch"), wanted.get("image_size")
        meant = (engine, name, weights, device, image_size)
        if meant != self._meant:
            call.alive(f"loading {name}")  # torch, the device and the weights take a while
            self._loaded = self._meant = None  # two backbones need not fit at once
            path = Path(weights) if weights else None
            self._loaded = engines.load(engine, name, path, device, image_size=image_size)
            self._share_features(engine)
            self._meant = meant
            call.alive.over()
        if engine == "torch":
            self._loaded.choose_precision(wanted.get("precision", "fp32"))
        self._loaded.alive = call.alive  # every pass through it is a sign of life
        return self._loaded

    def _share_features(self, engine: str) -> None:
        """Connect the loaded backbone to the cache of an experiment, if the environment has one.

        Only torch's: every cell has it, since its server loads the backbone with torch.
        """
        if self._store is not None:
            self._store.close()
            self._store = None
        folder = FeatureFolder.of(os.environ)
        if folder is None or engine != "torch":
            return
        # Features are float32 for every training precision, which is not chosen yet.
        timm = f"timm {engines.installed().timm}"
        code = f"code {source_code.package_digest('fcil_adapters.backbones')[:16]}"
        facts = (engine, self._loaded.description, timm, machine.processor(), "float32", code)
        self._store = FeatureFiles(folder, ", ".join(facts))
        self._loaded.memory.store = self._store


def evaluate(
    method: Method, ctx: Context, parts: Mapping[str, Payload], images: ImageSet
) -> Payload:
    """Compose the global model and count right answers (``payloads.builtin.EVALUATE``)."""
    predictor = registry.load_half(method.model).compose(ctx, parts, ctx.backbone)
    batch = min(256, ctx.micro_batch or 256)
    classes, correct, total = evaluation.evaluate(predictor, images, batch)
    n = np.array([len(images)], dtype=np.int64)
    return Payload({"classes": classes, "correct": correct, "total": total, "n": n})


def read_parts(call: Call, payloads: Sequence[Blob], forms: Forms) -> dict[str, Payload]:
    """Return the parts of a broadcast by the names in the call's ``parts``, in float32.

    Raises:
        WireError: the numbers of payloads and names differ, or a payload is malformed.
    """
    names = call.fields["parts"]
    if len(names) != len(payloads):
        raise WireError(f"{len(names)} parts are named, {len(payloads)} payloads arrived.")
    return {name: forms.widen(unpack(data)) for name, data in zip(names, payloads, strict=True)}


def _check_same(ours: BackboneInfo, theirs: BackboneInfo) -> None:
    """Refuse to compute with a backbone or a preprocessing other than the run's."""
    if ours.digest != theirs.digest:
        raise BackboneMismatch(
            f"the loaded backbone has digest {ours.digest[:12]}, "
            f"the run's {theirs.name!r} has {theirs.digest[:12]}.",
            action="Use the same weights file on every device.",
        )
    if preprocessing_digest(ours.preprocessing) != preprocessing_digest(theirs.preprocessing):
        raise BackboneMismatch(
            f"the loaded backbone prepares images as {ours.preprocessing}, "
            f"the run as {theirs.preprocessing}.",
            action="Install the same version of timm on every device.",
        )
