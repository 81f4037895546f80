"""CODA-Prompt with FedAvg: each task adds prompt components, weighted by attention and keys.

James Seale Smith, Leonid Karlinsky, Vyshnavi Gutta, Paola Cascante-Bonilla, Donghyun Kim, Assaf
Arbelle, Rameswar Panda, Rogerio Feris, Zsolt Kira. CODA-Prompt: COntinual Decomposed
Attention-based Prompting for Rehearsal-Free Continual Learning. CVPR 2023,
https://arxiv.org/abs/2211.13218, code: https://github.com/GT-RIPL/CODA-Prompt

Manifest (no torch). NOTES.md gives the choices and their reasons.
"""

from __future__ import annotations

from fcil_adapters.contract import Claim
from fcil_adapters.methods.coda_prompt.options import PRESETS
from fcil_adapters.toolkit.prompts.manifest import component_method
from fcil_adapters.toolkit.prompts.options import ComponentHparams

METHOD = component_method(
    name="coda_prompt",
    title="CODA-Prompt with FedAvg: prompt components with attention, added by each task",
    citation="J. S. Smith et al. CVPR 2023. https://arxiv.org/abs/2211.13218",
    hparams=ComponentHparams,
    learner="fcil_adapters.methods.coda_prompt.learner:Learner",
    presets=PRESETS,
    claim=Claim(
        said="0.3 MB (HGP's paper)",
        up_bytes=337_960,
        down_bytes=None,
        leaves_out="four of the five layers' components",
    ),
)
