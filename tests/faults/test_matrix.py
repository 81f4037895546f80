"""Every fault of the list, alone and in pairs; the same three promises (see matrix.py)."""

import asyncio
import itertools
import json
import random
from dataclasses import replace

import pytest

from faults.kit import final_digest, keeps_its_promises
from faults.matrix import MASKED, Fault, InMemory, behind_masks
from fcil_client.daemon import conversation, jobs
from fcil_client.session import machine as session
from fcil_protocol.envelopes.envelope import parse_header
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.rounds import asking
from fcil_server.sessions import offers
from fcil_server.sessions.intake import Intake
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes

QUICK = 0


@pytest.fixture
def impatient(monkeypatch):
    """Make clients come back at once, and look at no folder again."""

    async def nothing(*_args, **_options):
        await asyncio.Event().wait()
        yield set()

    monkeypatch.setattr(jobs, "awatch", nothing)
    for where, name in (
        (session, "SERVER_RETRY_S"),
        (session, "LOCAL_RETRY_S"),
        (conversation, "ADDRESS_S"),
    ):
        monkeypatch.setattr(where, name, 0.05)
    monkeypatch.setattr(conversation, "ANSWER_S", 3.0)


@pytest.fixture
def play(scene, impatient, monkeypatch):
    """Run a federation in memory with some faults, and hold it to its promises."""

    def run(*faults):
        plans = [f.value for f in faults]
        waits = any(p.closes_short for p in plans)
        rounds = {"round__rounds_per_task": 2}
        expected = scene.undisturbed(**rounds)
        with scene.copy() as federation:
            arguments = scene.arguments(**rounds)
            played = InMemory(federation, scene.folders, arguments, plans, monkeypatch)
            played.run()
            openly = waits or any(p.openly for p in plans)
            keeps_its_promises(federation, expected, excluded=openly)
        return played

    return run


def quick_or_full(cases, quick, label=lambda c: c.name):
    return [
        pytest.param(case, id=label(case), marks=() if i < quick else pytest.mark.full)
        for i, case in enumerate(cases)
    ]


def go_together(pair):
    """Where one update is missing and the only other one cannot be combined, nothing is left."""
    alone = Fault.AGGREGATOR_RAISES_ON_ONE_UPDATE
    other = [f.value for f in pair if f is not alone]
    return len(other) == 2 or not (other[0].openly or other[0].closes_short)


SHUFFLED = random.Random(3).sample(list(Fault), len(Fault))
PAIRS = random.Random(5).sample(list(filter(go_together, itertools.combinations(Fault, 2))), 40)


@pytest.mark.parametrize("fault", quick_or_full(SHUFFLED, QUICK))
def test_one_fault(play, fault):
    play(fault)


@pytest.mark.parametrize("fault", quick_or_full(MASKED, 0))
def test_one_fault_in_each_round_of_a_masked_one(masked_scene, impatient, monkeypatch, fault):
    """Nobody may be missing among three: what fails is tried again, and the sum is of all."""
    plan = behind_masks(fault)
    again = plan.openly or plan.closes_short
    short = {"round__deadline_s": 4.0, "round__max_reopens": 10} if again else {}
    expected = masked_scene.undisturbed()
    with masked_scene.copy() as federation:
        arguments = masked_scene.arguments(**short)
        InMemory(federation, masked_scene.folders, arguments, [plan], monkeypatch).run()
        keeps_its_promises(federation, expected, excluded=again)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["train", "mask_vote"])
def test_a_masked_round_that_an_unusable_update_spoils_is_given_up_openly(
    masked_scene, impatient, monkeypatch, kind
):
    """The clients have sent their sums, and would refuse to open that of two; the run goes on."""
    plan = replace(Fault.AGGREGATOR_RAISES_ON_ONE_UPDATE.value, rounds=(kind,))
    with masked_scene.copy() as federation:
        arguments = masked_scene.arguments()
        InMemory(federation, masked_scene.folders, arguments, [plan], monkeypatch).run()
        keeps_its_promises(federation, None, excluded=True)
        with open_ledger(federation) as ledger:
            rounds = ledger.rounds.all(ledger.runs.newest().run_id)
            reasons = [u.reason for u in ledger.updates.of_round(rounds[-2].key)]
    assert [(r.kind, r.outcome) for r in rounds[-2:]] == [(kind, "skipped"), ("evaluate", "done")]
    assert sorted(reasons) == [
        "aggregation failed on it: planted: it cannot be combined.",
        *["too few updates of its masked round can be used"] * 2,
    ]


@pytest.mark.full
def test_updates_that_wait_for_their_turn_lead_to_the_same_state(play, monkeypatch):
    offered, take = [], Intake.offer

    def offer(intake, peer, received, message):
        take(intake, peer, received, message)
        kind = parse_header(received.blobs[0], max_plain_bytes=1 << 30).core.kind
        offered.append((kind, message.unasked))

    monkeypatch.setattr(Intake, "offer", offer)
    for module in (offers, asking):
        monkeypatch.setattr(module, "MOST_ARRIVING", 1)
    play()
    kinds = {kind for kind, unasked in offered if not unasked}
    assert {"train", "evaluate"} <= kinds
    assert all(kind == INVENTORY for kind, unasked in offered if unasked)


@pytest.mark.parametrize("pair", quick_or_full(PAIRS, 0, lambda p: f"{p[0].name}-{p[1].name}"))
def test_two_faults(play, pair):
    play(*pair)


@pytest.mark.parametrize("names", ["a", "aa"])
@pytest.mark.full
def test_one_client_and_two_identical_ones(tmp_path, names):
    folders = {
        f"c{i}": write_client(tmp_path / f"c{i}" / name, range(4)) for i, name in enumerate(names)
    }
    with LocalFederation(tmp_path / "federation") as federation:
        federation.serve("--until-done", *settings(round__min_clients=len(names)))
        for name, folder in folders.items():
            federation.join(name, folder)
        assert federation.server.wait(60) == 0, federation.last_words("server")
        keeps_its_promises(federation, final_digest(federation))
        [run] = federation.federation.glob("runs/*")
        summary = json.loads((run / "summary.json").read_text())["data"]
    assert summary["faa"] > 60, "nearest class mean tells four digits apart"
