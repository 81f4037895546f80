"""A client's own choices: data, resources, limits; never hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fcil_client.policy.policy import ALWAYS, PolicyRules
from fcil_client.rounds.resources import NICE
from fcil_client.state.privacy_budget import NO_LIMITS, PrivacyLimits

WORK_TIMEOUT_S = 1800.0  # a step of 64 images of a ViT-B/16 takes a slow processor 10 minutes


@dataclass(frozen=True)
class ClientOptions:
    """A client's own choices: data, resources, limits; never hyper-parameters.

    Attributes:
        partition, slot: the client uses only this slot's part of ``data``.
        unlabelled: folder of images without classes that it offers.
        otlp: address of a collector of OpenTelemetry that gets spans; empty: none.
        link_only: all parts of broadcasts come over the link, none from an object store.
        training_metrics: False to keep the loss and accuracy of training on this device.
    """

    data: Path
    engine: str = "auto"
    device: str = "auto"
    precision: str = "auto"
    weights: Path | None = None
    threads: int = 0
    nice: int = NICE
    micro_batch: int | None = None
    max_memory: int = 0
    image_bytes: int = 0
    manners: PolicyRules = ALWAYS
    work_timeout_s: float = WORK_TIMEOUT_S
    limits: PrivacyLimits = NO_LIMITS
    partition: Path | None = None
    slot: int = -1
    unlabelled: Path | None = None
    otlp: str = ""
    training_metrics: bool = True
    link_only: bool = False
