"""A client of a partition sees its own images alone, each on the side that the partition says."""

import shutil
import zipfile
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from adapters.worker_kit import Direct, context, fields_of, fill
from fcil_adapters.images.decoding import open_source
from fcil_client.cli.main import app
from fcil_client.cli.model import find_home
from fcil_client.cli.target_options import seat_of
from fcil_client.data.manifest import scan
from fcil_client.data.partition_export import export
from fcil_client.data.partition_file import load, save, seat
from fcil_client.data.partition_make import Request, make
from fcil_client.data.partition_source import SharedData, open_data, part_source
from fcil_client.membership import enrol
from fcil_client.membership.dry_run import count_images
from fcil_client.membership.enrol import find_member
from fcil_client.rounds.worker import ClientWorker
from fcil_client.state import home
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import DataError, UsageError
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.payloads.payload import Payload

FED = FederationId("0123456789abcdef" * 2)
MEAN = "running_mean"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four classes of eight train and four test images, all different."""
    root = tmp_path_factory.mktemp("data")
    for number, cls in enumerate(("ant", "bee", "cat", "dog")):
        fill(root, "train", cls, range(100 * number, 100 * number + 8))
        fill(root, "test", cls, range(100 * number + 50, 100 * number + 54))
    return root


def divided(data, path, **fields):
    source = open_source(data)
    request = Request(**{"clients": 2, "tasks": 2, "kind": "iid", "order": "natural", **fields})
    made = make(source.listing(), request)
    source.close()
    save(path, made)
    return made


@pytest.fixture
def partition(data, tmp_path):
    divided(data, tmp_path / "p.json", val_fraction=0.25)
    return tmp_path / "p.json"


def zipped(data, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(data.rglob("*.png")):
            archive.write(file, file.relative_to(data))
    return path


# --- source --------------------------------------------------------------------------------


def test_a_slots_source_lists_its_images_with_their_sides_and_no_other(data, partition):
    made = load(partition)
    whole = open_source(data)
    for slot in range(2):
        part = part_source(open_source(data), made, slot)
        listed = part.listing().entries
        by_side = {s: {e.name for e in listed if e.part == s} for s in ("train", "select", "test")}
        assert by_side == {
            "train": made.train(slot), "select": made.select(slot), "test": made.test(slot)
        }  # fmt: skip
        assert [e.name for e in listed] == sorted(e.name for e in listed)
        for entry in listed[:3]:
            assert part.read(entry) == whole.read(entry)
            assert part.unchanged(entry)
        part.close()


def test_a_scan_divides_nothing_more_and_says_nothing_of_classes_held_for_tests_alone(
    data, tmp_path
):
    made = divided(data, tmp_path / "p.json", kind="quantity", alpha=1, val_fraction=0.25)
    source, fractions = open_data(data, tmp_path / "p.json", 0)
    found = scan(source, None, b"s" * 16, fractions, threads=1)
    assert {i.entry.name for i in found.images if i.side == "train"} == made.train(0)
    assert {i.entry.name for i in found.images if i.side == "select"} == made.select(0)
    assert {i.entry.name for i in found.images if i.side == "test"} == made.test(0)
    assert found.notes == ()
    assert found.counts("train") == made.counts(0)
    assert len(found.counts("test")) == 4 > len(made.counts(0))


def test_another_data_set_is_refused_whether_images_came_went_or_changed(data, partition, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(data, other)
    open_data(other, partition, 0)
    extra = other / "train/ant/new.png"
    shutil.copy(other / "train/ant/0.png", extra)
    with pytest.raises(DataError, match=r"expected 48 images .* got 49 images with"):
        open_data(other, partition, 0)
    extra.unlink()
    (other / "train/ant/0.png").write_bytes(b"of another size")
    with pytest.raises(DataError, match="is not the data set that the partition was made from"):
        open_data(other, partition, 0)


def test_slots_that_share_an_open_data_set_leave_it_open(data, partition):
    parts = SharedData(open_source(zipped(data, partition.with_suffix(".zip"))), load(partition))
    one, other = parts.slot(0), parts.slot(1)
    one.close()
    entry = other.listing().entries[0]
    assert other.read(entry)
    parts.close()
    with pytest.raises(DataError):
        other.read(entry)


def test_a_slot_without_any_image_says_so(data, tmp_path):
    divided(data, tmp_path / "p.json", clients=40, min_images=0, test=False)
    source, _ = open_data(data, tmp_path / "p.json", 39)
    with pytest.raises(DataError, match="slot 39 of the partition holds no image"):
        source.listing()


# --- worker --------------------------------------------------------------------------------


def fields(data, partition, slot, tmp_path, ctx=None, **more):
    cache = tmp_path / f"cache-{slot}"
    cache.mkdir(exist_ok=True)
    given = {
        "data": str(data), "partition": str(partition), "slot": slot, "cache": str(cache),
        "seat": seat_of(partition, slot), "salt": b"s" * 16, "memory_bytes": 1 << 20,
        "min_count": 1, **more,
    }  # fmt: skip
    return given if ctx is None else fields_of(MEAN, ctx, parts=[], **given)


def test_joined_with_a_partition_a_client_scans_and_learns_its_own_images_alone(
    data, partition, tmp_path
):
    made = load(partition)
    worker = Direct(ClientWorker())
    for slot in (0, 1):
        counts = worker("scan", fields(data, partition, slot, tmp_path))[0]["counts"]
        assert counts["train"] == made.counts(slot)
        assert sum(counts["select"].values()) == len(made.select(slot))
        assert sum(counts["test"].values()) == len(made.test(slot)) == 8
        ctx = context(MEAN, classes=(0, 1))
        order = fields(data, partition, slot, tmp_path, ctx, classes={"ant": 0, "bee": 1})
        reply, (_, upload) = worker("run", order, [Payload()])
        assert upload.i64("count").tolist() == [made.counts(slot)["ant"], made.counts(slot)["bee"]]
        assert reply["faults"] == []


@pytest.mark.parametrize(
    ("task", "names", "strange"),
    [
        (0, ("ant", "bee"), False),
        (0, ("bee",), False),
        (1, ("cat",), False),
        (0, ("ant", "cat"), True),
        (1, ("ant", "bee"), True),
        (2, ("cat", "dog"), True),
    ],
)
def test_a_task_that_is_not_the_partitions_is_noticed(
    data, partition, tmp_path, task, names, strange
):
    past = tuple(range(2 * task))
    classes = {name: number for number, name in enumerate(names, len(past))}
    ctx = context(MEAN, classes=tuple(classes.values()), past=past)
    order = fields(data, partition, 0, tmp_path, ctx, classes=classes)
    reply, _ = Direct(ClientWorker())("run", order, [Payload()])
    said = [
        f"task {task} of this run differs from that of the partition" in n for n in reply["notes"]
    ]
    assert said == [True] * strange
    later = {**order, **fields_of(MEAN, replace(ctx, round=1))}
    assert "notes" not in Direct(ClientWorker())("run", later, [Payload()])[0]  # said once a task


def test_hepcos_learner_sees_the_images_of_its_round_alone(data, tmp_path):
    made = divided(data, tmp_path / "p.json", kind="hepco", kappa=0.5, gamma=0.5, rounds=3)
    worker = Direct(ClientWorker())
    seen = []
    for round_ in range(3):
        ctx = context(MEAN, classes=(0, 1))
        ctx = type(ctx)(**{**vars(ctx), "round": round_})
        order = fields(data, tmp_path / "p.json", 1, tmp_path, ctx, classes={"ant": 0, "bee": 1})
        _, (_, upload) = worker("run", order, [Payload()])
        chosen = made.round_choice(1, 0, round_)
        seen.append(upload.i64("count").tolist())
        assert seen[-1] == [sum(f"/{name}/" in c for c in chosen) for name in ("ant", "bee")]
        assert sum(seen[-1]) == 4
    ctx = type(ctx)(**{**vars(ctx), "round": 3})
    with pytest.raises(DataError, match="drawn for 2 tasks of 3 rounds"):
        worker("run", {**order, **fields_of(MEAN, ctx)}, [Payload()])
    far = context(MEAN, classes=(0, 1))  # the server's first task has other classes
    order = fields(data, tmp_path / "p.json", 1, tmp_path, far, classes={"cat": 0, "dog": 1})
    with pytest.raises(DataError, match="gives this client no image of this round's classes"):
        worker("run", order, [Payload()])


@pytest.mark.parametrize("op", ["scan", "run"])
def test_a_partition_that_becomes_another_one_gives_a_client_nothing(data, tmp_path, op):
    divided(data, tmp_path / "p.json", kind="hepco", kappa=0.5, gamma=0.5, rounds=3)
    ctx = context(MEAN, classes=(0, 1))
    order = fields(data, tmp_path / "p.json", 1, tmp_path, ctx, classes={"ant": 0, "bee": 1})
    worker = Direct(ClientWorker())
    worker("run", order, [Payload()])
    divided(data, tmp_path / "p.json", kind="hepco", kappa=0.5, gamma=0.5, rounds=3, seed=1)
    for one in (worker, Direct(ClientWorker())):  # also one that was started anew since
        with pytest.raises(DataError, match="has changed to another partition"):
            one(op, order, [Payload()])


def test_a_dry_run_counts_what_the_slot_would_announce(data, partition):
    counted = count_images(data, None, partition, 1)
    assert counted.train == load(partition).counts(1)
    assert sum(counted.test.values()) == 8


# --- who is who ----------------------------------------------------------------------------


@pytest.fixture
def homes(data, partition, tmp_path, monkeypatch):
    """Both slots are enrolled."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = []
    for slot in range(2):
        made.append(Home.of(FED, data, seat_of(partition, slot)))
        mine = Enrolment(ClientId("abcd"[slot] * 26), f"s{slot}", FED, "", ("a:1",), str(data))
        made[-1].save_enrolment(mine)
    return made


