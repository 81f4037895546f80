"""A data set is the same in every form of docs/data.md: the same images, sides and partitions."""

import json
import tarfile
import zipfile

import pytest

from adapters.picture_kit import add, png
from fcil_adapters.images.decoding import open_source
from fcil_client.data.manifest import scan
from fcil_client.data.partition_export import export
from fcil_client.data.partition_make import Request, make
from fcil_client.data.partition_source import SharedData

IMAGES = {
    (side, name, number): png(100 * len(side) + 10 * len(name) + number)
    for side in ("train", "test")
    for name in ("ant", "lion", "tiger")
    for number in range(4 if side == "train" else 2)
}


def folder(root):
    for (side, name, number), data in IMAGES.items():
        path = root / side / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def zipped(root):
    with zipfile.ZipFile(root / "data.zip", "w") as archive:
        for (side, name, number), data in IMAGES.items():
            archive.writestr(f"{side}/{name}/{number}.png", data)
    return root / "data.zip"


def listed(root):
    rows = ["path,label,split"]
    for (side, name, number), data in IMAGES.items():
        (root / f"{side}{name}{number}").write_bytes(data)
        rows.append(f"{side}{name}{number},{name},{side}")
    (root / "list.csv").write_text("\n".join(rows))
    return root / "list.csv"


def sharded(root):
    for number, side in enumerate(("train", "test", "train")):
        with tarfile.open(root / f"{side}-{number}.tar", "w") as archive:
            for at, (key, data) in enumerate(IMAGES.items()):
                if key[0] == side and at % 2 == (number == 0):
                    add(archive, f"{key[1]}{key[2]}.png", data)
                    add(archive, f"{key[1]}{key[2]}.cls", key[1].encode())
                elif key[0] == side == "test":
                    add(archive, f"x/{key[1]}{key[2]}.png", data)
                    add(archive, f"x/{key[1]}{key[2]}.json", json.dumps({"label": key[1]}).encode())
    return root


FORMS = [folder, zipped, listed, sharded]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images_on_the_same_sides(tmp_path, form):
    expected = scan(open_source(folder(tmp_path / "folder")), None, b"salt", threads=1)
    (tmp_path / "it").mkdir()
    source = open_source(form(tmp_path / "it"))
    found = scan(source, None, b"salt", threads=1)
    assert len(found.images) == len(IMAGES)
    assert found.digest == expected.digest
    assert (found.faults, found.notes) == ((), ())
    source.close()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_divided_and_read_by_a_source_that_listed_nothing(tmp_path, form):
    (tmp_path / "it").mkdir()
    path = form(tmp_path / "it")
    source = open_source(path)
    made = make(source.listing(), Request(kind="iid", clients=2, tasks=1))
    parts = SharedData(source, made)
    fresh = open_source(path)  # as of a worker that starts with its client's list of images
    read = [fresh.read(entry) for slot in range(2) for entry in parts.entries(slot)]
    assert sorted(read) == sorted(IMAGES.values())
    assert all(fresh.unchanged(entry) for entry in parts.entries(0))
    fresh.close()
    for one in export(parts, tmp_path / "out", lambda *_: None):
        assert {e.part for e in open_source(one).listing().entries} == {"train", "test"}
    source.close()
