"""A folder of unlabelled images: each content once, never one of a class folder."""

import io

import numpy as np
import pytest
from PIL import Image

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import open_source
from fcil_adapters.images.sources import LooseSource
from fcil_client.data.local_data import LocalData
from fcil_client.data.manifest import scan
from fcil_client.data.unlabelled import check_folder, choose
from fcil_protocol.errors import DataError, UsageError

NOTHING: frozenset[str] = frozenset()
RNG = np.random.default_rng(1)
PREPROCESSING = Preprocessing(size=4, mean=(0.5,) * 3, std=(0.5,) * 3)


def put(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue())


@pytest.fixture
def folder(tmp_path):
    for i in range(5):
        put(tmp_path / f"camera/{i}.png", i)
        put(tmp_path / f"camera/2026/may/{i}.png", 10 + i)
    return tmp_path / "camera"


def chosen(folder, most=100, used=NOTHING, seed=1):
    return choose(
        LooseSource(folder), most, used, np.random.default_rng(seed), lambda: None, threads=2
    )


def test_images_of_all_folders_are_found(folder):
    offer = chosen(folder)
    assert sorted(i.entry.name for i in offer.images) == sorted(
        [f"{i}.png" for i in range(5)] + [f"2026/may/{i}.png" for i in range(5)]
    )
    assert offer.faults == ()


def test_the_same_seed_draws_the_same_and_another_seed_others(folder):
    first, again, other = (chosen(folder, most=4, seed=s) for s in (1, 1, 2))
    assert first == again
    assert len(first.images) == len(other.images) == 4
    assert first != other


def test_copies_and_used_images_are_left_out(folder):
    put(folder / "copy.png", 3)
    everything = chosen(folder)
    assert len(everything.images) == 10
    used = frozenset(image.digest for image in everything.images[:7])
    assert {i.digest for i in chosen(folder, used=used).images} == {
        i.digest for i in everything.images[7:]
    }


def test_used_images_leave_room_for_others(folder):
    used = frozenset(image.digest for image in chosen(folder, most=6).images)
    assert len(chosen(folder, most=4, used=used).images) == 4


def test_broken_files_are_reported_and_the_others_used(folder):
    (folder / "broken.png").write_bytes(b"no picture")
    offer = chosen(folder)
    assert len(offer.images) == 10
    [fault] = offer.faults
    assert "broken.png" in fault


@pytest.mark.parametrize("state", ["empty", "used", "broken"])
def test_without_a_further_image_there_is_one_sentence(tmp_path, state):
    used = NOTHING
    folder = tmp_path / "some"
    folder.mkdir()
    if state == "used":
        put(folder / "a.png", 1)
        used = frozenset(image.digest for image in chosen(folder).images)
    if state == "broken":
        (folder / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="are counted already, are in a class folder too, or"):
        chosen(folder, used=used)


def test_a_folder_that_is_gone_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="there is no folder"):
        chosen(tmp_path / "gone")


def test_a_client_shows_no_image_that_is_also_in_a_class_folder(folder, tmp_path):
    """Neither one to learn from nor one to test with."""
    for i in range(3):
        put(tmp_path / f"data/train/cat/{i}.png", i)
    put(tmp_path / "data/test/cat/9.png", 14)
    source = open_source(tmp_path / "data")
    data = LocalData(source, scan(source, None, b"salt"), PREPROCESSING, memory_bytes=0)
    images, faults = data.unlabelled_images(folder, 100, NOTHING, RNG)
    assert (len(images), faults) == (6, ())
    assert images.labels.tolist() == [-1] * 6
    assert images.take(np.arange(6)).shape == (6, 4, 4, 3)
    left = data.unlabelled_images(folder, 100, frozenset(images.digests[:2]), RNG)[0]
    assert set(left.digests) == set(images.digests[2:])
    data.close()


def test_an_image_that_was_once_in_a_class_folder_stays_out(folder, tmp_path):
    """It was trained or tested there, and its owner has moved it since."""
    put(tmp_path / "data/cat/0.png", 0)
    put(tmp_path / "data/cat/1.png", 1)
    cache = tmp_path / "manifest.json"
    scan(open_source(tmp_path / "data"), cache, b"salt")
    (tmp_path / "data/cat/0.png").unlink()
    source = open_source(tmp_path / "data")
    data = LocalData(source, scan(source, cache, b"salt"), PREPROCESSING, memory_bytes=0)
    assert len(data.unlabelled_images(folder, 100, NOTHING, RNG)[0]) == 8
    data.close()


def test_an_image_that_breaks_during_the_round_is_not_replaced(folder, tmp_path):
    """The label of another one would be counted as its own."""
    put(tmp_path / "data/cat/0.png", 50)
    source = open_source(tmp_path / "data")
    data = LocalData(source, scan(source, None, b"salt"), PREPROCESSING, memory_bytes=0)
    images, _ = data.unlabelled_images(folder, 100, NOTHING, RNG)
    (folder / "3.png").unlink()
    with pytest.raises(DataError, match=r"unlabelled image '3.png' is gone or broke"):
        images.take(np.arange(len(images)))
    assert "3.png" in images.faults[0]
    data.close()


def test_files_that_are_read_for_a_round_are_bounded(folder, tmp_path):
    """Most of a camera's images may be counted already."""
    for i in range(100):
        put(folder / f"more/{i}.png", 100 + i)
    read = []
    source = LooseSource(folder)
    source.read = lambda entry, read_it=source.read: (read.append(entry), read_it(entry))[1]
    used = frozenset(image.digest for image in chosen(folder, most=200).images)
    with pytest.raises(DataError, match="all 50 images that were read"):
        choose(source, 5, used, np.random.default_rng(1), lambda: None, threads=2)
    assert len(read) == 50


def test_a_folder_may_not_overlap_with_the_classes(folder, tmp_path):
    data = tmp_path / "data"
    (data / "cat").mkdir(parents=True)
    assert check_folder(folder, data, divided=False) == folder.resolve()
    packed = folder / "labelled.zip"
    packed.touch()
    assert check_folder(folder, packed, divided=False) == folder.resolve()
    with pytest.raises(UsageError, match="each client of a partition would count the same"):
        check_folder(folder, data, divided=True)
    (tmp_path / "link").symlink_to(data)
    for bad in (data, data / "cat", tmp_path, tmp_path / "link/cat"):
        with pytest.raises(UsageError, match="overlap: folders in --data are classes"):
            check_folder(bad, data, divided=False)
    with pytest.raises(UsageError, match="there is no folder"):
        check_folder(tmp_path / "gone", data, divided=False)
