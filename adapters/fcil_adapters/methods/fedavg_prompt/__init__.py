"""FedAvg-Prompt: prompts and a linear head, trained on clients and averaged.

A baseline of Halbe, Smith, Tian, Kira. Continual Adaptation of Vision Transformers for Federated
Learning. TMLR 2024, https://arxiv.org/abs/2306.09970: their client, and no repair on the server.

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md gives the choices and their
reasons.
"""

from __future__ import annotations

from fcil_adapters.contract import Claim
from fcil_adapters.toolkit.prompts.manifest import POOL_SHORT, pool_method
from fcil_adapters.toolkit.prompts.options import PoolHparams

METHOD = pool_method(
    "fedavg_prompt",
    "FedAvg-Prompt: averaged pools of prompts (a baseline of HePCo)",
    "S. Halbe, J. S. Smith, J. Tian, Z. Kira. TMLR 2024. https://arxiv.org/abs/2306.09970",
    PoolHparams,
    # The published code as it runs; few rounds on a small backbone.
    presets={
        "repo": {"lr": 5e-3, "schedule": "cosine_repeat", "query": "view"},
        "short": POOL_SHORT,
    },
    claim=Claim(
        said="31.37 MB in each exchange (MiB; HePCo's paper)",
        up_bytes=32_894_000,
        down_bytes=32_894_000,
        leaves_out="nothing but the counts of each class, which show the classes seen so far",
    ),
)
