"""``fcil-server export``: a run's model in another format, whether its server runs or not.

It reads the ledger and a state, and computes in the process of the command, never in the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fcil_adapters.backbones import engines
from fcil_adapters.contract import BackboneInfo, Context, Hparams, Method, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.export.exported_model import ExportInfo, Origin
from fcil_adapters.export.load import check_has_adapter, exporter
from fcil_adapters.export.peft_adapter import AdapterInfo
from fcil_adapters.images.sample import sample
from fcil_protocol.errors import UsageError
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.trust.certificate import Certificate
from fcil_server.aggregation.store import StateStore, check_state, states_folder
from fcil_server.federation.config import Config, load, parse
from fcil_server.federation.directory import CONFIG
from fcil_server.federation.environment import environment_settings
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow, StateRow
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.runs.run_record import check_resumed

_OVERRIDES = ("run.weights",)  # nothing else can differ for a finished run


def export_state(
    ledger: Ledger,
    directory: Path,
    row: RunRow,
    chosen: StateRow,
    form: str,
    target: Path,
    *,
    options: dict[str, Any],
    calibrate: Path | None,
    overrides: Sequence[str],
    notify: Callable[[str], None],
) -> ExportInfo | AdapterInfo:
    """Write the model of one state, completely or not at all.

    Args:
        ledger: the federation's.
        directory: the federation's.
        row: the run.
        chosen: the state (`choose`).
        form: ``onnx`` or ``peft`` (`fcil_adapters.export.load.chosen_form`).
        target: the file or folder; one that exists is replaced.
        options: of `fcil_adapters.export.model_file.ExportOptions`; none for ``peft``.
        calibrate: folder of images for calibration and comparison.
        overrides: ``run.weights=FILE`` if the weights were moved.
        notify: receives a sentence about each step.

    Raises:
        FcilError: it cannot be exported; the message says why.
    """
    method = registry.load_method(row.method)
    if form == "peft":
        check_has_adapter(method)
    module = exporter("server", form)
    wanted = module.ExportOptions(**options) if form == "onnx" else None
    config = _config(row, directory, overrides)
    method = registry.with_forms(method, forms_of(config.wire.half, method.name, method.half))
    hparams = method.hparams.model_validate(row.hparams)
    backbone, info = _backbone(method, config, notify)
    digest = registry.schema_digest(method, hparams, info, config.privacy.terms)
    check_resumed(row, method, info, digest)
    images = None
    if calibrate is not None:
        notify(f"reading images in {calibrate}")
        images = sample(calibrate, info.preprocessing)
    classes = ClassRegistry(ledger, row.run_id)
    ctx = Context(
        kind=EVALUATE,
        task=classes.task_info(chosen.task),
        round=0,
        rounds=1,
        hparams=hparams,
        backbone_info=info,
        seed=(row.seed,),
        backbone=backbone,
        forms=method.forms,
    )
    origin = Origin(_federation(directory), row.run_id, chosen.task, chosen.state, classes.names())
    parts = _parts(method, ctx, hparams, StateStore(states_folder(directory, row.run_id)), chosen)
    done: ExportInfo | AdapterInfo
    if form == "peft":
        done = module.export_adapter(method, ctx, parts, origin, target, images, notify)
    else:
        done = module.export_model(method, ctx, parts, origin, target, wanted, images, notify)
    return done


def choose(
    ledger: Ledger, directory: Path, row: RunRow, *, task: int | None, state: int | None
) -> StateRow:
    """Return the state that the operator chose: the newest, the last of a task, or by number.

    Raises:
        UsageError: there is none, or it is not kept; the message lists the kept ones.
        CorruptFile: its file is damaged.
    """
    if task is not None and state is not None:
        raise UsageError("expected --task or --state, not both.")
    folder = states_folder(directory, row.run_id)
    store = StateStore(folder)
    held = set(store.numbers())
    rows = [r for r in ledger.states.all(row.run_id) if r.state in held and r.task >= 0]
    fitting = [r for r in rows if task in (None, r.task) and state in (None, r.state)]
    if not fitting:
        listed = ", ".join(f"{r.state} (task {r.task})" for r in rows) or "none"
        what = "a state" if task is state else f"task {task}" if state is None else f"state {state}"
        raise UsageError(
            f"run {row.run_id} has no file of {what}; kept are the states {listed}.",
            action="Kept are the newest states and the last one of each task: docs/storage.md.",
        )
    check_state(store, fitting[-1].state, {r.state: r.digest for r in rows})
    return fitting[-1]


def _config(row: RunRow, directory: Path, overrides: Sequence[str]) -> Config:
    """Return the run's own configuration, with the current path of the weights."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in _OVERRIDES:
            raise UsageError(
                f"{key!r} cannot be set for an export; expected {' or '.join(_OVERRIDES)}.",
                action="All other settings of a run are fixed.",
            )
    settings = (*environment_settings(), *overrides)
    own, given = parse(row.config), load(directory / CONFIG, settings)
    if not given.run.weights:  # the file has the key, empty, even if the run began with a path
        return own
    moved = own.run.model_copy(update={"weights": given.run.weights})
    return own.model_copy(update={"run": moved})


def _backbone(
    method: Method, config: Config, notify: Callable[[str], None]
) -> tuple[Any, BackboneInfo]:
    if not method.needs_backbone:
        return None, NO_BACKBONE
    notify(f"loading {config.run.backbone}")
    weights = Path(config.run.weights) if config.run.weights else None
    backbone = engines.load(
        "torch", config.run.backbone, weights, "cpu", image_size=config.run.image_size or None
    )
    return backbone, backbone.info


def _parts(
    method: Method, ctx: Context, hparams: Hparams, states: StateStore, chosen: StateRow
) -> dict[str, Payload]:
    """Return the state's broadcast as clients receive it."""
    schemas = method.broadcast(hparams, ctx.backbone_info)
    aggregator = registry.load_half(method.aggregator)
    return {
        part.name: ctx.forms.widen(ctx.forms.narrow_exactly(part.payload, schemas[part.kind]))
        for part in aggregator.broadcast(ctx, states.load(chosen.state))
    }


def _federation(directory: Path) -> str:
    path = directory / "keys" / "certificate"
    with storage_errors("read", path):
        return Certificate.from_bytes(path.read_bytes()).federation
