"""What the server tells a dry run on its own machine: terms, rounds, and tasks by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sample_run
from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.link.handshake import read_terms
from fcil_protocol.messages.messages import Welcome
from fcil_server.daemon.commands import preview_terms
from fcil_server.federation.config import load
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.sessions.handshake import RunTerms
from sample_run import ALICE, BOB, RUN, Clock

HPARAMS = METHOD.hparams()
TERMS = RunTerms(
    federation="f" * 32, certificate=b"", run=RUN, method=METHOD, hparams=HPARAMS,
    info=NO_BACKBONE, probe=None, max_payload_bytes=1, credit=1, package="9",
    schema_digest=registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE), method_package="pack 7",
    compact=True,
)  # fmt: skip


@pytest.fixture
def ledger(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite", clock=Clock()) as opened:
        sample_run.add_clients(opened)
        sample_run.add_run(opened)
        yield opened


def told(ledger: Ledger, *overrides: str) -> dict[str, Any]:
    """Return what goes over the control socket, as it comes out."""
    kit = SimpleNamespace(
        run=RUN, ledger=ledger, classes=ClassRegistry(ledger, RUN), config=load(None, overrides)
    )
    run = SimpleNamespace(coordinator=SimpleNamespace(context=kit), terms=TERMS)
    return json.loads(json.dumps(preview_terms(run)))  # type: ignore[arg-type]


def test_a_client_can_read_the_terms(ledger: Ledger) -> None:
    terms = told(ledger)["terms"]
    welcome = Welcome(server_nonce=bytes(16), certificate=b"", ready=False, **terms)
    read = read_terms(welcome)
    assert (read.run, read.method, read.hparams) == (RUN, METHOD, HPARAMS)
    assert (read.compact, read.training_metrics) == (True, True)


def test_rounds_are_as_configured(ledger: Ledger) -> None:
    said = told(ledger, "round.rounds_per_task=7", "run.evaluate=false")
    assert (said["rounds_per_task"], said["evaluate"]) == (7, False)


def test_listed_tasks_are_told_before_they_open(ledger: Ledger) -> None:
    classes = ClassRegistry(ledger, RUN)
    classes.register_listed([["cat", "dog"], ["oak"]])
    classes.open_task(0)
    ledger.tasks.close(RUN, 0)
    said = told(ledger)
    assert said["tasks"] == [
        {"classes": ["cat", "dog"], "closed": True},
        {"classes": ["oak"], "closed": False},
    ]
    assert said["waiting"] is None


def test_of_discovered_tasks_those_that_opened_and_the_names_that_wait(ledger: Ledger) -> None:
    classes = ClassRegistry(ledger, RUN)
    classes.announce(ALICE, ["Dog", "cat"])
    classes.open_task(0)
    classes.announce(BOB, ["oak"])
    said = told(ledger)
    assert [set(t["classes"]) for t in said["tasks"]] == [{"cat", "Dog"}]
    assert said["tasks"][0]["closed"] is False
    assert said["waiting"] == ["oak"]
