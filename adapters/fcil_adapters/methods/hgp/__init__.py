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

from fcil_adapters.backbones.blocks import check_blocks
from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Claim,
    Exchange,
    Largest,
    MetaSpec,
    Method,
    PayloadSchema,
    Statistic,
    TaskInfo,
    every_rule,
)
from fcil_adapters.methods.hgp.options import ECONOMIES, PRESETS, HgpHparams
from fcil_adapters.methods.hgp.parts import pool_names
from fcil_adapters.numerics.class_reports import count_spec
from fcil_adapters.toolkit.gaussians.discriminant_head import DISCRIMINANT, quadratic_specs
from fcil_adapters.toolkit.gaussians.gaussian import gaussian_specs
from fcil_adapters.toolkit.gaussians.reports import (
    gaussian_dims,
    gaussian_largest,
    gaussian_statistics,
    report_faults,
)
from fcil_adapters.toolkit.heads.rows import head_specs, row_specs
from fcil_adapters.toolkit.prompts.manifest import TRAINED_KINDS, prompt_specs


def exchanges(hparams: HgpHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the one exchange of a task.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("hgp", hparams.blocks, backbone)
    upload = PayloadSchema(
        (
            *prompt_specs(pool_names(hparams.pools), "m"),
            *head_specs("c"),
            count_spec("classes", "c"),
            count_spec("count", "c"),
            *gaussian_specs(hparams.cov),
            count_spec("n", 1),
        ),
        at_most=(("owned", "c"), ("rows", "factor_rows"), ("tall", "c")),
    )
    return (Exchange("train", upload, check=partial(report_faults, hparams)),)


def broadcast(hparams: HgpHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the current part, of a task's prompts, and of a quadratic head.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    check_blocks("hgp", hparams.blocks, backbone)
    meta = (MetaSpec("task", "int"),)
    parts = {
        "current": PayloadSchema(row_specs("s"), meta),
        "task": PayloadSchema(prompt_specs(pool_names(hparams.pools), "m"), meta),
    }
    if hparams.head == "quadratic":
        parts[DISCRIMINANT] = PayloadSchema(quadratic_specs(), at_most=(("known", "s"),))
    return parts


def dims(hparams: HgpHparams, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
    """Return d, prompts m and their length L, classes c and s, and the Gaussians' bounds."""
    return {
        "d": backbone.dim,
        "m": hparams.prompts,
        "L": hparams.length,
        "c": len(task.classes),
        "s": len(task.seen),
        "own_rank": hparams.own_rank,
        **gaussian_dims(hparams, backbone, task),
    }


def statistics(hparams: HgpHparams, _kind: str, _task: TaskInfo) -> tuple[Statistic, ...]:
    """Return what noise protects: the Gaussians of the classes."""
    return gaussian_statistics(hparams)


def largest(h: HgpHparams, _backbone: BackboneInfo, task: TaskInfo, _clients: int) -> Largest:
    """Return that a full covariance is a triangle or a factor, which is never the larger."""
    return gaussian_largest(h, task)


def _half(name: str) -> str:
    return f"fcil_adapters.methods.hgp.{name}"


METHOD = Method(
    name="hgp",
    version="3",
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
    cadence={"task": Cadence.OWN, DISCRIMINANT: Cadence.COUNTED},
    largest=largest,
    averagings=every_rule,
    statistics=statistics,
    half=TRAINED_KINDS,
    claim=Claim(
        said="0.3 MB up and 0.6 MB down",
        up_bytes=307_240,
        down_bytes=584_080,
        leaves_out="the Gaussians' means and covariances, and four of the five layers' pools",
    ),
    economies=ECONOMIES,
)
