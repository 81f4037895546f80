"""Every readable image is recorded once, and keeps its side of the split for ever."""

import io
import json
import os
import shutil
import stat

import numpy as np
import pytest
from PIL import Image

from fcil_adapters.images.decoding import digest, open_source
from fcil_client.data import manifest as manifest_module
from fcil_client.data.manifest import ImageManifest, diff, load, renames, scan
from fcil_client.data.split import Fractions, position
from fcil_protocol.errors import ConfigError, CorruptFile, DataError, DiskFull

SALT = b"s" * 16


def png(seed):
    values = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def put(root, name, seed):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(seed))
    return path


def fill(root, cls, seeds):
    for seed in seeds:
        put(root, f"{cls}/{seed}.png", seed)
    return root


def scanned(root, cache=None, salt=SALT, **options):
    return scan(open_source(root), cache, salt, threads=1, **options)


def sides(manifest):
    return {i.entry.name: i.side for i in manifest.images}


def seed_on(side, salt=SALT, tested=False):
    """Return seeds of images that the hash puts on one side."""
    train, select = (7 / 8, 1) if tested else (0.7, 0.8)
    for seed in range(1000):
        at = position(digest(png(seed)).hex(), salt)
        if side == ("train" if at < train else "select" if at < select else "test"):
            yield seed


def first(side, count=1, **options):
    seeds = seed_on(side, **options)
    return [next(seeds) for _ in range(count)]


def test_the_shares_of_the_sides_are_those_of_the_fractions(tmp_path):
    manifest = scanned(fill(tmp_path, "cat", range(400)))
    counts = [manifest.counts(side)["cat"] for side in ("train", "select", "test")]
    assert sum(counts) == 400
    for count, share in zip(counts, (0.7, 0.1, 0.2), strict=True):
        assert abs(count - 400 * share) < 4 * np.sqrt(400 * share * (1 - share))


def test_sides_follow_from_content_and_salt_alone(tmp_path):
    one = scanned(fill(tmp_path / "a", "cat", range(40)))
    fill(tmp_path / "b", "dog", range(60))
    for seed in range(40):
        put(tmp_path / "b", f"cat/other-{seed}.png", seed)
    other = scanned(tmp_path / "b")
    sides_one = {i.digest: i.side for i in one.images}
    sides_other = {i.digest: i.side for i in other.images}
    assert all(sides_other[d] == side for d, side in sides_one.items())
    salted = scanned(tmp_path / "a", salt=b"x" * 16)
    assert {i.digest: i.side for i in salted.images} != sides_one


def test_copies_of_an_image_are_on_one_side(tmp_path):
    for seed in range(30):
        put(tmp_path, f"cat/{seed}.png", seed)
        put(tmp_path, f"cat/copy-{seed}.png", seed)
    found = sides(scanned(tmp_path))
    assert all(found[f"cat/{s}.png"] == found[f"cat/copy-{s}.png"] for s in range(30))


def test_with_a_test_folder_exactly_its_images_are_the_test_side(tmp_path):
    fill(tmp_path / "train", "cat", range(80))
    fill(tmp_path / "test", "cat", range(100, 110))
    manifest = scanned(tmp_path)
    assert {n for n, side in sides(manifest).items() if side == "test"} == {
        f"test/cat/{s}.png" for s in range(100, 110)
    }
    assert 60 <= manifest.counts("train")["cat"] < 80


def test_a_train_folder_alone_is_split_like_class_folders(tmp_path):
    fill(tmp_path / "train", "cat", range(80))
    assert 5 <= scanned(tmp_path).counts("test")["cat"] <= 30


def test_a_copy_of_a_test_image_in_train_is_left_out_with_a_note(tmp_path):
    fill(tmp_path / "train", "cat", range(20))
    put(tmp_path, "test/cat/x.png", 3)
    manifest = scanned(tmp_path)
    assert "train/cat/3.png" not in sides(manifest)
    assert sides(manifest)["test/cat/x.png"] == "test"
    assert manifest.notes == ("left out of train/, since they are copies of images in test/: 1",)


