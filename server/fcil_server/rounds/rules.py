"""Rules of a round, from the configuration."""

from __future__ import annotations

from dataclasses import replace

from fcil_protocol.payloads.builtin import EVALUATE
from fcil_server.federation.config import Config
from fcil_server.rounds.events import RoundRules


def rules_of(config: Config, kind: str) -> RoundRules:
    """Return the rules of a round of some kind from the ``[round]`` section."""
    section = config.round
    fields = section.model_dump(exclude={"rounds_per_task", "on_no_holder", "no_holder_s"})
    limit = section.no_holder_s if section.on_no_holder == "skip" else None
    # In a run with its own [privacy], the file's [round] may ask for less than is needed.
    least = config.least_updates
    for key in ("take", "clients_per_round"):
        fields[key] = max(fields[key], least) if fields[key] else 0
    rules = RoundRules(**fields | {"min_updates": least}, no_holder_s=limit)
    if kind != EVALUATE:
        return rules
    # All clients with test images are asked; without such clients the round is skipped. The results
    # are counted client by client and make no state.
    return replace(rules, clients_per_round=0, take=0, retry_s=0.0, no_holder_s=0.0, min_updates=1)
