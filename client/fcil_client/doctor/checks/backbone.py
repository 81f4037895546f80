"""Lines about the backbone: its name, its digest, its features and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.probes import TOLERANCE, compare_probes
from fcil_client.doctor.checks.line import Line, failure, fault, ok, skipped, warning
from fcil_protocol.errors import BackboneMismatch, FcilError

NAMES = ("backbone.which", "backbone.digest", "backbone.features", "backbone.speed")
SLOW_PASS_S = 600.0  # a longer pass over all images brings a warning


@dataclass(frozen=True)
class Loaded:
    """A backbone that was loaded here.

    Attributes:
        engine: ``torch`` or ``onnx``. device: as text.
        probe: features of the shipped images, (4, d).
        loaded_s: time until it was ready. images_per_s: of frozen passes.
        peak_bytes: peak memory of its process. size: of its images, pixels.
    """

    engine: str
    digest: str
    size: int
    device: str
    probe: NDArray[np.float64]
    loaded_s: float
    images_per_s: float
    peak_bytes: int

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Loaded:
        """Read the child process's answer."""
        return cls(
            engine=fields["engine"],
            digest=fields["info"]["digest"],
            size=fields["info"]["preprocessing"]["size"],
            device=fields["device"],
            probe=np.array(fields["probe"], dtype=np.float64),
            loaded_s=fields["loaded_s"],
            images_per_s=fields["images_per_s"],
            peak_bytes=fields["peak_bytes"],
        )


@dataclass(frozen=True)
class Wanted:
    """The backbone that a client is to use.

    Attributes:
        digest: of its weights; empty: unknown.
        source: source of these facts, as text.
        needed: the run's method uses one.
        gradient: it trains, which needs torch.
        weights: the file last used for them, if one was given.
    """

    name: str
    digest: str
    source: str
    needed: bool = True
    gradient: bool = False
    weights: str = ""


@dataclass(frozen=True)
class BackboneFacts:
    """The expected backbone, and the result of loading it.

    Attributes:
        loaded: None if it was not, or could not be, loaded.
        error: reason why it could not be loaded.
        skipped: reason why loading was not tried.
        reference: expected features of the shipped images, (4, d); None: unknown here.
        images: number of training images in the folder.
    """

    expected: Wanted
    loaded: Loaded | None = None
    error: FcilError | None = None
    skipped: str = ""
    reference: Sequence[Sequence[float]] | NDArray[Any] | None = field(default=None)
    images: int = 0


def lines(facts: BackboneFacts) -> list[Line]:
    """Return the lines about the backbone and its results here."""
    if not facts.expected.needed:
        text = f"the method uses no backbone ({facts.expected.source})"
        return [ok(NAMES[0], text), *(skipped(n, "no backbone is needed") for n in NAMES[1:])]
    which = ok("backbone.which", f"{facts.expected.name}, {facts.expected.source}")
    if facts.error is not None:
        rest = (skipped(n, "the backbone could not be loaded") for n in NAMES[2:])
        return [which, fault("backbone.digest", facts.error), *rest]
    if facts.loaded is None:
        return [which, *(skipped(n, facts.skipped or "it was not loaded") for n in NAMES[1:])]
    return [which, _digest(facts, facts.loaded), _features(facts, facts.loaded), _speed(facts)]


def _digest(facts: BackboneFacts, loaded: Loaded) -> Line:
    name, wanted = "backbone.digest", facts.expected.digest
    if loaded.digest == wanted:
        return ok(name, f"its weights are those that are expected ({wanted[:12]})")
    if not wanted:
        return ok(name, f"its weights have the digest {loaded.digest[:12]}")
    return failure(
        name,
        f"its weights have the digest {loaded.digest[:12]}, expected was {wanted[:12]}",
        "Use the weights file that the server uses: --weights FILE",
        BackboneMismatch.code,
    )


def _features(facts: BackboneFacts, loaded: Loaded) -> Line:
    name = "backbone.features"
    how = f"with {loaded.engine} on {loaded.device}"
    if not np.isfinite(loaded.probe).all():
        text = f"features of the shipped images are no numbers {how}"
        action = "Check the driver, or use --device cpu."
        return failure(name, text, action, BackboneMismatch.code)
    if facts.reference is None or loaded.digest != facts.expected.digest:
        text = f"features of the shipped images are finite {how}; the server compares them when "
        return ok(name, text + "the client joins")
    error = compare_probes(loaded.probe, np.asarray(facts.reference, dtype=np.float64))
    text = f"features of the shipped images differ by {error:.1g} relative {how}"
    if error <= TOLERANCE:
        return ok(name, f"{text}; {TOLERANCE:g} is allowed")
    action = "The server would refuse them. Check that it computes in float32, and try --device cpu"
    return failure(name, f"{text}, allowed is {TOLERANCE:g}", f"{action}.", BackboneMismatch.code)


def _speed(facts: BackboneFacts) -> Line:
    name, loaded = "backbone.speed", facts.loaded
    assert loaded is not None
    text = (
        f"{loaded.images_per_s:,.0f} images/s on {loaded.device}, loaded in {loaded.loaded_s:.1f} s"
    )
    if not facts.images:
        return ok(name, text)
    pass_s = facts.images / loaded.images_per_s
    took = f"{pass_s / 60:.0f} minutes" if pass_s >= 90 else f"{pass_s:.0f} s"
    text += f": one pass over the {facts.images:,} training images takes about {took}"
    if pass_s <= SLOW_PASS_S:
        return ok(name, text)
    action = (
        "A round with a method that trains makes several passes: raise the server's [round] "
        "deadline_s, choose a method without a gradient, or use a GPU."
    )
    return warning(name, text, action)