def test_an_image_that_was_trained_on_never_becomes_a_test_image(tmp_path):
    cache = tmp_path / "manifest.json"
    root = fill(tmp_path / "data", "train/cat", first("train", 4))
    before = scanned(root, cache)
    assert before.counts("train") == {"cat": 4}
    moved = before.images[0].entry.name
    (root / "test/cat").mkdir(parents=True)
    shutil.move(root / moved, root / moved.replace("train", "test"))
    after = scanned(root, cache)
    assert after.counts("train") == {"cat": 3}
    assert after.counts("test") == {}
    assert (
        "left out of test/, since an earlier scan put them on the train or select side"
        in after.notes[0]
    )


def test_a_test_image_stays_one_when_a_test_folder_appears(tmp_path):
    cache = tmp_path / "manifest.json"
    test_seed = first("test")[0]
    root = fill(tmp_path / "data", "train/cat", [*first("train", 2), test_seed])
    assert scanned(root, cache).counts("test") == {"cat": 1}
    put(root, "test/cat/new.png", 5000)
    assert sides(scanned(root, cache))[f"train/cat/{test_seed}.png"] == "test"


@pytest.mark.parametrize("side", ["train", "select", "test"])
def test_a_class_of_one_image_can_be_learned(tmp_path, side):
    manifest = scanned(fill(tmp_path, "cat", first(side)))
    assert manifest.counts("train") == {"cat": 1}
    assert bool(manifest.notes) == (side != "train")


def test_an_image_moved_for_a_small_class_stays_there_when_the_class_grows(tmp_path):
    cache = tmp_path / "manifest.json"
    root = fill(tmp_path / "data", "cat", first("test", 2))
    before = scanned(root, cache)
    (moved,) = (n for n, side in sides(before).items() if side == "train")
    assert before.counts("test") == {"cat": 1}
    assert "'cat' has too few images to split (2)" in before.notes[0]
    after = scanned(fill(root, "cat", first("train", 6)), cache)
    assert sides(after)[moved] == "train"
    assert after.counts("train") == {"cat": 7}


def test_a_class_that_can_expect_a_test_image_has_one(tmp_path):
    cache = tmp_path / "manifest.json"
    root = fill(tmp_path / "data", "cat", [*first("train", 3), *first("select")])
    assert scanned(root, cache).counts("test") == {}  # a fifth of four is less than one
    fresh = first("train", 5)[3:]
    manifest = scanned(fill(root, "cat", fresh), cache)
    assert manifest.counts("test") == {"cat": 1}
    (kept,) = (n for n, side in sides(manifest).items() if side == "test")
    assert kept in {f"cat/{seed}.png" for seed in fresh}  # nothing that was learned from
    again = scanned(fill(root, "cat", first("test")), cache)
    assert sides(again)[kept] == "test"
    assert again.counts("test") == {"cat": 2}


def test_an_image_of_two_classes_is_moved_for_one_of_them_only(tmp_path):
    shared = min(first("test", 2), key=lambda seed: position(digest(png(seed)).hex(), SALT))
    fill(tmp_path, "ant", first("test", 2))  # learns from the shared one
    fill(tmp_path, "bee", [shared, *first("train", 5)])
    manifest = scanned(tmp_path)
    assert manifest.counts("train")["ant"] == 1
    assert manifest.counts("test") == {"ant": 1, "bee": 1}


def test_a_recorded_test_image_does_not_move_when_its_class_shrinks(tmp_path):
    cache = tmp_path / "manifest.json"
    (train,), (test,) = first("train"), first("test")
    root = fill(tmp_path / "data", "cat", [train, test])
    fill(root, "dog", range(20, 30))
    scanned(root, cache)
    (root / f"cat/{train}.png").unlink()
    after = scanned(root, cache)
    assert sides(after)[f"cat/{test}.png"] == "test"
    (said,) = after.notes
    assert said.startswith(
        "class 'cat' has no image to train on: those here serve for tests or tuning, "
    )


