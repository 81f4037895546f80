"""An experiment: one TOML that describes one table, checked completely before any work."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fcil_adapters.contract.backbone_info import MOST_PIXELS
from fcil_protocol.errors import ConfigError

Metric = Literal["faa", "aia", "forgetting"]
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^/\x00-\x1f]+$")]
SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class ExperimentSection(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Data(ExperimentSection):
    """The images, and the order of their classes."""

    name: str = Field(min_length=1, description="'digits', or what --data must hold")
    classes: int = Field(ge=1, description="classes of the data set")
    tasks: int = Field(ge=1, description="tasks, of equally many classes")
    order: Literal["pycil", "natural", "shuffled"] = Field(
        "pycil", description="of classes; 'shuffled' is drawn again for each seed"
    )
    train_per_class: int = Field(0, ge=0, description="training images of a class; 0: all")
    test_per_class: int = Field(0, ge=0, description="test images of a class; 0: all")


class SettingSection(ExperimentSection):
    """Settings that all rows share, unless a row overrides them."""

    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(
        min_length=1, description="one cell each"
    )
    clients: int = Field(ge=1, description="clients of the federation")
    clients_per_round: int = Field(0, ge=0, description="asked in a round; 0: all")
    rounds_per_task: int = Field(ge=1, description="train rounds in each task")
    backbone: str = Field("embedded", description="timm name, or 'embedded'")
    weights: str = Field(
        "", description="safetensors file of its weights; $NAME is taken from the environment"
    )
    image_size: int = Field(
        0, ge=0, le=MOST_PIXELS, description="side of its images in pixels; 0: the backbone's own"
    )
    device: str = Field("auto", description="of server and clients: auto, cpu, cuda, cuda:N")
    threads: int = Field(1, ge=1, description="of a cell's server and of its swarm, each")
    config: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="further settings of the server, by section"
    )

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed is given twice")
        return seeds


class Quantity(ExperimentSection):
    """Each client has ``alpha`` classes of every task (PILoRA)."""

    kind: Literal["quantity"]
    name: Name
    alpha: int = Field(ge=1)


class Dirichlet(ExperimentSection):
    """Each class is divided by a draw from Dirichlet(``beta``)."""

    kind: Literal["dirichlet"]
    name: Name
    beta: float = Field(gt=0)


class Hepco(ExperimentSection):
    """HePCo's: a share of a task's classes and images, drawn afresh in every round."""

    kind: Literal["hepco"]
    name: Name
    kappa: float = Field(0.6, gt=0, le=1)
    gamma: float = Field(0.1, gt=0, le=1)
    imbalance: float = Field(1.0, gt=0, le=1)


class Iid(ExperimentSection):
    """Each class is divided evenly."""

    kind: Literal["iid"]
    name: Name


AnyPartition = Annotated[Quantity | Dirichlet | Hepco | Iid, Field(discriminator="kind")]


class RowSection(ExperimentSection):
    """One line of the table: a method with its options."""

    title: Name
    method: str = Field(min_length=1)
    preset: str = Field("", description="of the method; empty: its defaults")
    options: dict[str, Any] = Field(default_factory=dict, description="of the method")
    joint: bool = Field(
        False, description="one client and one task of all classes: what the parts are measured by"
    )
    rounds_per_task: int | None = Field(None, ge=1)
    clients: int | None = Field(None, ge=1)
    clients_per_round: int | None = Field(None, ge=0)
    partitions: list[str] | None = Field(None, min_length=1, description="None: all")
    seeds: list[int] | None = Field(None, min_length=1, description="None: the experiment's")
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    cell_s: float | None = Field(None, gt=0, description="expected seconds of a cell")


class Figure(ExperimentSection):
    """A paper's numbers for one cell, in percent."""

    faa: float | None = None
    aia: float | None = None
    forgetting: float | None = None


class PaperSection(ExperimentSection):
    """Numbers of one source: row -> partition -> numbers."""

    source: str = Field(min_length=1)
    setting: str = Field(min_length=1, description="what they were measured with, in words")
    figures: dict[str, dict[str, Figure]]


class ClaimSection(ExperimentSection):
    """A sentence of a paper as a comparison of two rows."""

    text: str = Field(min_length=1)
    source: str = Field(min_length=1)
    left: str
    right: str
    partition: str
    metric: Metric = "faa"
    direction: Literal["left_higher", "left_lower"] = "left_higher"


class BudgetSection(ExperimentSection):
    """Expected time, and space on the disk."""

    cell_s: float = Field(gt=0, description="expected seconds of a cell")
    limit_s: float = Field(0.0, ge=0, description="a cell that takes longer has failed; 0: never")
    feature_cache_mb: int = Field(
        1000, ge=0, description="most of the frozen features that all cells share; 0: none"
    )


