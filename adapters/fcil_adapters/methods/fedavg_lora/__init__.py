"""FedAvg-LoRA: federated averaging of LoRA and a linear head, nothing against forgetting.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Aguera y Arcas:
Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017.
https://arxiv.org/abs/1602.05629

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from fcil_adapters.toolkit.lora.manifest import SHORT, lora_method
from fcil_adapters.toolkit.lora.options import CrossEntropyHparams

METHOD = lora_method(
    "fedavg_lora",
    "FedAvg-LoRA: federated averaging of LoRA and a linear head",
    "B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. AISTATS 2017. "
    "https://arxiv.org/abs/1602.05629",
    CrossEntropyHparams,
    presets={"short": SHORT, "all_columns": {"head_loss": "all"}},
)