def test_two_slots_of_one_data_set_are_two_clients_with_a_home_each(data, partition, homes):
    assert homes[0].directory != homes[1].directory
    assert Home.known(data) == []
    assert [h.directory for h in Home.known(data, None)] == [h.directory for h in homes]
    assert Home.known(data, seat(load(partition), 1))[0].directory == homes[1].directory
    assert homes[1].seat == seat(load(partition), 1)


def test_a_command_means_the_slot_that_it_names(data, homes):
    with pytest.raises(UsageError, match="is divided between 2 clients of this machine"):
        find_member(data, None)
    found, mine = find_member(data, None, "1")
    assert (found.directory, mine.name) == (homes[1].directory, "s1")
    assert find_member(data, None, "7") is None
    for wrong in ("x", "-1", "../0", "1.5", ""):
        with pytest.raises(UsageError, match="expected the number of a slot"):
            find_member(data, None, wrong)
    whole = Home.of(FED, data)
    whole.save_enrolment(Enrolment(ClientId("e" * 26), "all", FED, "", ("a:1",), str(data)))
    assert find_member(data, None)[1].name == "all"
    shutil.rmtree(whole.directory)
    shutil.rmtree(homes[1].directory)
    assert find_member(data, None)[1].name == "s0"


def test_one_slot_of_two_partitions_is_named_by_its_seat(data, homes):
    other = Home.of(FED, data, "0123abcd-001")
    other.save_enrolment(Enrolment(ClientId("f" * 26), "other", FED, "", ("b:1",), str(data)))
    with pytest.raises(UsageError, match=r"slot 1 exists in 2 partitions of .*0123abcd-001"):
        find_member(data, None, "1")
    assert find_member(data, None, "0123abcd-001")[1].name == "other"
    assert find_member(data, None, homes[1].seat)[1].name == "s1"
    assert find_member(data, "b:1", "1")[1].name == "other"
    assert find_member(data, None, "0")[1].name == "s0"


