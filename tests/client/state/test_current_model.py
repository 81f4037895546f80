"""The current model on disk: one whole state at any moment, whatever happens to the rounds."""

import json
import os

import numpy as np
import pytest

from client.daemon_kit import RUN, RUN2
from client.model_kit import context_of, give_model, keep, means, order_of, put_part
from client.round_kit import FED, KEYS, SERVER, TERMS
from fcil_client.link.downloads import Downloads
from fcil_client.rounds import model_keeper
from fcil_client.rounds.model_keeper import ModelKeeper
from fcil_client.state import current_model
from fcil_client.state.current_model import rewrap
from fcil_protocol.errors import CorruptFile, DataError, DiskFull, MethodMismatch, StaleUpdate
from fcil_protocol.messages.messages import PartRef, UseModel
from fcil_protocol.trust.keys import PrivateKeys

NEW_KEYS = PrivateKeys(curve=bytes([7]) * 32, signing=bytes([7]) * 32, sealing=bytes([7]) * 32)


def classes_of(home):
    return current_model.load(home).compose(None, device="cpu").classes


def named(home):
    return {p.name for p in home.model_folder.iterdir()}


def test_a_model_is_what_its_round_brought(home):
    order = give_model(home)
    model = current_model.load(home)
    record = model.record
    assert (record.run, record.task, record.state) == (order.run, 1, 3)
    assert record.progress_text == "after task 1"
    assert dict(model.names) == {0: "black", 1: "dark", 4: "white"}
    assert set(model.parts) == {"task/0", "current"}
    assert (model.method.name, model.info.name) == ("running_mean", "none")
    scores = model.compose(None, device="cpu")
    images = np.full((1, 32, 32, 3), 77, np.uint8)
    assert scores.classes[scores.logits(images)[0].argmax()] == 3


def test_without_one_there_is_one_sentence(home, enrolment):
    home.save_enrolment(enrolment)
    with pytest.raises(DataError, match="has no model yet.*fcil-client join") as told:
        current_model.load(home)
    assert "\n" not in str(told.value)
    assert current_model.summary(home) is None


def test_it_outlives_the_parts_of_rounds(home):
    """The next order's downloads remove what it does not name; so does another run."""
    give_model(home)
    downloads = Downloads(home, None, KEYS, send=lambda _: None)
    assert downloads.start([])
    assert not list((home.directory / "parts").iterdir())
    assert classes_of(home) == (0, 1, 2, 3, 4)
    home.enter_run(RUN2)
    assert classes_of(home) == (0, 1, 2, 3, 4)


def test_parts_that_did_not_change_are_kept_once_and_old_ones_go(home):
    first = give_model(home)
    inode = (home.model_folder / f"{first.parts[0].digest}.part").stat().st_ino
    assert inode == home.part_path(first.parts[0].digest).stat().st_ino, "no copy"
    refs = [first.parts[0], put_part(home, "current", means((3, 4, 5)), state=4)]
    keep(home, order_of(refs, state=4, classes=(3, 4, 5)))
    assert named(home) == {f"{ref.digest}.part" for ref in refs}
    assert classes_of(home) == (0, 1, 2, 3, 4, 5)


def test_an_order_whose_parts_have_gone_meanwhile_changes_nothing(home):
    give_model(home)
    before = home.model_path.read_bytes()
    gone = put_part(home, "current", means((3, 4)), state=5)
    home.part_path(gone.digest).unlink()
    keep(home, order_of([gone], state=5))
    assert home.model_path.read_bytes() == before
    assert classes_of(home) == (0, 1, 2, 3, 4)


def test_before_a_first_class_is_learned_there_is_no_model(home):
    ref = put_part(home, "current", means((0, 1)))
    keep(home, order_of([ref], task=0, kind="train", number=0, past=(), classes=(0, 1)))
    assert not home.model_path.exists()
    keep(home, order_of([ref], task=0, kind="train", number=1, past=(), classes=(0, 1)))
    assert current_model.read_record(home).progress_text == "in task 0, after 1 of 3 train rounds"


def test_a_task_that_begins_has_the_model_of_the_one_before(home):
    ref = put_part(home, "current", means((0, 1)))
    keep(home, order_of([ref], task=1, kind="train", number=0))
    record = current_model.read_record(home)
    assert (record.progress_text, record.last_task) == ("after task 0", 0)


def test_names_stay_known_when_their_images_have_gone_and_follow_the_registry(home):
    order = give_model(home)
    keep(home, order, ("dark", "light"), (1, 3))  # the folders black and white were removed
    assert current_model.read_record(home).names == {0: "black", 1: "dark", 3: "light", 4: "white"}
    keep(home, order, ("black", "shade"), (2, 1))  # one name now means another class
    assert current_model.read_record(home).names == {2: "black", 1: "shade", 3: "light", 4: "white"}
    keep(home, order_of(order.parts, run=RUN2), ("light",), (0,))
    assert current_model.read_record(home).names == {0: "light"}


