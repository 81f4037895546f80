"""LwF+FL: learning without forgetting, with LoRA and federated averages.

Zhizhong Li, Derek Hoiem: Learning without Forgetting. ECCV 2016. https://arxiv.org/abs/1606.09282

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from fcil_adapters.methods.lwf.options import LwfHparams
from fcil_adapters.toolkit.lora.manifest import lora_method

METHOD = lora_method(
    "lwf",
    "LwF+FL: learning without forgetting, on LoRA",
    "Z. Li, D. Hoiem. ECCV 2016. https://arxiv.org/abs/1606.09282",
    LwfHparams,
    learner="fcil_adapters.methods.lwf.learner:Learner",
)
