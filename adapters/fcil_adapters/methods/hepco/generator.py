"""The generator of latents by label: noise and a label's embedding through three layers (torch).

It lives in one round on the server alone; its latents stand for visual queries and for
features at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.teachers import Teachers, one_hot

Tick = Callable[[float], None]  # called once per step with the loss


class LatentGenerator(nn.Module):
    """G(eps, y): [eps, E_y] -> Linear, norm, ReLU -> Linear, norm, ReLU -> Linear.

    Args:
        h: ``noise`` (also the embedding's length), ``hidden`` and ``batch_norm``.
        classes: C, the labels.
        width: d, the length of a latent.
        draws: the only source of the start values, which are those of torch's own layers.
    """

    def __init__(self, h: HepcoHparams, classes: int, width: int, draws: Generator) -> None:
        super().__init__()
        self.noise = h.noise
        start = torch.randn(classes, h.noise, generator=draws, dtype=torch.float64)
        self.embedding = nn.Parameter(start)  # (C, e)
        first, second = h.hidden
        self.layers = nn.Sequential(
            *_hidden(2 * h.noise, first, h, draws),
            *_hidden(first, second, h, draws),
            _linear(second, width, draws),
        )

    def forward(self, noise: Tensor, own: Tensor) -> Tensor:
        """Turn noise (..., e) and one-hot labels (..., C) into latents (..., d)."""
        # A product instead of a look-up: its gradient is deterministic on GPUs.
        x = torch.cat([noise, own @ self.embedding], dim=-1)  # (..., 2e)
        latents: Tensor = self.layers(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return latents


@dataclass(frozen=True)
class Latents:
    """Batches of latents, one per distillation step.

    Attributes:
        z: (S, B, d).
        own: (S, B, C), their labels as one-hot rows.
    """

    z: Tensor
    own: Tensor


def train_generator(
    generator: LatentGenerator,
    objective: Callable[[Tensor, Tensor], Tensor],
    teachers: Teachers,
    steps: int,
    h: HepcoHparams,
    draws: Generator,
    tick: Tick,
) -> None:
    """Minimise ``objective(z, own)`` by Adam, with fresh noise and labels in every step."""
    optimiser = torch.optim.Adam(generator.parameters(), lr=h.lr_generator)
    generator.train()
    for _ in range(steps):
        noise, own = _draw(generator, teachers, (h.server_batch_size,), draws)
        optimiser.zero_grad()
        loss = objective(generator(noise, own), own)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        tick(loss.item())


def make_latents(
    generator: LatentGenerator, teachers: Teachers, steps: int, batch: int, draws: Generator
) -> Latents:
    """Draw all batches of a distillation, with the running statistics of the norms."""
    noise, own = _draw(generator, teachers, (steps, batch), draws)
    generator.eval()
    with torch.no_grad():
        return Latents(generator(noise, own), own)


def _draw(
    generator: LatentGenerator, teachers: Teachers, shape: tuple[int, ...], draws: Generator
) -> tuple[Tensor, Tensor]:
    """Draw noise (..., e) and one-hot labels (..., C), on the CPU so that devices agree."""
    device = generator.embedding.device
    odds = teachers.labels.cpu()
    labels = torch.multinomial(odds, math.prod(shape), replacement=True, generator=draws)
    noise = torch.randn(*shape, generator.noise, generator=draws, dtype=torch.float64)
    return noise.to(device), one_hot(labels.view(shape).to(device), len(odds))


def _hidden(width: int, out: int, h: HepcoHparams, draws: Generator) -> list[nn.Module]:
    norm = [nn.BatchNorm1d(out, dtype=torch.float64)] if h.batch_norm else []
    return [_linear(width, out, draws), *norm, nn.ReLU()]


def _linear(width: int, out: int, draws: Generator) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, width, out, dtype=torch.float64
    )
    bound = 1 / math.sqrt(width)
    for parameter in (layer.weight, layer.bias):
        nn.init.uniform_(parameter, -bound, bound, generator=draws)
    return layer