def test_classes_that_have_only_test_images_are_named_in_one_sentence(tmp_path):
    fill(tmp_path / "train", "cat", range(4))
    for number in range(9):
        fill(tmp_path / "test", f"dog{number}", [10 + number])
    (said,) = scanned(tmp_path).notes
    assert said.startswith("classes 'dog0', 'dog1', ")
    assert "'dog7' and 1 more have no image to train on: " in said


def test_an_image_that_comes_back_is_on_its_old_side(tmp_path):
    cache = tmp_path / "manifest.json"
    root = fill(tmp_path / "data", "cat", first("test", 2))
    before = sides(scanned(root, cache))
    (moved,) = (n for n, side in before.items() if side == "train")
    data = (root / moved).read_bytes()
    fill(root, "cat", first("train", 3))
    (root / moved).unlink()
    scanned(root, cache)
    (root / moved).write_bytes(data)
    assert sides(scanned(root, cache))[moved] == "train"


def test_unreadable_files_are_one_sentence_each_and_the_rest_goes_on(tmp_path):
    fill(tmp_path, "cat", range(3))
    (tmp_path / "cat/empty.png").write_bytes(b"")
    (tmp_path / "cat/text.jpg").write_bytes(b"hello")
    (tmp_path / "cat/cut.png").write_bytes(png(9)[:50])
    manifest = scanned(tmp_path)
    assert len(manifest.images) == 3
    assert len(manifest.faults) == 3
    for name in ("empty.png", "text.jpg", "cut.png"):
        assert sum(f"'cat/{name}'" in fault for fault in manifest.faults) == 1


def test_a_source_without_one_usable_image_is_a_data_error(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/a.png").write_bytes(b"")
    with pytest.raises(DataError, match="none of the 1 images .* empty"):
        scanned(tmp_path)


def test_a_rescan_decodes_only_what_is_new_or_changed(tmp_path, monkeypatch):
    cache = tmp_path / "manifest.json"
    root = fill(tmp_path / "data", "cat", range(6))
    before = scanned(root, cache)
    decoded = []
    monkeypatch.setattr(manifest_module, "decode", decoded.append)
    assert scanned(root, cache) == before
    assert decoded == []
    (root / "cat/2.png").write_bytes(png(77) + b"longer")
    put(root, "cat/new.png", 78)
    after = scanned(root, cache)
    assert decoded == [png(77) + b"longer", png(78)]
    assert len(after.images) == 7


def test_a_file_that_was_broken_and_became_readable_is_used(tmp_path):
    cache = tmp_path / "manifest.json"
    root = fill(tmp_path / "data", "cat", range(2))
    path = put(root, "cat/locked.png", 5)
    blocked = open_source(root)
    blocked.read = lambda e: (
        (_ for _ in ()).throw(DataError("no"))
        if "locked" in e.name
        else (root / e.name).read_bytes()
    )
    assert len(scan(blocked, cache, SALT).images) == 2
    assert path.stat().st_size > 0
    assert len(scanned(root, cache).images) == 3


def test_the_cache_is_private_and_gives_the_manifest_back(tmp_path):
    cache = tmp_path / "manifest.json"
    assert load(cache, SALT) is None
    manifest = scanned(fill(tmp_path / "data", "cat", range(5)), cache)
    assert load(cache, SALT) == manifest
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    with pytest.raises(CorruptFile, match="not the one that") as error:
        load(cache, b"other salt")
    assert "Restore the file `salt`" in error.value.action


def test_another_salt_is_refused_and_the_sides_stay_as_they_were(tmp_path):
    cache = tmp_path / "manifest.json"
    root = fill(tmp_path / "data", "cat", range(20))
    manifest = scanned(root, cache)
    before = cache.read_bytes()
    with pytest.raises(CorruptFile, match="not the one that"):
        scanned(root, cache, salt=b"t" * 16)
    assert cache.read_bytes() == before
    assert scanned(root, cache) == manifest


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(format=0),
        lambda fields: fields.update(files=[]),
        lambda fields: fields.update(files={"cat/0.png": ["cat"]}),
        lambda fields: fields.update(sides={}),
        lambda fields: fields["sides"].update(dict.fromkeys(fields["sides"], "nowhere")),
        lambda fields: fields.update(faults=[1]),
        lambda fields: fields.pop("notes") and None or fields.update(extra=1),
    ],
)
def test_a_damaged_cache_is_made_anew_with_a_note_and_kept(tmp_path, change):
    cache = tmp_path / "manifest.json"
    whole = scanned(fill(tmp_path / "data", "cat", range(20)), cache)
    fields = json.loads(cache.read_bytes())
    change(fields)
    damaged = json.dumps(fields)
    cache.write_text(damaged)
    again = scanned(tmp_path / "data", cache)
    assert sides(again) == sides(whole)
    assert "damaged and is rebuilt" in again.notes[-1]
    assert (tmp_path / "manifest.json.damaged").read_text() == damaged
    assert scanned(tmp_path / "data", cache) == whole  # said once


