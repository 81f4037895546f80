"""Fed-CPrompt: CODA-like components, held near the server and away from the previous task.

Gaurav Bagwe, Xiaoyong Yuan, Miao Pan, Lan Zhang. Fed-CPrompt: Contrastive Prompt for Rehearsal-Free
Federated Continual Learning. FL4Data workshop at ICML 2023, https://arxiv.org/abs/2307.04869, in
the form in which Halbe et al. compare with it (HePCo, TMLR 2024, https://arxiv.org/abs/2306.09970).

Manifest (no torch): hyper-parameters, exchanges, schemas. NOTES.md gives the choices and their
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import BackboneInfo, Cadence, Largest, PayloadSchema, TaskInfo
from fcil_adapters.methods.fed_cprompt.options import FIRST, PRESETS, FedCPromptHparams
from fcil_adapters.toolkit.heads.rows import head_specs
from fcil_adapters.toolkit.prompts.manifest import (
    PROMPT_CADENCE,
    component_method,
    component_schemas,
)


def broadcast(hparams: FedCPromptHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the schemas of the head's rows, of a task's components, and of its first rows.

    Raises:
        ConfigError: ``blocks`` names a block that the backbone lacks.
    """
    first = {FIRST: PayloadSchema(head_specs("c"))} if hparams.contrast > 0 else {}
    return {**component_schemas("fed_cprompt", hparams, backbone), **first}


def largest(
    _hparams: FedCPromptHparams, _backbone: BackboneInfo, task: TaskInfo, _clients: int
) -> Largest:
    """Return the largest traffic: the first task, without a previous one, needs no first rows."""
    return Largest() if task.index > 0 else Largest(without_parts=(FIRST,))


METHOD = component_method(
    name="fed_cprompt",
    title="Fed-CPrompt: components with a contrast of server and previous task (HePCo's form)",
    citation="G. Bagwe, X. Yuan, M. Pan, L. Zhang. 2023. https://arxiv.org/abs/2307.04869",
    hparams=FedCPromptHparams,
    learner="fcil_adapters.methods.fed_cprompt.learner:Learner",
    aggregator="fcil_adapters.methods.fed_cprompt.aggregator:Aggregator",
    broadcast=broadcast,
    presets=PRESETS,
    cadence={**PROMPT_CADENCE, FIRST: Cadence.OPENING},
    largest=largest,
)
