"""The tables that `ablations.py` measures: settings, rows, and what the papers report.

Options are laid over the preset ``short``. ``paper`` is the final average accuracy (FAA) that
the method's paper reports for the same change, on CIFAR-100 with ViT-B/16; only its direction
can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """One variant of a method.

    Attributes:
        title: what is different.
        options: over those of its table.
        paper: FAA in the paper; empty: not reported.
        probe: extra work (`probes`).
        method: if not the table's.
    """

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: str = ""
    probe: Literal["", "identity", "old_only"] = ""
    method: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under one setting; images are counted per class.

    Attributes:
        split: ``dirichlet`` or ``quantity``, and its parameter.
        groups: tasks, classes per task.
    """

    name: str
    method: str
    rows: tuple[Row, ...]
    data: Literal["digits", "cifar100"] = "digits"
    split: tuple[Literal["dirichlet", "quantity"], float] = ("dirichlet", 0.5)
    clients: int = 3
    rounds: int = 2
    train: int = 40
    test: int = 30
    groups: tuple[int, int] = (5, 2)
    options: Mapping[str, Any] = field(default_factory=dict)
    paper_setting: str = ""

    def settings(self, row: Row) -> dict[str, Any]:
        """Return everything that the result of a row depends on, besides the seed."""
        setting = {
            **asdict(self),
            "method": row.method or self.method,
            "options": {"preset": "short", **self.options, **row.options},
            "probe": row.probe,
        }
        for name in ("name", "rows", "paper_setting"):
            del setting[name]
        return setting


_PLAIN = {"reweight": {"enabled": False}}
# No mirror images: a mirrored digit is no digit.
_DIGITS = {"augment": "jitter"}
_FROZEN = {"lr_lora": 0.0, "lr_prototype": 1e-12, "epochs": 1}
# Steps that let random prototypes arrive in few rounds.
_RANDOM = {"init": "random", "lr_prototype": 0.1, "batch_size": 8, "delta": 1.0}

TABLES = (
    Table(
        "hgp",
        "hgp",
        (
            Row("default (all seen classes, low rank)", paper="88.9"),
            Row("rebalancing: none", {"rebalance": "off"}, "51.8"),
            Row("rebalancing: current task only", {"rebalance": "current"}, "77.8"),
            Row("rebalancing: old tasks only", {"rebalance": "off"}, "81.7", "old_only"),
            Row("covariance: full", {"cov": "full"}),
            Row("covariance: diagonal", {"cov": "diag"}),
            Row("query of each view", {"query": "view"}),
            Row("prompts frozen", {"lr_prompt": 0.0}),
        ),
        train=30,
        options={**_DIGITS, "epochs": 3},
        paper_setting="10 tasks, Dirichlet 0.05",
    ),
    Table(
        "pilora",
        "pilora",
        (
            Row("random prototypes, re-weighting", _RANDOM, "69.5"),
            Row("random prototypes, plain averages", {**_RANDOM, **_PLAIN}, "26.8"),
            Row("class means, re-weighting", paper="69.6"),
            Row("class means, plain averages", _PLAIN),
            Row("class means, LoRA frozen", {"lr_lora": 0.0}, "68.6 (random)"),
            Row("nearest class mean (nothing trained)", _FROZEN, "65.6 (FedNCM)"),
        ),
        split=("quantity", 1),
        clients=4,
        rounds=3,
        options=_DIGITS,
        paper_setting="10 tasks, 6 of 10 classes per client",
    ),
    Table(
        "plora",
        "plora",
        (
            Row("default (distillation, re-weighting)", paper="70.7"),
            Row("no distillation (`gamma_kd = 0`)", {"gamma_kd": 0.0}, "54.4"),
            Row("plain averages of prototypes", _PLAIN, "26.8"),
            Row("LoRA frozen", {"lr_lora": 0.0}),
        ),
        split=("quantity", 1),
        clients=4,
        options=_DIGITS,
        paper_setting="10 tasks, 6 of 10 classes per client",
    ),
    Table(
        "fed_talora",
        "fed_talora",
        (
            Row("residual in factors (default)", {}, "76.6", "identity"),
            Row("no residual", {"residual": "off"}, "76.5", "identity"),
            Row("A frozen (FFA)", {"freeze_a": True}, "", "identity"),
            Row("head only (`lr_lora = 0`)", {"lr_lora": 0.0}, "69.6", "identity"),
        ),
        split=("quantity", 3),
        groups=(2, 5),
        clients=4,
        train=60,
        options={**_DIGITS, "batch_size": 8},
        paper_setting="10 tasks, 6 of 10 classes per client",
    ),
    Table(
        "hepco",
        "hepco",
        (
            Row("default", paper="76.5"),
            Row("no previous server (`replay_ratio = 0`)", {"replay_ratio": 0.0}, "61.2"),
            Row("distil the head alone", {"distill": "head"}, "74.4"),
            Row("distil the prompts alone", {"distill": "prompts"}, "68.5"),
            Row("no distillation (plain averages)", {"distill": "none"}, "67.3"),
            Row("`lambda_kl = 0`", {"lambda_kl": 0.0}, "71.4"),
            Row("`lambda_mse = 0`", {"lambda_mse": 0.0}, "74.1"),
        ),
        split=("quantity", 3),
        groups=(2, 5),
        clients=4,
        options={**_DIGITS, "batch_size": 8},
        paper_setting="10 tasks, 6 of 10 classes per client and round",
    ),
    Table(
        "cifar100",
        "pilora",
        (
            Row("nearest class mean", _FROZEN),
            Row("PILoRA"),
            Row("PLoRA", method="plora"),
            Row("Fed-TaLoRA", method="fed_talora"),
            Row("HGP", method="hgp"),
            Row("HePCo", method="hepco"),
        ),
        data="cifar100",
        groups=(5, 4),
        clients=5,
        test=50,
        options={"augment": "flip_jitter"},
    ),
)