def test_a_cache_of_a_newer_fcil_is_left_as_it_is(tmp_path):
    cache = tmp_path / "manifest.json"
    scanned(fill(tmp_path / "data", "cat", range(2)), cache)
    newer = json.dumps(json.loads(cache.read_bytes()) | {"format": 99})
    cache.write_text(newer)
    with pytest.raises(CorruptFile, match="has format 99; this fcil reads 1"):
        scanned(tmp_path / "data", cache)
    assert cache.read_text() == newer


def test_no_truncation_of_the_cache_is_taken_for_a_manifest(tmp_path):
    cache = tmp_path / "manifest.json"
    scanned(fill(tmp_path / "data", "cat", range(1)), cache)
    data = cache.read_bytes()
    for cut in range(len(data)):
        cache.write_bytes(data[:cut])
        assert load(cache, SALT) is None


def test_counts_name_what_is_there(tmp_path):
    fill(tmp_path / "train", "cat", range(8))
    fill(tmp_path / "train", "ant", range(20, 24))
    fill(tmp_path / "test", "dog", range(40, 43))
    manifest = scanned(tmp_path)
    assert manifest.counts("test") == {"dog": 3}
    assert list(manifest.counts("train")) == ["ant", "cat"]


def test_the_digest_sees_content_class_and_side_but_no_file_name(tmp_path):
    one = scanned(fill(tmp_path / "a", "cat", range(5)))
    put_names = tmp_path / "b"
    for seed in range(5):
        put(put_names, f"cat/z{seed}.png", seed)
    assert scanned(put_names).digest == one.digest
    put(put_names, "cat/more.png", 50)
    assert scanned(put_names).digest != one.digest
    assert scanned(fill(tmp_path / "c", "dog", range(5))).digest != one.digest


def test_differences_are_told_by_class(tmp_path):
    root = fill(tmp_path, "cat", range(3))
    fill(root, "dog", range(10, 12))
    old = scanned(root)
    fill(root, "ant", [20])
    fill(root, "cat", [30, 31])
    (root / "cat/0.png").unlink()
    shutil.rmtree(root / "dog")
    assert diff(old, scanned(root)) == [
        "new class 'ant': 1 image",
        "class 'cat': 2 images more, 1 image fewer",
        "class 'dog' is gone (2 images): what was learned of it stays in the global model",
    ]
    assert diff(old, old) == []
    assert diff(ImageManifest(), old) == ["new class 'cat': 3 images", "new class 'dog': 2 images"]