def test_a_slot_of_no_data_is_refused_though_there_is_one_client(homes):
    shutil.rmtree(homes[1].directory)
    assert find_home(None, None, None).directory == homes[0].directory
    with pytest.raises(UsageError, match="--slot names a client of a data set"):
        find_home(None, None, 1)


def test_status_tells_how_each_slot_is_started(data, homes):
    text = CliRunner().invoke(app, ["status", "--data", str(data)]).stdout
    assert "--partition FILE --slot 0" in text
    assert "--partition FILE --slot 1" in text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--slot", "0"], "needs both --partition FILE and --slot K"),
        (["--partition", "FILE"], "needs both --partition FILE and --slot K"),
        (["--partition", "FILE", "--slot", "2"], "slots 0 to 1, got 2"),
        (["--partition", "nowhere.json", "--slot", "0"], "there is no partition nowhere.json"),
    ],
)
def test_join_refuses_half_a_choice_before_anything_happens(
    given, sentence, data, partition, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = [str(partition) if word == "FILE" else word for word in given]
    result = CliRunner().invoke(app, ["join", "--data", str(data), *words])
    assert result.exit_code in (1, 4)
    assert sentence in result.stderr
    assert not home.state_home().exists()


def test_join_enrols_a_slot_by_the_name_of_its_data_and_its_number(
    data, partition, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    asked = []
    monkeypatch.setattr(enrol, "find", lambda *a, **options: (asked.append(options), 1 / 0)[0])
    CliRunner().invoke(
        app, ["join", "--data", str(data), "--partition", str(partition), "--slot", "1"]
    )
    assert asked == [{"seat": seat(load(partition), 1), "name": f"{data.name}-001"}]


# --- export --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_exported_folders_hold_each_clients_images_and_are_data_themselves(
    form, data, partition, tmp_path
):
    made = load(partition)
    source = open_source(data if form == "folder" else zipped(data, tmp_path / "data.zip"))
    folders = export(SharedData(source, made), tmp_path / "out", lambda *_: None)
    assert [f.name for f in folders] == ["client-000", "client-001"]
    for slot, folder in enumerate(folders):
        listed = open_source(folder).listing().entries
        train = {e.name for e in listed if e.part == "train"}
        assert train == made.train(slot) | made.select(slot)
        assert {e.name for e in listed if e.part == "test"} == made.test(slot)
        for entry in listed:
            assert (folder / entry.name).read_bytes() == (data / entry.name).read_bytes()
    linked = (folders[0] / min(made.train(0))).stat().st_nlink > 1
    assert linked == (form == "folder")
    with pytest.raises(UsageError, match="already exists and is not empty"):
        export(SharedData(source, made), tmp_path / "out", lambda *_: None)


def test_files_of_one_name_from_folders_below_a_class_stay_apart(tmp_path):
    root = tmp_path / "deep"
    for day in ("mon", "tue"):
        fill(root, f"train/ant/{day}", "", [1])
        fill(root, f"test/ant/{day}", "", [2])
    made = divided(root, tmp_path / "p.json", clients=1, tasks=1)
    (folder,) = export(SharedData(open_source(root), made), tmp_path / "out", lambda *_: None)
    assert sorted(p.name for p in (folder / "train/ant").iterdir()) == ["1-1.png", "1.png"]
