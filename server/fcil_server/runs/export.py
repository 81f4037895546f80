"""``fcil-server export``: a run's model in another format, whether its server runs or not.

It reads the ledger and a state, and computes in the process of the command, never in the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fcil_adapters.backbones import engines
from fcil_adapters.contract import BackboneInfo, Context, Hparams, Method, State, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_from_fields
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.export.exported_model import LearningFacts, Origin
from fcil_adapters.export.load import Described, ExportOrder, check_method, exporter, write
from fcil_adapters.images.decoding import sample_folder
from fcil_adapters.masks.record import without_record
from fcil_protocol.errors import RunFailed, UsageError
from fcil_protocol.payloads.builtin import EVALUATE, LATE
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.trust.certificate import Certificate
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.federation.config import Config, load, parse
from fcil_server.federation.directory import CONFIG
from fcil_server.federation.environment import environment_settings
from fcil_server.ledger.enums import UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow, StateRow
from fcil_server.reports.results.round_views import RoundReader, sum_bytes
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.runs.run_record import check_backbone

_OVERRIDES = ("run.weights",)  # nothing else can differ for a finished run


def export_state(
    ledger: Ledger,
    directory: Path,
    row: RunRow,
    chosen: StateRow,
    wanted: ExportOrder,
    *,
    calibrate: Path | None,
    overrides: Sequence[str],
    notify: Callable[[str], None],
) -> Described:
    """Write the model of one state, completely or not at all.

    Args:
        ledger: the federation's.
        directory: the federation's.
        row: the run.
        chosen: the state (`find_state`).
        wanted: format, target and options (`fcil_adapters.export.load.wanted_form`).
        calibrate: folder of images for calibration and comparison.
        overrides: ``run.weights=FILE`` if the weights were moved.
        notify: receives a sentence about each step.

    Raises:
        FcilError: it cannot be exported; the message says why.
    """
    method = registry.load_method(row.method)
    check_method(wanted.form, method)
    module = exporter("server", wanted.form)
    wanted.check(module)
    config = _config(row, directory, overrides)
    method = registry.with_forms(method, forms_of(config.wire.half, method.name, method.half))
    hparams = method.hparams.model_validate(row.hparams)
    if wanted.needs_backbone:
        backbone, info = _backbone(method, config, notify)
    else:
        backbone, info = None, backbone_from_fields(dict(row.backbone))
    _check_readable(row, method, info)
    images = None
    if calibrate is not None:
        notify(f"reading images in {calibrate}")
        images = sample_folder(calibrate, info.preprocessing)
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
    origin = Origin(
        _federation(directory),
        row.run_id,
        chosen.task,
        chosen.state,
        classes.names(),
        learned=learned_until(ledger, chosen),
    )
    state = StateStore(states_folder(directory, row.run_id)).load(chosen.state)
    parts = _parts(method, ctx, hparams, state)
    return write(module, wanted, (method, ctx, parts, origin), state, images, notify)


def _check_readable(row: RunRow, method: Method, info: BackboneInfo) -> None:
    """Refuse states of another backbone or version of the method.

    Its uploads may differ: a new option changes these, and no state.

    Raises:
        BackboneMismatch, RunFailed: with both values, and what to do.
    """
    check_backbone(row, info, "Name the file that it began with: -c run.weights=FILE")
    if row.method_version != method.version:
        raise RunFailed(
            f"run {row.run_id} was started with {row.method} {row.method_version}, installed is "
            f"{method.version}.",
            action="Export it with the fcil that began it (docs/upgrades.md).",
        )


def learned_until(ledger: Ledger, chosen: StateRow) -> LearningFacts:
    """Return the facts about the learning that led to a state, for a model card."""
    run = chosen.run
    reader = RoundReader(ledger.database)
    views = [reader.view(row) for row in ledger.rounds.all(run) if row.base_state < chosen.state]
    # (task, client, number of the late round) -> the client's images. A task's rounds are about the
    # same ones, those of late images about others.
    trained: dict[tuple[int, str, int | None], int] = {}
    rounds = 0
    for view in views:
        counted = [
            u
            for u in ledger.updates.of_round(view.round.key)
            if u.status is UpdateStatus.COUNTED and view.round.kind != EVALUATE
        ]
        rounds += bool(counted)
        for update in counted:
            late = update.round if view.round.kind == LATE else None
            place = (update.task, update.client, late)
            trained[place] = max(trained.get(place, 0), update.samples)
    result = next(
        (r for r in ledger.evaluations.of_states(run, chosen.task) if r.state == chosen.state), None
    )
    return LearningFacts(
        clients=len({client for _, client, _ in trained}),
        images=sum(trained.values()),
        rounds=rounds,
        accuracy=result and result.accuracy,
        tested=result.total if result else 0,
        tester="server" if result and result.central else "clients",
        up_bytes=sum_bytes(v.up for v in views).true_wire,
        down_bytes=sum_bytes(v.down for v in views).true_wire,
    )


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


def _parts(method: Method, ctx: Context, hparams: Hparams, state: State) -> dict[str, Payload]:
    """Return the state's broadcast as clients receive it."""
    schemas = method.broadcast(hparams, ctx.backbone_info)
    aggregator = registry.load_half(method.aggregator)
    return {
        part.name: ctx.forms.widen(ctx.forms.narrow_exactly(part.payload, schemas[part.kind]))
        for part in aggregator.broadcast(ctx, without_record(state))
    }


def _federation(directory: Path) -> str:
    path = directory / "keys" / "certificate"
    with storage_errors("read", path):
        return Certificate.from_bytes(path.read_bytes()).federation
