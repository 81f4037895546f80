"""What noise on statistics costs: FAA and epsilon on scikit-learn's digits, in one process.

Five tasks of two classes, three clients with uneven shares of every class, the embedded backbone.
The length C that features are cut to is the median length of test features, rounded: in a
federation it must come from pictures that nobody has to protect.

* thumbnails: running_mean, nothing but noised means leaves a client;
* sums: analytic, the sums of frozen features and of their products, 512 of them;
* features: the class means of frozen features (PILoRA that trains nothing);
* hgp-diag, hgp-lowrank: HGP with the preset ``short``, one round of 2 epochs per task; its prompts
  and head rows are trained as always, and noise does not cover them.

With ``--masks`` rounds are as if masked (docs/secure-aggregation.md): each client adds its part of
the noise of one sum, and nobody sees its own. Rounding to fixed point is left out: it is 1e-9.

    python scripts/bench/privacy_cost.py [--seeds 3] [--only CASE ...] [--noise Z ...]
    python scripts/bench/privacy_cost.py --only thumbnails --clients 10 --masks
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_data import all_digits, even, uneven
from simulation import Simulation

from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.contract.privacy import OFF, Privacy
from fcil_client.state.privacy_budget import gaussian_epsilon
from fcil_protocol.messages.messages import PrivacyTerms

DELTA = 1e-5
FROZEN = {
    "preset": "short",
    "augment": "none",
    "epochs": 1,
    "blocks": (5,),
    "lr_lora": 0.0,
    "lr_prototype": 1e-12,
}
HGP = {"preset": "short", "epochs": 2}


@dataclass(frozen=True)
class Case:
    """One kind of run.

    Attributes:
        clip: C.
        releases: noised statistics of a class over the whole run.
    """

    method: str
    options: dict[str, Any]
    clip: float
    rounds: int
    releases: int


CASES = {
    "thumbnails": Case("running_mean", {}, 4.0, 1, 1),
    "sums": Case("analytic", {"projection": 512}, 1.0, 1, 2),
    "features": Case("pilora", FROZEN, 10.0, 1, 2),
    "hgp-diag": Case("hgp", {**HGP, "cov": "diag"}, 10.0, 1, 2),
    "hgp-lowrank": Case("hgp", {**HGP, "cov": "lowrank"}, 10.0, 1, 2),
}


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="repetitions")
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--noise", type=float, nargs="+", default=[0, 0.5, 1, 2, 4, 8])
    parser.add_argument("--clip", type=float, help="C in place of each case's own")
    parser.add_argument("--clients", type=int, default=0, help="with equal shares; 0: three uneven")
    parser.add_argument("--masks", action="store_true", help="noise of the sum, not of each client")
    args = parser.parse_args()
    count = args.clients or 3
    part = PrivacyTerms(secure="masks").fewest(count) ** -0.5 if args.masks else 1.0
    torch.set_num_threads(1)
    backbone = load_backbone()
    print("| case | C | noise multiplier | epsilon | FAA % | seeds |")
    print("|---|---|---|---|---|---|")
    for name in args.only:
        case = CASES[name]
        clip = args.clip or case.clip
        for noise in args.noise:
            final = []
            for seed in range(args.seeds):
                data = all_digits(backbone.info.preprocessing, seed)
                privacy = Privacy(noise * part, clip) if noise else OFF
                shares = even(data.train, count) if args.clients else uneven(data.train)
                simulation = Simulation.of(
                    case.method,
                    case.options,
                    backbone,
                    shares,
                    seed=seed,
                    privacy=privacy,
                )
                metrics = simulation.run(data.tasks, data.test, case.rounds).metrics
                final.append(metrics.macro[-1] or 0.0)
            spent = gaussian_epsilon([noise] * case.releases, DELTA) if noise else None
            shown = f"{clip:g} | {noise:g} | {spent:.3g}" if spent else "- | 0 | none"
            each = ", ".join(f"{a:.1f}" for a in final)
            print(f"| {name} | {shown} | {np.mean(final):.1f} | {each} |", flush=True)


if __name__ == "__main__":
    main()