def test_a_renamed_class_is_named_with_what_to_do(tmp_path):
    root = fill(tmp_path, "cat", range(3))
    fill(root, "dog", range(10, 14))
    fill(root, "owl", range(20, 24))
    old = scanned(root)
    (root / "dog").rename(root / "big dog")
    (root / "big dog/10.png").unlink()
    fill(root, "big dog", [30])
    (root / "cat").rename(root / "CAT")  # the same class
    for image in (root / "owl").iterdir():
        image.rename(root / "CAT" / image.name)  # into a class that was there
    (said,) = renames(old, scanned(root))
    assert said.startswith("the images of class 'dog' are in class 'big dog' now: ")
    assert said.endswith("ask the operator for: fcil-server classes alias 'big dog' dog")
    assert renames(old, old) == renames(ImageManifest(), old) == []


@pytest.mark.parametrize("fractions", [(0, 0.5, 0.5), (0.5, 0.5, 0.5), (1.2, -0.2, 0)])
def test_impossible_fractions_are_refused(tmp_path, fractions):
    with pytest.raises(ConfigError, match="sum to 1"):
        scanned(fill(tmp_path, "cat", [1]), fractions=Fractions(*fractions))


def test_progress_counts_up_to_the_number_of_files(tmp_path):
    seen = []
    scanned(
        fill(tmp_path, "cat", range(4)), on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


class TestFullDisk:
    @pytest.fixture
    def full(self, monkeypatch):
        def refuse(path, *_data, **_options):
            raise DiskFull(f"cannot write {path}: its disk is full.")

        def fill_up():
            monkeypatch.setattr(manifest_module, "write_atomic", refuse)

        return fill_up

    def test_what_was_found_counts_although_it_cannot_be_kept(self, tmp_path, full):
        root, cache = fill(tmp_path / "data", "cat", range(12)), tmp_path / "manifest.json"
        full()
        first, second = scanned(root, cache), scanned(root, cache)
        assert not cache.exists()
        assert len(first.images) == 12
        assert sides(first) == sides(second)
        assert "disk is full" in first.notes[-1]

    def test_an_image_that_was_trained_on_stays_so_in_the_next_scan(self, tmp_path, full):
        """One of a small class is on the train side, though its hash says otherwise."""
        root, cache = fill(tmp_path / "data", "cat", first("test", 2)), tmp_path / "manifest.json"
        full()
        before = scanned(root, cache)
        (moved,) = (n for n, side in sides(before).items() if side == "train")
        fill(root, "cat", first("train", 6))
        assert sides(scanned(root, cache))[moved] == "test", "another process would move it back"
        after = scanned(root, cache, before=before)
        assert sides(after)[moved] == "train"
        assert after.counts("train") == {"cat": 7}

    def test_a_damaged_one_stays_as_it_is_until_there_is_room(self, tmp_path, full):
        root, cache = fill(tmp_path / "data", "cat", range(3)), tmp_path / "manifest.json"
        cache.write_bytes(b"{")
        full()
        assert len(scanned(root, cache).images) == 3
        assert cache.read_bytes() == b"{"

    def test_a_scan_that_is_not_to_be_kept_writes_nothing(self, tmp_path):
        root, cache = fill(tmp_path / "data", "cat", range(3)), tmp_path / "manifest.json"
        assert scanned(root, cache, keep=False).notes == scanned(root, None).notes
        assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_classes_that_swap_their_folders_swap_their_images(tmp_path):
    cache = tmp_path / "manifest.json"
    root = tmp_path / "data"
    for cls, seed in (("cat", 1), ("dog", 2)):
        path = put(root, f"{cls}/0.ppm", seed)
        values = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(values).save(path, "PPM")
        os.utime(path, ns=(1, 1))
    before = {i.entry.class_name: i.digest for i in scanned(root, cache).images}
    (root / "cat").rename(root / "x")
    (root / "dog").rename(root / "cat")
    (root / "x").rename(root / "dog")
    after = {i.entry.class_name: i.digest for i in scanned(root, cache).images}
    assert after == {"cat": before["dog"], "dog": before["cat"]}