class Experiment(ExperimentSection):
    """Content of one TOML."""

    title: str = Field(min_length=1)
    about: str = ""
    differences: list[str] = Field(
        default_factory=list, description="from the papers' settings, in words"
    )
    data: Data
    setting: SettingSection
    partitions: list[AnyPartition] = Field(min_length=1)
    rows: list[RowSection] = Field(min_length=1)
    papers: list[PaperSection] = Field(default_factory=list)
    claims: list[ClaimSection] = Field(default_factory=list)
    budget: BudgetSection
    name: str = ""  # the file's, without its suffix


def load(path: Path) -> Experiment:
    """Read and check a TOML, except against the methods and the data.

    Raises:
        ConfigError: one message that names every fault.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no experiment {path}.",
            action="Those that come with fcil are in experiments/.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    if not SLUG.fullmatch(path.stem):
        raise ConfigError(
            f"the experiment's file is called {path.name!r}; expected lower-case letters, digits, "
            "- and _ (its results' folder gets this name)."
        )
    return parse(fields, path.stem)


def parse(fields: dict[str, Any], name: str) -> Experiment:
    """Check parsed fields.

    Raises:
        ConfigError: one message that names every fault.
    """
    if "name" in fields:
        raise ConfigError("unknown key 'name': an experiment is named by its file or title.")
    try:
        found = Experiment.model_validate({**fields, "name": name})
    except ValidationError as error:
        faults = [_fault(dict(e)) for e in error.errors(include_url=False)]
        raise ConfigError(f"{'; '.join(faults)}.") from error
    crossed = list(_cross_checks(found))
    if crossed:
        raise ConfigError(f"{'; '.join(crossed)}.")
    return found


def _fault(error: dict[str, Any]) -> str:
    where = ".".join(str(x) for x in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), _keys(), 1, 0.6)
        return f"unknown key {where!r}{f' (did you mean {near[0]!r}?)' if near else ''}"
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "union_tag_invalid":
        return f"{where}: kind is one of quantity, dirichlet, hepco, iid"
    return f"{where}: {error['msg'].removeprefix('Value error, ')}, got {error['input']!r}"


def _keys() -> list[str]:
    """Return every key allowed in a TOML."""
    models: list[type[BaseModel]] = [
        Experiment,
        Data,
        SettingSection,
        RowSection,
        PaperSection,
        Figure,
        ClaimSection,
        BudgetSection,
    ]
    models += get_args(get_args(AnyPartition)[0])
    return sorted({key for model in models for key in model.model_fields} - {"name"})


def _cross_checks(found: Experiment) -> Iterator[str]:
    titles = [r.title for r in found.rows]
    names = [p.name for p in found.partitions]
    for what, listed in (("row", titles), ("partition", names)):
        for twice in sorted({x for x in listed if listed.count(x) > 1}):
            yield f"two {what}s are called {twice!r}"
    if found.data.classes % found.data.tasks:
        yield f"{found.data.classes} classes do not make {found.data.tasks} equal tasks"
    per_task = found.data.classes // found.data.tasks
    for part in found.partitions:
        if isinstance(part, Quantity) and part.alpha > per_task:
            yield f"partition {part.name!r}: alpha is {part.alpha}, a task has {per_task} classes"
    for row in found.rows:
        yield from _unknown(f"row {row.title!r}", row.partitions or [], names, "partition")
        yield from _foreign_seeds(row, found.setting.seeds)
    for paper in found.papers:
        where = f"figures of {paper.source!r}"
        yield from _unknown(where, paper.figures, titles, "row")
        for of_row in paper.figures.values():
            yield from _unknown(where, of_row, names, "partition")
    for claim in found.claims:
        where = f"claim {claim.text[:40]!r}"
        yield from _unknown(where, [claim.left, claim.right], titles, "row")
        yield from _unknown(where, [claim.partition], names, "partition")
        joint = [r.title for r in found.rows if r.joint and r.title in (claim.left, claim.right)]
        if claim.metric != "faa" and joint:
            yield (
                f"{where} compares {claim.metric}, which the joint row {joint[0]!r} lacks: it has "
                "one task"
            )


def _foreign_seeds(row: RowSection, seeds: Sequence[int]) -> Iterator[str]:
    for seed in sorted(set(row.seeds or ()) - set(seeds)):
        known = ", ".join(map(str, seeds))
        yield f"row {row.title!r} names the seed {seed}, which setting.seeds lacks; it has {known}"


def _unknown(where: str, given: Any, known: list[str], what: str) -> Iterator[str]:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            yield f"{where} names the {what} {name!r}, which does not exist{hint}"
