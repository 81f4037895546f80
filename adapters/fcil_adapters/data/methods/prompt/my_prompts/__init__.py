"""Pools of prompts and a linear head, trained with a loss of their own and averaged.

The manifest (no torch): options and halves. What travels and how it is averaged is that
of all methods with one pool of prompts in each block.
"""

from fcil_adapters.toolkit.prompts.manifest import pool_method
from fcil_adapters.toolkit.prompts.options import PoolHparams
from pydantic import Field


class Options(PoolHparams):
    """The pools and their training, and what the loss adds to them."""

    strength: float = Field(
        default=0.1, ge=0, description="Weight of the confidence penalty."
    )


METHOD = pool_method(
    "my_prompts",
    "Pools of prompts and a linear head with a loss of their own",
    "Not published.",
    Options,
    version="1",
    learner="my_prompts.learner:Learner",
)
