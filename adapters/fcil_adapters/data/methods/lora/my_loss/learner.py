"""The client's half: train LoRA and the head's rows with this loss (torch)."""

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.toolkit.lora.client import (
    LoraSetup,
    Pass,
    cross_entropy,
    train_round,
)
from fcil_adapters.toolkit.lora.manifest import read_parts
from torch import Tensor

from my_loss import Options

LOWEST = -1e4  # stands for -inf, the logit of a past class that no client ever had


class Learner:
    """Stateless: all that a round starts from is in the broadcast."""

    def run(
        self,
        ctx: Context,
        state: State,
        broadcast: Mapping[str, Payload],
        data: ImageSet,
    ) -> tuple[State, Payload]:
        """Train; a task of one class is answered with its mean feature."""
        h: Options = ctx.hparams
        setup = LoraSetup.of(ctx, read_parts(h, broadcast))

        def loss(seen: Pass) -> Tensor:
            return cross_entropy(seen) - h.strength * entropy(seen.logits)

        return state, Payload(train_round(ctx, setup, data, loss=loss))


def entropy(logits: Tensor) -> Tensor:
    """Return the sum over images (b, C) of the entropy of their softmax."""
    log_p = logits.clamp_min(LOWEST).log_softmax(1)  # (b, C)
    return -(log_p.exp() * log_p).sum()
