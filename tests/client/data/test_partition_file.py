"""A partition gives every image to one client, is the same file every time, and tells its damage."""

import contextlib
import hashlib
import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.partition_kit import listing
from fcil_adapters.images.decoding import Listing
from fcil_client.cli.target_options import seat_of
from fcil_client.data import partition_file
from fcil_client.data.partition_file import load, save, seat, with_digest
from fcil_client.data.partition_make import Request, make
from fcil_protocol.errors import CorruptFile, DataError, UsageError


def made(data=None, **fields):
    return make(data or listing(6, 20, 10), Request(**{"clients": 3, "tasks": 2, **fields}))


# --- which images --------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    kind=st.sampled_from(["quantity", "dirichlet", "iid"]),
    clients=st.integers(1, 6),
    tasks=st.integers(1, 3),
    per_class=st.sampled_from([0, 10, 13, 25]),
    val_fraction=st.sampled_from([0.0, 0.2, 0.5]),
    layout=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_every_image_that_is_used_has_exactly_one_owner_and_one_side(
    kind, clients, tasks, per_class, val_fraction, layout, seed
):
    data = listing(6, 20, 7 if layout else 0, layout=layout)
    alpha = {"alpha": -(-6 // tasks // clients) or 1} if kind == "quantity" else {}
    one = made(
        data, kind=kind, clients=clients, tasks=tasks, per_class=per_class, seed=seed,
        val_fraction=val_fraction, min_images=1, order="natural", **alpha,
    )  # fmt: skip
    owners = Counter(
        name
        for slot in range(clients)
        for side in (one.train, one.select, one.test)
        for name in side(slot)
    )
    assert set(owners.values()) == {1}
    there = {entry.name: entry for entry in data.entries}
    for side in ("train", "select", "test"):
        for slot in range(clients):
            for name in getattr(one, side)(slot):
                assert (there[name].part == "test") == (side == "test" and layout)
    held_out = 0 if layout else 4  # a fifth of 20
    use = min(per_class or 20, 20 - held_out)
    for name in (f"c{i:02d}" for i in range(6)):
        assert len(one.images["select"].get(name, ())) == int(use * val_fraction)
        assert len(one.images["train"][name]) == use - int(use * val_fraction)
        assert len(one.images["test"][name]) == (7 if layout else 4)
    assert all(one.train(slot) for slot in range(clients)) or one.notes


def test_test_images_are_dealt_so_evenly_that_all_clients_together_test_everything():
    one = made(listing(6, 20, 8), clients=4)
    dealt = [one.test(slot) for slot in range(4)]
    assert frozenset().union(*dealt) == {
        f"test/c{c:02d}/{i:04d}.png" for c in range(6) for i in range(8)
    }
    assert {len(names) for names in dealt} == {12}
    for c in range(6):
        assert {sum(f"/c{c:02d}/" in name for name in names) for names in dealt} == {2}


def test_without_dealing_nobody_has_a_test_image_and_nothing_is_held_out():
    assert made(test=False).images["test"] == {}
    flat = made(listing(6, 20, layout=False), test=False)
    assert sum(map(len, flat.images["train"].values())) == 120


def test_data_without_a_test_folder_keeps_the_same_fifth_for_tests_whatever_the_seed():
    tests = [made(listing(6, 20, layout=False), seed=s).images["test"] for s in (0, 1, 2)]
    assert {len(names) for names in tests[0].values()} == {4}
    assert sorted(tests[0]["c00"]) == sorted(tests[1]["c00"]) == sorted(tests[2]["c00"])
    half = made(listing(6, 20, layout=False), test_fraction=0.5)
    assert {len(names) for names in half.images["test"].values()} == {10}


def test_a_subset_is_the_first_of_a_seeded_shuffle_of_each_class():
    ten, twelve = (made(per_class=n, seed=4).images["train"] for n in (10, 12))
    for name, images in ten.items():
        assert len(images) == 10
        assert list(images) == sorted(images)
        assert set(images) < set(twelve[name])
    assert made(per_class=10, seed=5).images["train"] != ten
    assert {len(i) for i in made(test_per_class=3).images["test"].values()} == {3}
    assert made(per_class=30).notes == tuple(
        f"class 'c{i:02d}' has only 20 train images" for i in range(6)
    )


def test_tasks_follow_the_order_and_classes_beyond_them_are_left_out():
    one = made(order=("c03", "c05", "c00", "c01"), tasks=2, classes_per_task=2)
    assert one.tasks == (("c03", "c05"), ("c00", "c01"))
    assert one.order == "listed"
    assert set(one.images["train"]) == {"c03", "c05", "c00", "c01"}
    assert made().tasks != made(order="natural").tasks


def test_a_task_is_drawn_from_its_own_stream_whatever_the_others_are():
    both = made(order="natural", classes_per_task=3, tasks=2).owners["train"]
    first = made(order="natural", classes_per_task=3, tasks=1).owners["train"]
    assert {name: both[name] for name in first} == first


def test_a_class_with_test_images_alone_is_left_out_and_said():
    data = listing(["a", "b", "only"], [9, 9, 0], 3)
    one = make(data, Request(clients=2, tasks=1, alpha=1))
    assert one.notes == ("left out, since they have only test images: only",)
    assert "only" not in one.images["test"]


def test_an_image_whose_name_is_no_text_is_left_out_and_said(tmp_path):
    plain = listing(6, 20, 10)
    odd = replace(plain.entries[0], name=os.fsdecode(b"train/c00/\xff.png"))
    one = made(Listing((odd, *plain.entries[1:]), ()))
    assert one.notes == ("left out, since their names are not UTF-8: 1",)
    assert len(one.images["train"]["c00"]) == 19
    save(tmp_path / "p.json", one)
    assert load(tmp_path / "p.json") == one


def test_hepcos_clients_choose_anew_for_every_round_and_own_nothing():
    one = made(kind="hepco", clients=3, rounds=4, gamma=0.3, tasks=2)
    assert "train" not in one.owners
    rounds = {
        (slot, task, r): one.round_choice(slot, task, r)
        for slot in range(3)
        for task in range(2)
        for r in range(4)
    }
    assert len(set(rounds.values())) > 20
    for (slot, task, _), names in rounds.items():
        assert {name.split("/")[1] for name in names} <= set(one.tasks[task])
        assert names <= one.train(slot)
        assert len(names) == 2 * 6  # 3 classes, kappa 0.6: 2 of them, 0.3 of 20 images each
    union = frozenset().union(*(v for (slot, _, _), v in rounds.items() if slot == 1))
    assert one.train(1) == union
    assert sum(one.counts(1).values()) == len(union)
    with pytest.raises(DataError, match="drawn for 2 tasks of 4 rounds; .* task 1, round 4"):
        one.round_choice(0, 1, 4)
    assert made().round_choice(0, 9, 9) is None


def test_counts_are_those_of_the_owners():
    one = made(kind="dirichlet", seed=3)
    for slot in range(3):
        by_hand = {
            name: owners.count(slot)
            for name, owners in one.owners["train"].items()
            if slot in owners
        }
        assert one.counts(slot) == by_hand


# --- what is not possible ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"alpha": 4}, "cannot hold alpha = 4 classes of task 0, which has 3"),
        ({"alpha": 0}, "cannot hold alpha = 0 classes"),
        ({"clients": 2, "alpha": 1}, "2 clients of 1 class cannot own the 3 classes of task 0"),
        ({"clients": 61, "kind": "iid"}, "task 0 has 60 train images, too few for 61 clients"),
        ({"clients": 5, "min_images": 13}, "too few for 5 clients of 13 or more"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"kind": "hepco", "kappa": 0}, "kappa must be above 0 and at most 1, got 0"),
        ({"kind": "hepco", "kappa": 1.5}, "kappa must be above 0 and at most 1, got 1.5"),
        (
            {"kind": "hepco", "gamma": 0.01},
            "20 images per class, of which gamma = 0.01 leaves none",
        ),
        ({"kind": "hepco", "imbalance": 2}, "imbalance must be above 0 and at most 1, got 2"),
        ({"kind": "hepco", "rounds": 0}, "rounds must be at least 1, got 0"),
        ({"kind": "dirichlet", "beta": 0}, "beta must be above 0 and at most 1e+06, got 0"),
        (
            {"kind": "dirichlet", "beta": float("inf")},
            "beta must be above 0 and at most 1e+06, got inf",
        ),
        (
            {"kind": "dirichlet", "beta": float("nan")},
            "beta must be above 0 and at most 1e+06, got nan",
        ),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"val_fraction": 1.0}, "val fraction must be at least 0 and below 1, got 1"),
        ({"tasks": 7}, "6 classes cannot make 7 tasks"),
        ({"order": "backwards"}, "unknown class order 'backwards'"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(UsageError) as refusal:
        made(**fields)
    assert sentence in refusal.value.message
    assert refusal.value.message.count(". ") == 0


def test_a_task_that_leaves_clients_without_images_is_noted_by_slot(monkeypatch):
    monkeypatch.setattr("fcil_client.data.partition_draws.MAX_DRAWS", 2)
    one = made(kind="dirichlet", beta=0.001, clients=20, tasks=1)
    empty = [slot for slot in range(20) if not one.train(slot)]
    assert empty
    assert one.notes[0].startswith(f"task 0: {len(empty)} of 20 clients have fewer than 1 images")
    assert made(kind="dirichlet", beta=0.001, clients=20, tasks=1, min_images=0).notes == ()


# --- the file ------------------------------------------------------------------------------

# Of the bytes that the requests below gave when they were first made. Another value means that
# everybody's partitions have changed: runs before and after cannot be compared.
PINNED = {
    "quantity": "6b1022075d424a27",
    "dirichlet": "fd1683a5b8ba7b1e",
    "hepco": "23248e2ba88ede0f",
    "iid": "3ea898124c971e4a",
}


@pytest.mark.parametrize("kind", PINNED)
def test_the_same_request_gives_the_same_bytes_for_ever(kind, tmp_path):
    one = made(listing(20, 15, 4), kind=kind, clients=4, tasks=4, seed=11, val_fraction=0.2)
    save(tmp_path / "p.json", one)
    data = (tmp_path / "p.json").read_bytes()
    assert hashlib.sha256(data).hexdigest()[:16] == PINNED[kind]
    save(tmp_path / "again.json", made(
        listing(20, 15, 4), kind=kind, clients=4, tasks=4, seed=11, val_fraction=0.2
    ))  # fmt: skip
    assert (tmp_path / "again.json").read_bytes() == data
    assert load(tmp_path / "p.json") == one


def test_other_programs_read_it_with_json_alone(tmp_path):
    one = made()
    save(tmp_path / "p.json", one)
    text = (tmp_path / "p.json").read_text()
    fields = json.loads(text)
    assert fields["kind"] == "quantity"
    assert fields["clients"] == 3
    assert fields["tasks"] == [list(task) for task in one.tasks]
    assert fields["parameters"]["alpha"] == 2
    assert fields["digest"] == one.digest
    assert len(text.splitlines()) == len(fields) + 2


def test_a_file_is_parsed_once_and_again_when_it_is_another(tmp_path):
    path = tmp_path / "p.json"
    save(path, made())
    one = load(path)
    assert load(path) is one
    save(path, made(seed=1))
    assert load(path).digest != one.digest


def broken(tmp_path, change, *, resealed=True):
    """Write a partition that something was done to, with the digest it would have."""
    fields = json.loads(made().model_dump_json())
    change(fields)
    if resealed:
        rest = {name: value for name, value in fields.items() if name != "digest"}
        text = json.dumps(rest, ensure_ascii=False, separators=(",", ":"))
        fields["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path = tmp_path / "p.json"
    path.write_text(json.dumps(fields))
    return path


def put(*where, value):
    def change(fields):
        for key in where[:-1]:
            fields = fields[key]
        fields[where[-1]] = value

    return change


def drop(name):
    return lambda fields: fields.pop(name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            put("owners", "train", "c00", 0, value=3),
            "class 'c00' has an owner 3, and clients are 3",
        ),
        (put("owners", "train", "c00", 0, value=-1), "class 'c00' has an owner -1"),
        (put("owners", "train", "c00", value=[0]), "class 'c00' has 20 train images and 1 owners"),
        (put("owners", "train", "c09", value=[]), "owners.train and images.train have different"),
        (
            put("owners", "train", "c00", 0, value="a"),
            "owners.train.c00.0: input should be a valid",
        ),
        (put("owners", value={}), "owners has the sides [], expected"),
        (put("images", "train", "c00", 0, value="train/c00/0001.png"), "'c00' appears there twice"),
        (put("images", "test", "c00", 0, value="train/c00/0001.png"), "'c00' appears there twice"),
        (put("images", "train", "c00", value=[]), "class 'c00' has no train images"),
        (put("images", "test", "zoo", value=["a"]), "images.test has class 'zoo', which is in no"),
        (put("images", value={}), "images has the sides [], expected"),
        (put("tasks", value=[["c00"], []]), "a task has no classes"),
        (put("tasks", value=[]), "a task has no classes"),
        (put("tasks", 0, value=["c00", "c00"]), "class 'c00' appears 2 times in the tasks"),
        (put("clients", value=0), "clients is 0"),
        (put("clients", value="3"), "clients: input should be a valid integer"),
        (put("kind", value="fair"), "its kind is 'fair'; known are quantity, dirichlet"),
        (put("kind", value="hepco"), "owners has the sides"),
        (put("rounds", value=[[[{}]]]), "rounds is for hepco, and the kind is quantity"),
        (put("format", value=2), "it has format 2, and this fcil reads 1: install a newer one"),
        (put("format", value=0), "it has format 0, and this fcil reads 1"),
        (put("source", "digest", value="x"), "source.digest: string should match pattern"),
        (drop("tasks"), "tasks: field required"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong_in_it(change, sentence, tmp_path):
    with pytest.raises(CorruptFile) as refusal:
        load(broken(tmp_path, change))
    assert sentence in refusal.value.message
    assert "Make it again" in refusal.value.action


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            put("rounds", 0, value=[]),
            "rounds does not have the same number of rounds for every task",
        ),
        (put("rounds", value=[]), "rounds does not have the same number of rounds for every task"),
        (put("rounds", 0, 0, value=[{}]), "a round has 1 clients, expected 3"),
        (put("rounds", 0, 0, 0, value={"c00": [20]}), "images of class 'c00' that do not exist"),
        (put("rounds", 0, 0, 0, value={"c00": [1, 1]}), "images of class 'c00' that do not exist"),
        (put("rounds", 0, 0, 0, value={"zoo": [1]}), "images of class 'zoo' that do not exist"),
    ],
)
def test_damaged_rounds_are_refused_as_well(change, sentence, tmp_path, monkeypatch):
    hepco = made(kind="hepco", rounds=2)
    monkeypatch.setitem(globals(), "made", lambda: hepco)
    with pytest.raises(CorruptFile, match="cannot be used") as refusal:
        load(broken(tmp_path, change))
    assert sentence in refusal.value.message


