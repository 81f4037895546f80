"""A client in masked rounds: what it refuses before anything leaves, and what stays after it left."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from adapters.kit import toy_backbone
from adapters.small import SMALL
from client.daemon_kit import DIGEST, LIMIT, RUN
from client.round_kit import KEYS, ORDER, SERVER, TERMS, fit, make
from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.registry import load_method, make_hparams
from fcil_adapters.masks.exchanges import with_masks
from fcil_client.data.inventory import Inventory
from fcil_client.link.handshake import Terms
from fcil_client.membership.leave import clear
from fcil_client.rounds.masking import Masking
from fcil_client.rounds.round_work import RoundWork, _Begun
from fcil_client.state.mask_secrets import MaskFile
from fcil_client.state.peers import PeerBook
from fcil_protocol.errors import PrivacyRefused, TrustError
from fcil_protocol.ids import ClientId, RoundKey, seed_word
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.payload import Payload

CLIENT = ClientId("a" * 26)
MASKS = PrivacyTerms(secure="masks")
PINNED = "0123456789abcdef" * 2


def masked_terms(name):
    method = with_masks(load_method(name))
    hparams = make_hparams(method, SMALL[name])
    return Terms(RUN, method, hparams, toy_backbone().info, DIGEST, LIMIT, 64, privacy=MASKS)


def test_a_client_that_has_pinned_others_sends_no_update_of_its_own(
    home, enrolment, tmp_path, monkeypatch
):
    """A server could offer it a run without masks, in which nothing else asks for the pins."""
    fit(monkeypatch)
    home.save_enrolment(enrolment)
    work, book = make(home, enrolment, tmp_path), PeerBook(home.directory)
    work._refuse_unmasked(TERMS)
    book.pin(PINNED, pinned=True)
    with pytest.raises(PrivacyRefused, match="trains in masked rounds alone") as refused:
        asyncio.run(work.run(ORDER, TERMS, SERVER.public, lambda *_: None))
    unpin = f"fcil-client peers --data {enrolment.data} --unpin FINGERPRINT"
    assert unpin in refused.value.action
    work._refuse_unmasked(replace(TERMS, privacy=MASKS))
    book.pin(PINNED, pinned=False)
    work._refuse_unmasked(TERMS)


def test_masked_training_on_one_class_is_refused_before_any_work(home):
    masking, order = Masking(home, CLIENT, KEYS), ORDER.model_copy(update={"classes": [3]})
    with pytest.raises(TrustError, match="a task of one class") as refused:
        masking.check_unused(order, masked_terms("fedavg_lora"), {}, ["cat"])
    assert "tasks.min_new_classes" in refused.value.action
    assert MaskFile(home.directory).kept("") is None


def test_a_clients_random_numbers_come_from_its_own_id(home):
    masking, terms = Masking(home, CLIENT, KEYS), masked_terms("fedavg_lora")
    about = {
        masking._about(ORDER.model_copy(update={"seed": [1, seed_word(CLIENT)], **more}), terms, {})
        for more in ({}, {"rounds": 1}, {"seed": [2, seed_word(CLIENT)]})
    }
    assert len(about) == 3
    for seed in ([], [1], [1, 2], [1, seed_word(CLIENT), 0]):
        with pytest.raises(TrustError, match="not made of its id"):
            masking._about(ORDER.model_copy(update={"seed": seed}), terms, {})


def test_the_server_must_name_what_it_has_had_the_time_to_hear_of(
    home, enrolment, tmp_path, monkeypatch
):
    """A list of classes may be on its way while an order comes, and not while two come."""
    work, seen = make(home, enrolment, tmp_path), []

    async def compute(*_):
        return None, Payload({})

    def mask(_order, _terms, _task, begun, payload):
        seen.append(begun.held)
        return payload

    async def keep(*_):
        pass

    monkeypatch.setattr(RoundWork, "_begin", lambda *_: _Begun({}, {}, {}, None))
    monkeypatch.setattr(RoundWork, "_compute", compute)
    monkeypatch.setattr(RoundWork, "_seal_update", lambda *_: (None, "digest"))
    monkeypatch.setattr(work, "_mask", mask)
    monkeypatch.setattr(work, "_keeping", SimpleNamespace(keep=keep))
    terms = replace(masked_terms("fedncm"), run=RUN)

    def order():
        asyncio.run(work.run(ORDER, terms, SERVER.public, lambda *_: None))

    order()
    for held in ({"cat": 5, "test only": 0}, {"cat": 5, "dog": 9}, {"dog": 9}):
        work.seal_inventory(terms, SERVER.public, Inventory(train=held))
        order()
        order()
    known, both, less = frozenset({"cat"}), frozenset({"cat", "dog"}), frozenset({"dog"})
    assert seen == [None, known, known, known, both, less, less]


def test_sums_of_a_client_that_has_announced_nothing_are_not_sent(home, enrolment, tmp_path):
    work, terms = make(home, enrolment, tmp_path), masked_terms("fedncm")
    with pytest.raises(TrustError, match="before this client had told the server its classes"):
        work._mask(ORDER, terms, TaskInfo(0, (0, 1)), _Begun({}, {}, {}, None), Payload({}))


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_summed_and_who_is_pinned_outlast_the_membership(home, damaged):
    """With another ticket the same images may meet the same run again."""
    file, cat = MaskFile(home.directory), ["cat"]
    home.make()
    file.begin(RoundKey(RUN, 0, "mask_keys", 0))
    file.settle_masked(b"upload", "ab" * 32, cat)
    PeerBook(home.directory).pin(PINNED, pinned=True)
    if damaged:
        (home.directory / "masks.json").write_text("{")
    clear(home)
    assert PeerBook(home.directory).pinned() == {PINNED}
    assert not (home.directory / "masked.safetensors").exists()
    if damaged:
        assert (home.directory / "masks.json").read_text() == "{"
        return
    text = (home.directory / "masks.json").read_text()
    assert {json.loads(text)["newest"][seed] for seed in ("mask", "own", "letters")} == {""}
    with pytest.raises(TrustError, match="in a sum of this run already"):
        MaskFile(home.directory).check_unused(RUN, (1, 0), cat)
