"""One worker keeps the images of many clients: within one bound, and apart."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import open_source
from fcil_client.data import held_data
from fcil_client.data.held_data import HeldData
from fcil_client.data.partition_file import save, seat
from fcil_client.data.partition_make import Request, make
from fcil_protocol.payloads.payload import Payload

SIZE = 8
LOOK = Preprocessing(SIZE, (0.5,) * 3, (0.5,) * 3)


def client(tmp_path, name, colours):
    """Write a client's folder, one image of class k for each colour; return its fields."""
    folder = tmp_path / name / "data" / "k"
    folder.mkdir(parents=True)
    for colour in colours:
        pixels = np.full((SIZE, SIZE, 3), colour, np.uint8)
        Image.fromarray(pixels).save(folder / f"{colour}.png")
    cache = tmp_path / name / "home"
    cache.mkdir()
    return {
        "data": str(folder.parent), "cache": str(cache), "salt": name.encode() * 16,
        "memory_bytes": 4 * 3 * SIZE**2, "threads": 1,
    }  # fmt: skip


def call(fields):
    return SimpleNamespace(fields=fields, payloads=[Payload()], progress=lambda _: None,
                           alive=lambda *_: None)  # fmt: skip


def colours(held, fields):
    """Return the colours of a client's train images, decoded."""
    door = held.of(call(fields), LOOK).learner_images({"k": 0})
    return sorted(int(image[0, 0, 0]) for image in door.take(np.arange(len(door))))


@pytest.fixture
def scans(monkeypatch):
    """Return the folders that are looked through, as it happens."""
    seen, scan = [], held_data.manifests.scan

    def counted(source, *args, **options):
        seen.append(source.path.parent.name)
        return scan(source, *args, **options)

    monkeypatch.setattr(held_data.manifests, "scan", counted)
    return seen


def test_clients_take_turns_without_being_looked_through_again_and_see_their_own(tmp_path, scans):
    a, b = client(tmp_path, "a", range(0, 50, 10)), client(tmp_path, "b", range(100, 150, 10))
    held = HeldData()
    first = [colours(held, one) for one in (a, b)]
    assert all(c < 100 for c in first[0])
    assert all(c >= 100 for c in first[1])
    assert [colours(held, one) for one in (a, b)] == first
    assert scans == ["a", "b"]


def test_decoded_images_of_all_clients_keep_one_bound_and_threads_are_shared(tmp_path):
    fields = [client(tmp_path, name, range(n, n + 5)) for n, name in ((0, "a"), (50, "b"))]
    held = HeldData()
    for one in (*fields, *fields):
        colours(held, one)
    assert len(held._cache.kept._arrays) <= 4
    stores = [data._store for data in held._data.values()]
    assert len(stores) == 2
    assert stores[0]._cache is stores[1]._cache


def test_the_same_image_of_two_clients_is_decoded_once(tmp_path, monkeypatch):
    from fcil_adapters.images import cache as image_store

    decoded, decode = [], image_store.decode
    monkeypatch.setattr(image_store, "decode", lambda data: decoded.append(1) or decode(data))
    fields = [client(tmp_path, name, [7, 8, 9]) for name in "ab"]
    for one in fields:
        one["salt"] = b"same" * 4  # so that both have the same images for training
    held = HeldData()
    first = colours(held, fields[0])
    assert colours(held, fields[1]) == first
    assert len(decoded) == len(first)


def test_lists_beyond_the_bound_are_forgotten_and_read_again(tmp_path, scans, monkeypatch):
    monkeypatch.setattr(held_data, "MOST_IMAGES", 5)
    a, b = client(tmp_path, "a", range(4)), client(tmp_path, "b", range(10, 14))
    held = HeldData()
    first = colours(held, a)
    colours(held, b)
    assert list(held._manifests) == [held_data._key(b)]
    assert colours(held, a) == first
    assert scans == ["a", "b", "a"]


def test_a_scan_while_images_are_held_shows_the_new_ones_to_that_client_alone(tmp_path):
    a, b = client(tmp_path, "a", range(0, 60, 10)), client(tmp_path, "b", range(100, 160, 10))
    held = HeldData()
    before = [colours(held, one) for one in (a, b)]
    for colour in range(61, 81):
        path = tmp_path / "a" / "data" / "k" / f"{colour}.png"
        Image.fromarray(np.full((SIZE, SIZE, 3), colour, np.uint8)).save(path)
    assert held.scan(call(a)).counts("train")["k"] > len(before[0])
    assert len(colours(held, a)) > len(before[0])
    assert colours(held, b) == before[1]


@pytest.fixture
def halves(tmp_path):
    """Return the folder of a data set, and the fields of the two clients that share it."""
    folder = Path(client(tmp_path, "whole", range(0, 200, 10))["data"])
    request = Request(clients=2, tasks=1, kind="iid", min_images=1)
    partition, file = make(open_source(folder).listing(), request), tmp_path / "two.json"
    save(file, partition)
    shared = {"data": str(folder), "partition": str(file), "memory_bytes": 0}
    both = [
        client(tmp_path, name, []) | shared | {"slot": slot, "seat": seat(partition, slot)}
        for slot, name in enumerate("ab")
    ]
    return folder, both


def test_files_that_were_rewritten_are_listed_again_once_for_all_clients(halves):
    folder, both = halves
    held = HeldData()
    before = [colours(held, fields) for fields in both]
    assert all(before)
    for path in folder.rglob("*.png"):
        os.utime(path, (1, 1))
    listings = []
    for fields in both:
        held.scan(call(fields))
        listings.append(held._parts)
    assert [colours(held, fields) for fields in both] == before
    assert listings[0] is listings[1]


def test_a_lost_image_costs_one_client_that_image_alone(halves):
    folder, both = halves
    held = HeldData()
    before = [colours(held, fields) for fields in both]
    next(folder.rglob(f"{before[0][0]}.png")).unlink()
    for fields in both:
        held.scan(call(fields))
    assert [colours(held, fields) for fields in both] == [before[0][1:], before[1]]


def test_a_client_that_was_dropped_lists_nothing_again(halves, monkeypatch):
    _, both = halves
    monkeypatch.setattr(held_data, "MOST_IMAGES", 1)
    held = HeldData()
    colours(held, both[0])
    listing = held._parts
    for fields in (*both, *both):
        colours(held, fields)
    assert held._parts is listing
