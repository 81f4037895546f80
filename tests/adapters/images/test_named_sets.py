"""A name means a folder; nothing is downloaded unasked, and only what was published is unpacked."""

import hashlib
import io
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from adapters.picture_kit import add
from fcil_adapters.images import hub_set, named_sets
from fcil_adapters.images.cifar_source import CIFAR_10, CIFAR_100, CifarSource
from fcil_adapters.images.decoding import decode, open_source
from fcil_adapters.images.named_sets import Archive, fetch, find, located
from fcil_protocol.errors import DataError

RNG = np.random.default_rng(0)


def records(labels, coarse=b""):
    """Return records, and the images that they hold: (32, 32, 3) each."""
    images = [RNG.integers(0, 256, (32, 32, 3), np.uint8) for _ in labels]
    rows = [
        coarse + bytes([label]) + image.transpose(2, 0, 1).tobytes()
        for label, image in zip(labels, images, strict=True)
    ]
    return b"".join(rows), images


def write_100(folder, names=b"apple\nbear\nclock\n\n"):
    folder.mkdir(parents=True, exist_ok=True)
    train, images = records([0, 2, 1], coarse=b"\x09")
    test, more = records([1], coarse=b"\x09")
    for name, data in (("train.bin", train), ("test.bin", test), ("fine_label_names.txt", names)):
        (folder / name).write_bytes(data)
    return images + more


# --- binary CIFAR ---------------------------------------------------------------------------


def test_records_are_images_with_the_fine_label_and_the_side_of_their_file(tmp_path):
    images = write_100(tmp_path)
    source = open_source(tmp_path)
    assert isinstance(source, CifarSource)
    listing = source.listing()
    assert [(e.name, e.class_name, e.part) for e in listing.entries] == [
        ("test.bin/00000.ppm", "bear", "test"),
        ("train.bin/00000.ppm", "apple", "train"),
        ("train.bin/00001.ppm", "clock", "train"),
        ("train.bin/00002.ppm", "bear", "train"),
    ]
    assert listing.faults == ()
    for entry, image in zip(listing.entries, [images[3], *images[:3]], strict=True):
        data = CifarSource(tmp_path, CIFAR_100).read(entry)
        assert np.array_equal(np.asarray(decode(data)), image)
        assert len(data) == entry.size
        assert source.unchanged(entry)
    (tmp_path / "train.bin").write_bytes(b"")
    assert not source.unchanged(listing.entries[1])
    with pytest.raises(DataError, match="its file ends early"):
        source.read(listing.entries[1])


def test_cifar_10_has_five_files_to_train_on_and_one_label(tmp_path):
    for number, name in enumerate(CIFAR_10.sides):
        (tmp_path / name).write_bytes(records([number % 2])[0])
    (tmp_path / CIFAR_10.names).write_text("cat\ndog\n")
    found = [(e.name, e.class_name, e.part) for e in open_source(tmp_path).listing().entries]
    assert found[1] == ("data_batch_2.bin/00000.ppm", "dog", "train")
    assert found[5] == ("test_batch.bin/00000.ppm", "dog", "test")
    assert len(found) == 6


