"""L2P's client half: train the pool, its keys and the task's head rows (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.l2p.options import L2pHparams
from fcil_adapters.methods.l2p.pool import Pool
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.prompts.client import PromptSetup, learn, own_cross_entropy
from fcil_adapters.toolkit.prompts.parts import read_parts, upload
from fcil_adapters.toolkit.prompts.prefix import Queries, with_pixels
from fcil_adapters.toolkit.training.optimise import Batch, MicroBatch, class_counts


class Learner:
    """Stateless: the broadcast holds all that a round starts from."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Minimise cross-entropy + pull * mean over images of sum of -cos(q, chosen keys)."""
        h: L2pHparams = ctx.hparams
        start = read_parts(broadcast)
        backbone = with_pixels(ctx.backbone, h.pixels)
        (first,) = start.prompts
        tensors = {n: nn.Parameter(to_torch(array, backbone.device)) for n, array in first.items()}
        pool = Pool.of(h, backbone, tensors)

        def objective(bench: PromptSetup, batch: Batch, queries: Queries) -> None:
            def losses(piece: MicroBatch) -> Tensor:
                asked = queries.of(piece.index, piece.pixels)  # (b, d)
                logits = bench.logits(bench.prompted(piece, asked))
                batch.scored(logits, piece)
                return own_cross_entropy(logits, piece.rows) + h.pull * pool.pull(asked)

            batch.backward_mean(losses)

        bench = PromptSetup.of(ctx, backbone, pool.features, tensors, start)
        trained = learn(ctx, bench, data, objective)
        counts = class_counts(data, ctx.task.classes)
        return state, upload(trained, ctx.task.classes, counts)
