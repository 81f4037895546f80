"""HGP: Hierarchical Generative Prototypes for federated class-incremental learning.

Riccardo Salami, Pietro Buzzega, Matteo Mosconi, Mattia Verasani, Simone Calderara. Federated
Class-Incremental Learning with Hierarchical Generative Prototypes. 2024.
https://arxiv.org/abs/2406.02447

Manifest (no torch): hyper-parameters, exchanges, schemas. The way from the equations to the
functions, and every deviation, is in NOTES.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fcil_adapters.contract import BackboneInfo, Exchange, Method, TaskInfo
from fcil_adapters.gaussians import max_factor_rows, triangle_size
from fcil_adapters.methods.hgp.options import PRESETS, HgpHparams
from fcil_adapters.methods.hgp.parts import check_upload, pool_names
from fcil_protocol.errors import ConfigError
from fcil_protocol.schema import Kind, MetaSpec, PayloadSchema, TensorSpec


def exchanges(hparams: HgpHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the one exchange of a task.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    _check_blocks(hparams, backbone)
    upload = PayloadSchema(
        (
            *_pool_specs(hparams),
            *_head_specs("c"),
            _counts("classes", "c"),
            _counts("count", "c"),
            *_gaussian_specs(hparams),
            _counts("n", 1),
        ),
        at_most=(("owned", "c"), ("rows", "factor_rows"), ("tall", "c")),
    )
    return (Exchange("train", upload, check=partial(check_upload, hparams)),)


def broadcast(hparams: HgpHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part (its prompts, the whole head) and of a past task."""
    _check_blocks(hparams, backbone)
    meta = (MetaSpec("task", "int"),)
    head = (*_head_specs("s"), _counts("classes", "s"), _counts("seen", "s"))
    return {
        "current": PayloadSchema((*_pool_specs(hparams), *head), meta),
        "task": PayloadSchema(_pool_specs(hparams), meta),
    }


def dims(hparams: HgpHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, prompts m and their length L, classes c and s, and the Gaussians' bounds."""
    c, d = len(task.classes), backbone.dim
    rows = hparams.cov_rank if hparams.cov == "lowrank" else max_factor_rows(d)
    return {
        "d": d,
        "m": hparams.prompts,
        "L": hparams.length,
        "c": c,
        "s": len(task.seen),
        "factor_rows": c * min(rows, d),
        "triangle": triangle_size(d),
    }


def _check_blocks(hparams: HgpHparams, backbone: BackboneInfo) -> None:
    beyond = [b for b in hparams.blocks if b >= backbone.depth]
    if beyond:
        raise ConfigError(
            f"option 'blocks' of method hgp: block {beyond[0]} does not exist; the backbone "
            f"{backbone.name} has the blocks 0 to {backbone.depth - 1}.",
            action="Name existing blocks.",
        )


def _pool_specs(hparams: HgpHparams) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, Kind.KEY, ("m", "d"))
        if name.startswith("key.")
        else TensorSpec(name, Kind.PROMPT, ("m", "L", "d"))
        for name in pool_names(hparams.pools)
    )


def _head_specs(rows: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("head.weight", Kind.HEAD, (rows, "d")),
        TensorSpec("head.bias", Kind.HEAD, (rows,)),
    )


def _gaussian_specs(hparams: HgpHparams) -> tuple[TensorSpec, ...]:
    """Describe the classes of which a client has enough images, by the covariance's form."""
    mean, rest, factor, triangle = (
        TensorSpec(f"gauss.{name}", Kind.GAUSSIAN, shape)
        for name, shape in (
            ("mean", ("owned", "d")),
            ("rest", ("owned", "d")),
            ("factor", ("rows", "d")),
            ("triangle", ("tall", "triangle")),
        )
    )
    if hparams.cov == "diag":
        return (mean, rest)
    return (mean, rest, factor) if hparams.cov == "lowrank" else (mean, factor, triangle)


def _counts(name: str, rows: int | str) -> TensorSpec:
    return TensorSpec(name, Kind.COUNT, (rows,), dtype="I64", non_negative=True)


def _half(name: str) -> str:
    return f"fcil_adapters.methods.hgp.{name}"


METHOD = Method(
    name="hgp",
    version="1",
    title="HGP: Federated Class-Incremental Learning with Hierarchical Generative Prototypes",
    citation="R. Salami, P. Buzzega, M. Mosconi, M. Verasani, S. Calderara. 2024. "
    "https://arxiv.org/abs/2406.02447",
    hparams=HgpHparams,
    exchanges=exchanges,
    broadcast=broadcast,
    dims=dims,
    learner=_half("learner:Learner"),
    aggregator=_half("aggregator:Aggregator"),
    model=_half("model:Model"),
    presets=PRESETS,
)