def test_a_file_that_was_cut_and_a_label_without_a_name_are_said(tmp_path):
    write_100(tmp_path, b"apple\nbear")
    with (tmp_path / "test.bin").open("ab") as file:
        file.write(b"xyz")
    listing = open_source(tmp_path).listing()
    assert len(listing.entries) == 3
    assert listing.faults == (
        "image 'train.bin/00001.ppm' is left out: its label has no name in fine_label_names.txt",
        "the end of 'test.bin' is left out: the file ends within an image",
    )
    (tmp_path / "fine_label_names.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"fine_label_names.txt cannot be read"):
        open_source(tmp_path).listing()


# --- names ----------------------------------------------------------------------------------


@pytest.fixture
def sets(tmp_path, monkeypatch):
    monkeypatch.setenv(named_sets.VARIABLE, str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sets"


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Publish a small CIFAR-100 as a file, with further members that nobody wants."""
    write_100(tmp_path / "made")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path in sorted((tmp_path / "made").iterdir()):
            add(archive, f"cifar-100-binary/{path.name}", path.read_bytes())
        add(archive, "../train.txt", b"x")
    data = out.getvalue()
    (tmp_path / "web").mkdir()
    file = tmp_path / "web" / "cifar-100-binary.tar.gz"
    file.write_bytes(data)
    one = Archive(file.as_uri(), len(data), hashlib.sha256(data).hexdigest(), CIFAR_100)
    monkeypatch.setitem(named_sets.ARCHIVES, "cifar100", one)
    return file


def test_a_name_means_a_folder_and_a_path_of_that_name_comes_first(sets):
    assert located(Path("cifar100")) == sets / "cifar100"
    assert located(Path("hf:a/b@main")) == sets / "hf--a--b@main"
    assert located(Path("hf:a/b/c@refs/convert/parquet")) == (
        sets / "hf--a--b--c@refs--convert--parquet"
    )
    assert located(Path("cifar1000")) == Path("cifar1000")
    Path("cifar100").mkdir()
    assert located(Path("cifar100")) == Path("cifar100")


def test_what_is_not_here_is_told_with_the_command_and_the_way_by_hand(sets):
    with pytest.raises(DataError, match="cifar100 is not on this machine") as caught:
        find(Path("cifar100"))
    assert "Download it: fcil-client data cifar100 --download" in caught.value.action
    assert f"put the file https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz into {sets}" in (
        caught.value.action
    )
    with pytest.raises(DataError, match="hf:a/b@c is not on this machine") as caught:
        fetch("hf:a/b@c", download=False)
    assert "as shards into that folder" in caught.value.action
    with pytest.raises(DataError, match="no folder or file nothing"):
        fetch("nothing", download=False)


@pytest.mark.parametrize(
    "name", ["hf:", "hf:a@b", "hf:a/b", "hf:a/b@../c", "hf:a/b/c/d@e", "hf:a/b@"]
)
def test_a_name_of_hugging_face_needs_owner_name_and_revision(sets, name):
    with pytest.raises(DataError, match="expected hf:OWNER/NAME@REVISION"):
        located(Path(name))


def test_an_archive_is_downloaded_compared_and_unpacked_once(sets, published):
    told = []
    path = fetch("cifar100", download=True, progress=lambda *numbers: told.append(numbers))
    assert path == sets / "cifar100"
    assert sorted(p.name for p in path.iterdir()) == sorted(CIFAR_100.all)
    assert told == [(published.stat().st_size,) * 2]
    published.unlink()
    assert fetch("cifar100", download=True) == path  # it is here
    assert len(open_source(find(Path("cifar100"))).listing().entries) == 4
    assert [p.name for p in sets.iterdir()] == ["cifar100"]


def test_two_commands_that_download_at_once_do_not_meet(sets, published):
    def second(_done, _total):
        assert fetch("cifar100", download=True) == sets / "cifar100"

    assert fetch("cifar100", download=True, progress=second) == sets / "cifar100"
    assert len(open_source(sets / "cifar100").listing().entries) == 4
    assert [p.name for p in sets.iterdir()] == ["cifar100"]


def test_an_archive_that_was_put_there_by_hand_needs_no_download(sets, published):
    sets.mkdir()
    published.rename(sets / published.name)
    assert fetch("cifar100", download=False) == sets / "cifar100"
    assert (sets / published.name).exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "not the archive.*expected the SHA-256"),
        (lambda data: data + b"x", r"another length.*got more"),
        (lambda data: data[:-1], r"another length.*got \d+"),
    ],
)
def test_another_archive_is_refused_and_leaves_nothing(sets, published, damage, words):
    published.write_bytes(damage(published.read_bytes()))
    with pytest.raises(DataError, match=words):
        fetch("cifar100", download=True)
    assert list(sets.iterdir()) == []


def test_an_archive_by_hand_is_compared_as_well_and_stays(sets, published):
    sets.mkdir()
    (sets / published.name).write_bytes(b"x")
    with pytest.raises(DataError, match="not the archive that was published"):
        fetch("cifar100", download=False)
    assert [p.name for p in sets.iterdir()] == [published.name]


def test_no_network_is_told_with_the_way_by_hand(sets, published):
    published.unlink()
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        fetch("cifar100", download=True)
    assert "Or put the file" in caught.value.action
    assert list(sets.iterdir()) == []


def test_the_published_digests_are_complete():
    for archive in named_sets.ARCHIVES.values():
        assert archive.url.startswith("https://")
        assert len(bytes.fromhex(archive.sha256)) == 32
    assert replace(archive, url="https://x/y.tar.gz").name == "y.tar.gz"


# --- Hugging Face ---------------------------------------------------------------------------


def test_a_missing_library_is_told_and_so_is_one_that_runs_programs(sets, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="is not installed") as caught:
        fetch("hf:a/b@c", download=True)
    assert "pip install 'fcil[hub]'" in caught.value.action
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="3.6.0"))
    with pytest.raises(DataError, match=r"the version 3.6.0; expected 4 or later"):
        fetch("hf:a/b@c", download=True)
    assert list(sets.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "files", "named"),
    [
        (hub_set.READER, [f"{hub_set.HUB}x/train.parquet", f"{hub_set.HUB}x/train.pkl"], "n.pkl"),
        (hub_set.READER, ["/pictures/mine.parquet"], "mine.parquet"),
        (hub_set.READER, ["http://10.0.0.1/theirs.parquet"], "theirs.parquet"),
        (hub_set.READER, [], "none"),
        # The library reads this one as a tar, and what is in it as its names say.
        (
            "datasets.packaged_modules.webdataset.webdataset",
            [f"{hub_set.HUB}x.tar.tar.parquet"],
            "x",
        ),
    ],
)
def test_files_that_are_not_parquet_of_the_hub_are_not_read(
    sets, monkeypatch, module, files, named
):
    asked = []

    def builder(*words, **options):
        asked.append((words, options["revision"]))
        made = type("Builder", (), {"__module__": module})()
        made.config = SimpleNamespace(data_files={"train": files})
        return made

    library = SimpleNamespace(__version__="4.0.0", load_dataset_builder=builder)
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(DataError, match=rf"other files than Parquet.*{named}") as caught:
        fetch("hf:a/b/c@d", download=True)
    assert "hf:a/b@refs/convert/parquet" in caught.value.action
    assert asked == [(("a/b", "c"), "d")]


def test_the_hub_that_does_not_answer_is_told_in_one_sentence(sets, monkeypatch):
    def builder(*_words, **_options):
        raise ConnectionError("no route\nto host")

    library = SimpleNamespace(__version__="4.0.0", load_dataset_builder=builder)
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(DataError, match=r"cannot be fetched \(ConnectionError: no route\)"):
        fetch("hf:a/b@c", download=True)


def test_parquet_files_become_shards_with_the_names_of_their_classes(sets, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    from adapters.picture_kit import png

    repository = tmp_path / "repository"
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "fine_label": datasets.ClassLabel(names=["apple", "bear"]),
            "coarse_label": datasets.ClassLabel(names=["fruit", "mammal"]),
        }
    )
    for split, labels in (("train", [1, 0, 1]), ("test", [0]), ("validation", [-1])):
        columns = {
            "img": [
                {"bytes": png(10 * len(split) + n), "path": f"{n}.png"} for n in range(len(labels))
            ],
            "fine_label": labels,
            "coarse_label": [0] * len(labels),
        }
        if split == "test":  # and an image that is missing
            columns = {name: [*rows, None] for name, rows in columns.items()}
        rows = datasets.Dataset.from_dict(columns, features=features)
        rows.to_parquet(repository / "data" / f"{split}-00000-of-00001.parquet")
    real = datasets.load_dataset_builder

    def local(_repository, config, *, revision, cache_dir):
        assert revision == "main"
        return real(str(repository), config, cache_dir=cache_dir)

    monkeypatch.setattr(datasets, "load_dataset_builder", local)
    monkeypatch.setattr(hub_set, "HUB", str(repository))
    path = fetch("hf:a/b@main", download=True)
    assert sorted(p.name for p in path.iterdir()) == ["test-0000.tar", "train-0000.tar"]
    source = open_source(path)
    listing = source.listing()
    assert [(e.name, e.class_name, e.part) for e in listing.entries] == [
        ("test-0000.tar/00000000.png", "apple", "test"),
        ("train-0000.tar/00000000.png", "bear", "train"),
        ("train-0000.tar/00000001.png", "apple", "train"),
        ("train-0000.tar/00000002.png", "bear", "train"),
    ]
    assert source.read(listing.entries[2]) == png(51)
    shutil.rmtree(path)
    shutil.rmtree(repository)
    columns = {"img": [{"bytes": png(), "path": None}], "fine_label": [-1], "coarse_label": [0]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    rows.to_parquet(repository / "data" / "train-00000-of-00001.parquet")
    with pytest.raises(DataError, match="holds no image with a label"):
        fetch("hf:a/b@main", download=True)
    assert not path.exists()
