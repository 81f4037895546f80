"""HePCo's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.prompts.options import PoolHparams

GROWTH = 50  # steps that each task adds to the old generator's (published code)


class HepcoHparams(PoolHparams):
    """Defaults are the published settings where they work as described (NOTES.md)."""

    send_counts: bool = Field(
        default=True,
        description="Whether clients report how many images of each class they have (published "
        "code). False (paper): the server takes them as spread evenly over the task's classes.",
    )
    weights: Literal["per_class", "repo", "none"] = Field(
        default="per_class",
        description="Weight of client k for label y in all losses: n_ky / N_y; n_ky over one "
        "total of all classes (published code); 1 (paper).",
    )
    labels: Literal["counts", "uniform"] = Field(
        default="counts",
        description="Labels of latents: in proportion to image counts, or uniform (paper).",
    )
    kl: Literal["teacher_student", "student_teacher"] = Field(
        default="teacher_student",
        description="KL(client || server) as in the published code, or KL(server || client).",
    )
    detach_query: bool = Field(
        default=True,
        description="True: the prompt disagreement gives the generator no gradient (published "
        "code). False (paper) needs mse_reduction = 'mean'.",
    )
    mse_reduction: Literal["sum", "mean"] = Field(
        default="sum",
        description="Prompt disagreement summed over a prompt's entries (published code), or "
        "averaged (paper).",
    )
    lambda_kl: float = Field(
        default=1.0, ge=0, description="Weight of the head disagreement in generation."
    )
    lambda_mse: float = Field(
        default=0.1, ge=0, description="Weight of the prompt disagreement in generation."
    )
    generator_steps: int = Field(default=100, ge=1, description="Steps of the new generator.")
    old_steps: Literal["growing", "fixed"] = Field(
        default="growing",
        description="Steps of the old generator: generator_steps + 50 t (published code), or "
        "generator_steps (paper).",
    )
    lr_generator: float = Field(default=1e-4, gt=0, description="Adam's step for generators.")
    noise: int = Field(
        default=64, ge=1, description="Length of the noise, and of a label's embedding."
    )
    hidden: tuple[int, int] = Field(
        default=(256, 1024), description="Widths of the generator's hidden layers."
    )
    batch_norm: bool = Field(
        default=True, description="Batch normalisation in the generator (published code)."
    )
    distill: Literal["both", "prompts", "head", "none"] = Field(
        default="both",
        description="Tensors that the server improves by distillation; none: plain averages.",
    )
    distillation_steps: int = Field(
        default=200, ge=1, description="Steps for the prompts, and as many for the head."
    )
    lr_distillation: float = Field(
        default=1e-4, gt=0, description="Adam's step for the server's prompts, keys and head."
    )
    server_batch_size: int = Field(
        default=64, ge=2, description="Latents per step; batch normalisation needs two."
    )
    replay_ratio: float = Field(
        default=0.5,
        ge=0,
        le=8,
        description="Latents of past classes per latent of the task; 0: no previous server.",
    )
    total_classes: int | None = Field(
        default=None,
        ge=1,
        description="Classes of the whole run, which the published code adds to the total of "
        "weights = 'repo'; None: those of the tasks so far.",
    )

    @property
    def replays(self) -> bool:
        """True if a server before the task teaches its classes again."""
        return self.distill != "none" and self.old_batch > 0

    @property
    def old_batch(self) -> int:
        """Latents of past classes per distillation step; 0: no replay."""
        wanted = round(self.replay_ratio * self.server_batch_size)
        return max(wanted, 1) if self.replay_ratio > 0 else 0

    def old_generator_steps(self, task: int) -> int:
        """Return the steps of the old generator in task t >= 1."""
        growth = GROWTH * task if self.old_steps == "growing" else 0
        return self.generator_steps + growth

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if min(self.hidden) < 1:
            raise ValueError(f"hidden must be two widths >= 1, got {list(self.hidden)}")
        if not self.detach_query and self.mse_reduction == "sum":
            raise ValueError(
                "detach_query = false with mse_reduction = 'sum' drives the latents away from "
                "their classes; give mse_reduction = 'mean' (paper) or keep detach_query = true"
            )
        return self


# The paper's letter; the published code as it runs; few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {
            "schedule": "constant",
            "query": "view",
            "pixels": "unit",
            "send_counts": False,
            "weights": "none",
            "labels": "uniform",
            "kl": "student_teacher",
            "detach_query": False,
            "mse_reduction": "mean",
            "old_steps": "fixed",
            "batch_norm": False,
        },
        "repo": {
            "lr": 5e-3,
            "schedule": "cosine_repeat",
            "query": "view",
            "pixels": "unit",
            "weights": "repo",
        },
        "short": {
            "pixels": "normalised",
            "pool_size": 20,
            "prompt_length": 8,
            "epochs": 3,
            "batch_size": 16,
            "lr": 1e-2,
            "hidden": (64, 256),
            "distillation_steps": 100,
            "lr_distillation": 5e-5,
            "replay_ratio": 2.0,
        },
    }
)

ECONOMIES = (
    Economy("50 prompts in a pool", "prompts", {"pool_size": 50}),
    Economy("20 prompts in a pool", "prompts", {"pool_size": 20}),
    Economy("8 rows in a prompt", "most of a prompt's length", {"prompt_length": 8}),
)
