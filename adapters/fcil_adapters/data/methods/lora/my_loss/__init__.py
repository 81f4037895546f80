"""LoRA and a linear head, trained with a loss of its own and averaged.

The manifest (no torch): options and halves. What travels and how it is averaged is that
of all methods with LoRA and a linear head.
"""

from fcil_adapters.toolkit.lora.manifest import lora_method
from fcil_adapters.toolkit.lora.options import CrossEntropyHparams
from pydantic import Field


class Options(CrossEntropyHparams):
    """Placement and training of LoRA, and what the loss adds to them."""

    strength: float = Field(
        default=0.1, ge=0, description="Weight of the confidence penalty."
    )


METHOD = lora_method(
    "my_loss",
    "LoRA and a linear head with a loss of its own",
    "Not published.",
    Options,
    version="1",
    learner="my_loss.learner:Learner",
)
