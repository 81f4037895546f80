"""Each door shows one side of exactly the classes asked for, decoded once, within its bound."""

import io
import threading

import numpy as np
import pytest
from PIL import Image

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images import cache as image_store
from fcil_adapters.images.decoding import open_source
from fcil_client.data.local_data import LocalData
from fcil_client.data.manifest import scan
from fcil_protocol.errors import DataError

SIZE = 4
IMAGE_BYTES = 3 * SIZE**2
PREPROCESSING = Preprocessing(size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)


def pixels(seed):
    return np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def put(root, name, seed):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.fromarray(pixels(seed)).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue())


@pytest.fixture
def root(tmp_path):
    for number, cls in enumerate(("ant", "Bee", "cat")):
        for i in range(6):
            put(tmp_path, f"train/{cls}/{i}.png", 100 * number + i)
        for i in range(3):
            put(tmp_path, f"test/{cls}/{i}.png", 1000 + 100 * number + i)
    return tmp_path


@pytest.fixture
def opened(root):
    """Return a function that opens LocalData with room for some images; closed afterwards."""
    made = []

    def make(images=1000):
        source = open_source(root)
        manifest = scan(source, None, b"salt", threads=1)
        memory = images * IMAGE_BYTES
        made.append(LocalData(source, manifest, PREPROCESSING, memory_bytes=memory, threads=2))
        return made[-1]

    yield make
    for data in made:
        data.close()


@pytest.fixture
def decoded(monkeypatch):
    """Count how often a picture is decoded."""
    calls = []
    original = image_store.decode
    monkeypatch.setattr(image_store, "decode", lambda data: (calls.append(data), original(data))[1])
    return calls


def everything(door):
    return door.take(np.arange(len(door), dtype=np.int64))


def contents(door):
    return {a.tobytes() for a in everything(door)}


def test_the_learner_sees_the_train_images_of_exactly_the_classes_asked_for(opened):
    data = opened()
    door = data.learner_images({"cat": 7, "ant": 3})
    assert set(door.labels.tolist()) == {3, 7}
    assert door.labels.dtype == np.int64
    allowed = {pixels(s).tobytes() for n in (0, 2) for s in range(100 * n, 100 * n + 6)}
    assert contents(door) <= allowed
    assert everything(door).shape == (len(door), SIZE, SIZE, 3)


def test_each_image_comes_with_its_own_label(opened):
    door = opened().learner_images({"ant": 0, "Bee": 1, "cat": 2})
    owner = {pixels(100 * n + i).tobytes(): n for n in range(3) for i in range(6)}
    assert [owner[a.tobytes()] for a in everything(door)] == door.labels.tolist()


def test_the_doors_of_the_two_sides_share_no_image(opened):
    data, names = opened(), {"ant": 0, "Bee": 1, "cat": 2}
    doors = [data.learner_images(names), data.test_images(names)]
    learned, tested = (contents(door) for door in doors)
    assert learned
    assert not learned & tested
    assert len(doors[1]) == 9


def test_names_are_matched_as_the_federation_does_and_unknown_ones_are_empty(opened):
    data = opened()
    assert set(data.test_images({"bee": 5}).labels.tolist()) == {5}
    empty = data.learner_images({"zebra": 1})
    assert len(empty) == 0
    assert empty.labels.shape == (0,)
    assert everything(empty).shape == (0, SIZE, SIZE, 3)


def test_images_are_decoded_once_across_rounds_and_accesses(opened, decoded):
    data = opened()
    door = data.learner_images({"ant": 0})
    for _ in range(3):
        everything(door)
    again = data.learner_images({"ant": 0})
    assert contents(again) == contents(door)
    assert len(decoded) == len(door)


@pytest.mark.parametrize("room", [0, 1, 4])
def test_beyond_the_bound_images_are_decoded_on_access_and_the_same(opened, decoded, room):
    full = everything(opened().test_images({"ant": 0, "cat": 1}))
    data = opened(room)
    door = data.test_images({"ant": 0, "cat": 1})
    decoded.clear()
    assert np.array_equal(everything(door), full)
    assert len(decoded) == 6 - room
    assert len(data._store._kept._arrays) <= room