def test_the_same_model_again_is_not_written_again(home, monkeypatch):
    order = give_model(home)
    monkeypatch.setattr(ModelKeeper, "_keep", lambda *_: pytest.fail("written again"))
    keep(home, order)


def test_a_kill_while_it_is_kept_leaves_the_one_before(home, monkeypatch):
    """At each step that reaches the disk."""
    give_model(home)
    steps = ("_sync", "sync_directory", "write_atomic")

    class Killed(BaseException):
        pass

    for state, step in enumerate(steps, 10):
        refs = [put_part(home, "current", means((8, 9)), state=state)]

        def die(*_args, **_options):
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(model_keeper, step, die)
            with pytest.raises(Killed):
                keep(home, order_of(refs, state=state))
        assert classes_of(home) == (0, 1, 2, 3, 4), step
    keep(home, order_of(refs, state=state))
    assert classes_of(home) == (8, 9)
    assert named(home) == {f"{ref.digest}.part" for ref in refs}, "what kills left is removed"


def test_a_full_disk_is_told_and_leaves_the_one_before(home, monkeypatch):
    give_model(home)
    ref = put_part(home, "current", means((8, 9)), state=9)

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_keeper, "sync_data", full)
    with pytest.raises(DiskFull):
        keep(home, order_of([ref], state=9))
    assert classes_of(home) == (0, 1, 2, 3, 4)


def test_where_there_are_no_hard_links_parts_are_copied(home, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    order = give_model(home)
    path = home.model_folder / f"{order.parts[0].digest}.part"
    assert path.stat().st_nlink == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert classes_of(home) == (0, 1, 2, 3, 4)


def test_a_part_that_was_damaged_and_fetched_again_replaces_the_damaged_one(home):
    order = give_model(home)
    ref = order.parts[0]
    path = home.model_folder / f"{ref.digest}.part"
    data = path.read_bytes()
    path.write_bytes(data[:-3] + b"xyz")  # the same file as in parts/
    with pytest.raises(CorruptFile, match="damaged"):
        current_model.load(home)
    assert not path.exists()  # else nothing would fetch it again
    home.part_path(ref.digest).unlink()
    home.part_path(ref.digest).write_bytes(data)
    keep(home, order_of(order.parts, state=4))
    assert classes_of(home) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(b'"white"', b'"whine"'),
        lambda text: b"[]",
        lambda text: b"[" * 100_000,
        lambda text: b'{"model": {"format": 1}, "sha256": ""}',
    ],
)
def test_a_damaged_record_is_named_in_one_sentence(home, damage):
    give_model(home)
    home.model_path.write_bytes(damage(home.model_path.read_bytes()))
    with pytest.raises(CorruptFile, match="model.json is damaged"):
        current_model.load(home)
    assert "is damaged" in current_model.summary(home)["damaged"]


def test_a_record_of_a_newer_fcil_says_so(home):
    give_model(home)
    fields = json.loads(home.model_path.read_bytes())
    fields["model"]["format"] = current_model.FORMAT + 1
    home.model_path.write_text(json.dumps(fields))
    with pytest.raises(CorruptFile, match=f"format {current_model.FORMAT + 1}; this fcil"):
        current_model.load(home)


def test_another_version_of_the_method_is_refused_with_both(home, monkeypatch):
    give_model(home)
    record = current_model.read_record(home).model_copy(update={"method_version": "0"})
    home.model_path.write_bytes(current_model.record_bytes(record))
    with pytest.raises(MethodMismatch, match="version 0; version 1 is installed"):
        current_model.load(home)


def test_a_daemon_that_replaces_it_while_it_is_read_gives_the_newer_one(home, monkeypatch):
    give_model(home)
    read = current_model._read_part
    newer = [put_part(home, "current", means((6, 7)), state=8)]

    def replaced(*arguments):
        if newer:
            keep(home, order_of([newer.pop()], state=8))
        return read(*arguments)

    monkeypatch.setattr(current_model, "_read_part", replaced)
    model = current_model.load(home)
    assert model.record.state == 8
    assert set(model.parts) == {"current"}


def test_new_keys_open_it_also_when_the_change_was_interrupted(home):
    give_model(home)
    NEW_KEYS.save(home.next_keys_path)
    rewrap(home, KEYS, NEW_KEYS.public)
    assert classes_of(home) == (0, 1, 2, 3, 4), "sealed for those that are taken next"
    rewrap(home, KEYS, NEW_KEYS.public)  # once more, after the interruption
    home.take_keys(home.next_keys_path, keep_state=True)
    assert classes_of(home) == (0, 1, 2, 3, 4)


def test_another_member_in_its_place_has_none(home):
    give_model(home)
    path = home.ticket_keys_path("ab" * 32)
    SERVER.save(path)
    home.take_keys(path)
    assert not home.model_path.exists()
    assert not named(home)


