"""Options that PILoRA and PLoRA share, those of the re-weighting included (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.contract import Hparams


class ReweightOptions(Hparams):
    """The server's combination of the clients' prototypes of one class (`reweighting`)."""

    enabled: bool = Field(
        default=True,
        description="False: plain averages with the clients' sample weights (the ablation).",
    )
    temperature: Literal["div", "mul"] = Field(
        default="div",
        description="softmax(a / eta) as in the published code, or softmax(eta * a) as printed.",
    )
    eta: float = Field(default=0.2, gt=0, description="Temperature or factor of the softmax.")
    distance: Literal["plain", "squared"] = Field(
        default="plain", description="Euclidean distance to the owners' means, or its square."
    )
    empty: Literal["keep", "uniform"] = Field(
        default="keep",
        description="A class that no client has this round: keep its prototype, or average all.",
    )
    owners_only: bool = Field(
        default=False, description="Combine only prototypes of clients that have the class."
    )
    count_weighted: bool = Field(
        default=False, description="Weight the distance to an owner's mean by its image count."
    )
    min_count: int = Field(
        default=1, ge=1, description="Images from which on a client counts as owner of a class."
    )


class PrototypeHparams(Hparams):
    """LoRA on q and v, trained with one prototype per class; published settings."""

    rank: int = Field(default=4, ge=1, description="Rank r of every LoRA.")
    scale: float = Field(default=1.0, gt=0, description="Factor of B A x.")
    epochs: int = Field(default=5, ge=1, description="Local epochs per round.")
    batch_size: int = Field(default=64, ge=1, description="Images per optimiser step.")
    lr_prototype: float = Field(default=2e-3, gt=0, description="Adam's step for prototypes.")
    lr_lora: float = Field(default=1e-5, ge=0, description="Adam's step for LoRA; 0: frozen.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="L2 term inside Adam (PILoRA's published code: 1e-5)."
    )
    schedule: Literal["cosine", "cosine_repeat", "constant"] = Field(
        default="cosine",
        description="Steps over the rounds of a task; cosine_repeat uses the first factor twice, "
        "as PILoRA's published code does.",
    )
    lambda_pl: float = Field(default=0.001, ge=0, description="Weight of the pull term l_pl.")
    delta: float = Field(default=1.0, gt=0, description="Factor of distances in the softmax.")
    dce: Literal["rms", "sq", "sq_over_d"] = Field(
        default="rms",
        description="Distance in both prototype losses: sqrt(sq / d) (PILoRA's published code), "
        "squared (papers), sq / d.",
    )
    init: Literal["class_means", "random"] = Field(
        default="class_means",
        description="New prototypes: federated class means (one more exchange), or 0.1 N(0, I).",
    )
    init_a: Literal["uniform", "gaussian"] = Field(
        default="uniform",
        description="A as a LoRA begins: U(-1/sqrt(d), 1/sqrt(d)) (PILoRA's published code), or "
        "N(0, 1/d) (Gaussian, as PILoRA's paper says).",
    )
    mean_from: Literal["eval", "training"] = Field(
        default="eval",
        description="Mean features from a pass after training, or from all training batches "
        "(PILoRA's published code).",
    )
    augment: Literal["flip_jitter", "jitter", "crop_flip", "none"] = Field(
        default="flip_jitter",
        description="Random views in training; use jitter where mirror images differ (digits).",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Images of a class from which on its mean feature leaves a client; the mean "
        "of one image is that image's feature.",
    )
    reweight: ReweightOptions = Field(
        default_factory=ReweightOptions, description="How the server combines prototypes."
    )