def test_a_new_door_takes_the_room_of_an_older_one(opened, decoded):
    data = opened(3)
    old = data.test_images({"ant": 0})
    new = data.test_images({"cat": 0})
    decoded.clear()
    everything(new)
    assert len(decoded) == 0
    everything(old)
    assert len(decoded) == 3


def test_a_mixed_index_with_repetitions_is_served_in_order(opened):
    door = opened(2).test_images({"ant": 0, "cat": 1})
    index = np.array([5, 0, 5, 3], dtype=np.int64)
    assert np.array_equal(door.take(index), everything(door)[index])


@pytest.mark.parametrize("room", [0, 100])
@pytest.mark.parametrize("harm", ["gone", "other", "broken"])
def test_an_image_that_is_gone_or_changed_since_the_scan_is_skipped_and_named(
    opened, root, room, harm
):
    data = opened(room)
    path = root / "test/ant/1.png"
    if harm == "gone":
        path.unlink()
    elif harm == "other":
        put(root, "test/ant/1.png", 99)
    else:
        path.write_bytes(b"broken")
    door = data.test_images({"ant": 0})
    assert len(door) == 2
    assert contents(door) == {pixels(1000).tobytes(), pixels(1002).tobytes()}
    assert len(data.faults) == 1
    assert "'test/ant/1.png'" in data.faults[0]


def test_an_image_that_vanishes_while_in_use_is_replaced_by_one_of_its_class(opened, root):
    data = opened(0)
    door = data.test_images({"ant": 0, "cat": 1})
    (root / "test/ant/1.png").unlink()
    batch = everything(door)
    assert np.array_equal(batch[1], batch[2])
    assert "'test/ant/1.png'" in data.faults[0]
    assert len(data.faults) == 1


def test_a_class_of_which_nothing_is_left_is_a_data_error(opened, root):
    data = opened(0)
    door = data.test_images({"ant": 0})
    for i in range(3):
        (root / f"test/ant/{i}.png").unlink()
    with pytest.raises(DataError, match="'ant' has no readable image left"):
        everything(door)


def test_after_a_rescan_known_images_stay_decoded(opened, root, decoded):
    data = opened()
    before = data.learner_images({"ant": 0})
    decoded.clear()
    put(root, "train/ant/new.png", 555)
    put(root, "train/ant/new2.png", 556)
    source = open_source(root)
    data.refresh(source, scan(source, None, b"salt", threads=1))
    after = data.learner_images({"ant": 0})
    assert contents(before) <= contents(after)
    assert len(decoded) == len(after) - len(before)


def test_the_order_is_that_of_the_names(opened, root):
    one = everything(opened().learner_images({"ant": 0, "cat": 1}))
    assert np.array_equal(one, everything(opened().learner_images({"cat": 1, "ant": 0})))


def test_images_that_fit_into_memory_one_by_one_alone_are_decoded_so(opened, monkeypatch):
    at_once, decode = [], image_store.decode
    first = threading.Barrier(2)

    def decode_one(data):
        at_once.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            first.wait(60)
            raise MemoryError
        return decode(data)

    monkeypatch.setattr(image_store, "decode", decode_one)
    view = opened(images=0).learner_images({"ant": 0})
    assert view.take(np.array([0, 1])).shape == (2, SIZE, SIZE, 3)
    assert at_once.count(threading.main_thread()) == 2
    assert not view.faults


def test_an_image_that_does_not_fit_alone_is_left_out_and_named(opened, root, monkeypatch):
    decode, data = image_store.decode, opened()
    most = len(opened().learner_images({"ant": 0}))
    files = sorted((root / "train" / "ant").iterdir())
    large = {file.read_bytes() for file in files[1:]}

    def decode_one(data):
        if data in large:
            raise MemoryError
        return decode(data)

    monkeypatch.setattr(image_store, "decode", decode_one)
    view = data.learner_images({"ant": 0})
    assert len(view) <= 1
    assert len(view.faults) == most - len(view)
    assert all("does not fit into memory" in fault for fault in view.faults)