def test_the_weights_that_the_daemon_was_given_are_remembered(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    order = give_model(home)
    keeper = ModelKeeper(home, FED, order_path := tmp_path / "vit.safetensors")
    keeper.keep(order, TERMS, context_of(order), {})
    assert current_model.read_record(home).weights == str(order_path)


def test_the_summary_says_how_old_it_is(home):
    give_model(home)
    record = current_model.read_record(home)
    for age, words in ((5, "5 s old"), (60, "1 minute old"), (7300, "2 hours old"), (86400, "1 day old")):  # fmt: skip
        told = current_model.summary(home, record.fetched + age)
        assert current_model.describe(told) == f"after task 1 of run {record.run}, {words}"
    assert (told["classes"], told["named"]) == (5, 3)


# --- a promoted model -----------------------------------------------------------------------


def offer_of(refs, *, state=2, promoted=True, classes=(0, 1, 2), task=0):
    return UseModel(
        run=RUN, task=task, kind="evaluate", round=0, rounds=1, base=state, classes=list(classes),
        past=[], parts=list(refs), promoted=promoted,
    )  # fmt: skip


def keeper_of(home):
    return ModelKeeper(home, FED, None)


def promote(home, state=2, **changes):
    KEYS.save(home.keys_path)
    refs = [put_part(home, "task/0", means((0, 1, 2)), state=state)]
    return keeper_of(home).keep_offered(offer_of(refs, state=state, **changes), TERMS, {"black": 0})


def test_a_promoted_model_replaces_a_newer_one_and_stays_through_rounds(home):
    give_model(home)
    record = promote(home)
    assert (record.state, record.promoted, record.progress_text) == (2, True, "after task 0")
    assert record.names == {0: "black", 1: "dark", 4: "white"}, "names stay known"
    assert classes_of(home) == (0, 1, 2)
    keep(home, order_of([put_part(home, "current", means((3, 4)))], state=4))
    assert current_model.read_record(home) == record
    assert current_model.describe(current_model.summary(home)).endswith(
        ", promoted by the operator"
    )


def test_another_run_replaces_a_promoted_model(home):
    promote(home)
    keep(home, order_of([put_part(home, "current", means((3, 4)))], run=RUN2))
    assert current_model.read_record(home).run == RUN2


def test_one_that_is_promoted_no_more_is_replaced_by_the_next(home):
    promote(home)
    keeper_of(home).release(RUN, 2)
    assert current_model.read_record(home).promoted
    keeper_of(home).release(RUN2, -1)  # another run's server says nothing about it
    assert current_model.read_record(home).promoted
    keeper_of(home).release(RUN, -1)
    assert not current_model.read_record(home).promoted
    assert classes_of(home) == (0, 1, 2)
    keep(home, order_of([put_part(home, "current", means((3, 4)))]))
    assert current_model.read_record(home).state == 3


def test_the_newest_of_the_operator_does_not_replace_a_newer_one(home):
    give_model(home)
    assert promote(home, promoted=False).state == 3
    promote(home, state=1)
    assert promote(home, promoted=False).state == 2, "it ends a promotion"


def test_parts_of_a_promoted_model_that_have_gone_are_fetched_again(home):
    give_model(home)
    ref = put_part(home, "task/0", means((0, 1, 2)))
    other = PartRef(name="task/0", digest="0" * 64, sealed_bytes=ref.sealed_bytes)
    with pytest.raises(StaleUpdate, match="state 2 is no longer on disk"):
        keeper_of(home).keep_offered(offer_of([other]), TERMS, {})
    assert current_model.read_record(home).state == 3


def test_a_removed_part_of_a_promoted_model_is_kept_again(home):
    offer = offer_of([put_part(home, "task/0", means((0, 1, 2)))])
    keeper_of(home).keep_offered(offer, TERMS, {})
    (part,) = home.model_folder.iterdir()
    part.unlink()
    keeper_of(home).keep_offered(offer, TERMS, {})
    assert part.exists()


def test_a_model_that_is_there_is_not_fetched_again_with_each_connection(home):
    offer = offer_of([put_part(home, "task/0", means((0, 1, 2)))])
    keeper = keeper_of(home)
    assert not keeper.has(offer)
    keeper.keep_offered(offer, TERMS, {})
    assert keeper.has(offer)
    assert not keeper.has(offer.model_copy(update={"promoted": False}))
    assert not keeper.has(offer.model_copy(update={"base": 5}))
    assert not keeper.has(offer.model_copy(update={"run": RUN2}))
    for path in home.model_folder.iterdir():
        path.unlink()
    assert not keeper.has(offer)


def test_the_newest_is_not_fetched_by_a_client_that_has_it_from_its_round(home):
    give_model(home)
    keeper = keeper_of(home)
    offer = offer_of([put_part(home, "task/1", means((0, 1, 2)), state=3)], state=3, promoted=False)
    assert keeper.has(offer)
    assert not keeper.has(offer.model_copy(update={"base": 4}))
    assert not keeper.has(offer.model_copy(update={"promoted": True}))