def test_what_was_changed_without_its_digest_is_refused(tmp_path):
    path = broken(tmp_path, put("seed", value=1), resealed=False)
    with pytest.raises(CorruptFile, match="its content does not match its digest"):
        load(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"[" * 100_000, "it is not JSON"),
    ],
)
def test_what_is_no_partition_at_all_is_refused(text, sentence, tmp_path):
    (tmp_path / "p.json").write_bytes(text)
    with pytest.raises(CorruptFile) as refusal:
        load(tmp_path / "p.json")
    assert sentence in refusal.value.message


@settings(max_examples=25)
@given(at=st.floats(0, 1), value=st.integers(0, 255))
def test_a_flipped_byte_is_never_taken_for_a_partition(at, value, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    good = made()
    save(path, good)
    data = bytearray(path.read_bytes())
    place = min(int(at * len(data)), len(data) - 1)
    data[place] = value
    path.write_bytes(data)
    partition_file._load.cache_clear()
    with contextlib.suppress(CorruptFile):
        assert load(path) == good  # white space between fields, or the byte that was there


def test_a_missing_file_and_a_slot_that_is_not_there_are_said(tmp_path):
    with pytest.raises(DataError, match="there is no partition"):
        load(tmp_path / "p.json")
    save(tmp_path / "p.json", made())
    with pytest.raises(UsageError, match="slots 0 to 2, got 3"):
        seat_of(tmp_path / "p.json", 3)
    for path, slot in ((tmp_path / "p.json", -1), (None, 0)):
        with pytest.raises(UsageError, match="both --partition FILE and --slot K"):
            seat_of(path, slot)
    assert seat_of(None, -1) == ""
    assert seat_of(tmp_path / "p.json", 2) == seat(made(), 2) == f"{made().digest[:8]}-002"


def test_the_digest_changes_with_everything_that_is_in_it():
    digests = {
        made(**fields).digest
        for fields in (
            {}, {"seed": 1}, {"alpha": 3}, {"clients": 4}, {"tasks": 3}, {"order": "natural"},
            {"per_class": 19}, {"val_fraction": 0.1}, {"test": False}, {"kind": "iid"},
            {"categorical": True}, {"data": listing(6, 20, 9)},
        )
    }  # fmt: skip
    assert len(digests) == 12
    assert with_digest(made()) == made()


def test_a_thousand_clients_are_divided_and_asked_for_in_a_moment():
    one = make(listing(10, 400, 100), Request(kind="iid", clients=1000, tasks=2))
    sizes = np.array([len(one.train(slot)) for slot in range(1000)])
    assert sizes.tolist() == [4] * 1000
    assert {sum(one.counts(slot).values()) for slot in range(1000)} == {4}
