"""FedLwF.MC: a sigmoid for each class, past ones distilled, with LoRA and federated averages.

Sylvestre-Alvise Rebuffi, Alexander Kolesnikov, Georg Sperl, Christoph H. Lampert: iCaRL:
Incremental Classifier and Representation Learning. CVPR 2017. https://arxiv.org/abs/1611.07725
(LwF.MC is its baseline; HePCo compares with its federated form.)

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from fcil_adapters.methods.lwf_mc.options import LwfMcHparams
from fcil_adapters.toolkit.lora.manifest import lora_method

METHOD = lora_method(
    "lwf_mc",
    "FedLwF.MC: multi-class learning without forgetting, on LoRA",
    "S.-A. Rebuffi, A. Kolesnikov, G. Sperl, C. H. Lampert. CVPR 2017. "
    "https://arxiv.org/abs/1611.07725",
    LwfMcHparams,
    learner="fcil_adapters.methods.lwf_mc.learner:Learner",
)
