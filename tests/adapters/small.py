"""Options with which a method takes a moment on toy images: one row per built-in method.

The tests that walk over all methods (contract, forms, exports, privacy, traffic) use these, so a
new method has its row here and nowhere else.
"""

from __future__ import annotations

from typing import Any

from adapters import hepco_reference, hgp_reference
from fcil_adapters.contract import Method

PROTOTYPES = {"rank": 2, "epochs": 1, "batch_size": 4, "lr_prototype": 1e-2, "lr_lora": 1e-2}
COMPONENTS = {
    "blocks": [0, 1], "components": 2, "length": 2, "epochs": 1, "batch_size": 4, "augment": "none",
}  # fmt: skip
LORA = {"rank": 2, "blocks": [0, 1], "epochs": 1, "batch_size": 4, "augment": "none"}
SMALL: dict[str, dict[str, Any]] = {
    "adapt_once": {"projection": 24, "adapt": {**LORA, "rounds": 2}},
    "analytic": {"projection": 24},
    "ccvr": {**LORA, "cov_rank": 2, "samples_per_class": 8, "server_epochs": 2},
    "coda_prompt": COMPONENTS,
    "ewc": LORA,
    "fed_cprompt": COMPONENTS,
    "fed_talora": {"rank": 2, "blocks": [0, 1], "epochs": 1, "batch_size": 4, "augment": "none"},
    "fedavg_lora": LORA,
    "fedavg_prompt": {
        "blocks": [0, 1], "pool_size": 3, "prompt_length": 4, "epochs": 1, "batch_size": 4,
        "augment": "none",
    },
    "fedclm": LORA,
    "fedncm": {},
    "fedproto": LORA,
    "ffa_lora": LORA,
    "gaussian_head": {"cov_rank": 2, "samples_per_class": 8, "server_epochs": 2},
    "hepco": hepco_reference.SMALL,
    "hgp": {
        **hgp_reference.SMALL, "epochs": 1, "batch_size": 4, "cov_rank": 2, "samples_per_class": 8,
        "server_epochs": 2, "augment": "none",
    },
    "icarl": LORA,
    "l2p": {
        "pool_size": 3, "length": 2, "top_k": 2, "epochs": 1, "batch_size": 4, "augment": "none",
    },
    "lorm": LORA,
    "lwf": LORA,
    "lwf_mc": LORA,
    "pilora": PROTOTYPES,
    "plora": {**PROTOTYPES, "blocks": [0, 1]},
    "running_mean": {},
}  # fmt: skip

# Options that methods of other packages share with built-in ones.
COMMON = {**LORA, "pool_size": 3, "prompt_length": 4}


def small_options(method: Method) -> dict[str, Any]:
    """Return options for a method of another package: the common ones that it has."""
    return {name: value for name, value in COMMON.items() if name in method.hparams.model_fields}
