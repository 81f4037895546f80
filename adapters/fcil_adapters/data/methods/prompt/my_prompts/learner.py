"""The client's half: train prompts and the head's rows with this loss (torch)."""

from collections.abc import Mapping

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.toolkit.prompts.client import (
    PromptSetup,
    learn_pools,
    own_cross_entropy,
)
from fcil_adapters.toolkit.prompts.parts import read_parts, upload
from fcil_adapters.toolkit.prompts.prefix import Queries
from fcil_adapters.toolkit.training.optimise import Batch, MicroBatch, class_counts
from torch import Tensor

from my_prompts import Options


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

        def objective(bench: PromptSetup, batch: Batch, queries: Queries) -> None:
            def losses(piece: MicroBatch) -> Tensor:  # of the images that pass at once
                chosen = queries.of(piece.index, piece.pixels)  # (b, d)
                features = bench.prompted(piece, chosen)  # (b, d)
                logits = bench.logits(features)  # (b, c)
                return own_cross_entropy(logits, piece.rows) - h.strength * entropy(
                    logits
                )

            batch.backward_mean(losses)

        trained = learn_pools(ctx, h, read_parts(broadcast), data, objective)
        counts = class_counts(data, ctx.task.classes)
        return state, upload(trained, ctx.task.classes, counts)


def entropy(logits: Tensor) -> Tensor:
    """Return the sum over images (b, c) of the entropy of their softmax."""
    log_p = logits.log_softmax(1)  # (b, c)
    return -(log_p.exp() * log_p).sum()
