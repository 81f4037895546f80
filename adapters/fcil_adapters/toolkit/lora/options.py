"""Options of methods that train LoRA and a linear head together (torch-free; `lora.manifest`)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fcil_adapters.backbones.blocks import Blocks
from fcil_adapters.contract import Hparams, TaskInfo

Module = Literal["q", "v", "qkv", "proj", "fc1", "fc2"]
PastRows = Literal["frozen", "together", "none"]


class LoraHparams(Hparams):
    """Placement, training and averages; the properties adapt the shared code to a method."""

    rank: int = Field(default=4, ge=1, description="Rank r of every LoRA.")
    blocks: Blocks = Field(default=(0, 1, 2, 3), description="Transformer blocks that get LoRA.")
    modules: tuple[Module, ...] = Field(
        default=("q", "v", "fc1", "fc2"),
        min_length=1,
        description="Adapted modules of each block: q and v, or qkv as one matrix, proj "
        "(attention); fc1, fc2 (MLP).",
    )
    scale: float = Field(default=1.0, gt=0, description="Factor of B A x.")
    init_a: Literal["uniform", "gaussian"] = Field(
        default="uniform",
        description="A at the start: U(-1/sqrt(in), 1/sqrt(in)), or N(0, 1/in) (paper).",
    )
    weights: Literal["samples", "uniform"] = Field(
        default="samples", description="Weight of a client: its share of images, or 1 / K."
    )
    head_average: Literal["samples", "rows"] = Field(
        default="samples",
        description="Head rows: averaged with the clients' weights, or each class row with the "
        "clients' images of that class.",
    )
    epochs: int = Field(default=5, ge=1, description="Local epochs per round.")
    batch_size: int = Field(default=64, ge=1, description="Images per optimiser step.")
    lr_lora: float = Field(default=1e-3, ge=0, description="SGD's step for LoRA; 0: frozen.")
    lr_head: float = Field(default=1e-2, gt=0, description="SGD's step for the head.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum.")
    weight_decay: float = Field(default=0.0, ge=0, description="SGD's L2 term.")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="Steps over the rounds of a task."
    )
    augment: Literal["flip_jitter", "jitter", "crop_flip", "none"] = Field(
        default="crop_flip",
        description="Random views in training; use jitter where mirror images differ (digits).",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Images from which on a client sends its mean feature, which only tasks of a "
        "single class need; the mean of one image is that image's feature.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.modules)) != len(self.modules):
            raise ValueError(f"modules must be different, got {list(self.modules)}")
        if "qkv" in self.modules and {"q", "v"} & set(self.modules):
            raise ValueError(f"qkv holds q and v already, got {list(self.modules)}")
        if self.head_average == "rows" and self.past_rows == "together":
            raise ValueError(
                "head_average = 'rows' weights a row by images of its class, and clients have none "
                "of the past classes whose rows they train here; use 'samples'"
            )
        return self

    @property
    def trained_factors(self) -> str:
        """Factors of each LoRA that clients train and send: ``AB``, or ``B`` alone."""
        return "AB"

    def factors_of(self, round_: int) -> str:
        """Return those of the trained factors that a round of a task trains and sends.

        Rounds of the same parity have the same factors.
        """
        del round_
        return self.trained_factors

    @property
    def fresh_lora(self) -> bool:
        """True if every task begins with a LoRA drawn for it, instead of the last task's."""
        return False

    @property
    def exact_lora(self) -> bool:
        """True if LoRA must travel in float32 under any ``[wire] half``."""
        return False

    @property
    def past_rows(self) -> PastRows:
        """Treatment of finished tasks' head rows.

        ``frozen``: parts of their own, which never change; ``together``: they are trained on, so
        the rows of all seen classes travel with the current ones; ``none``: no client needs them.
        """
        return "frozen"

    @property
    def frozen_columns(self) -> bool:
        """True if the frozen rows of past classes are further columns of the loss."""
        return False

    @property
    def keeps_teacher(self) -> bool:
        """True if the broadcast has the model of the last task's end as a part."""
        return False

    def single_column(self, task: TaskInfo) -> bool:
        """Return True if a task's cross-entropy has one column, which teaches nothing."""
        past = self.past_rows == "together" or self.frozen_columns
        return len(task.seen if past else task.classes) == 1


class CrossEntropyHparams(LoraHparams):
    """The same, with a choice of the cross-entropy's columns."""

    head_loss: Literal["current", "seen_frozen", "all"] = Field(
        default="current",
        description="Columns of the cross-entropy: the task's classes; all seen classes with past "
        "rows frozen; all seen classes, all rows trained.",
    )

    @property
    def past_rows(self) -> PastRows:
        """Past rows are trained on with ``all`` alone."""
        return "together" if self.head_loss == "all" else "frozen"

    @property
    def frozen_columns(self) -> bool:
        """Past rows are columns that stay with ``seen_frozen``."""
        return self.head_loss == "seen_frozen"
