"""Shards are read in place, in every dialect of tar; what a tar pretends harms nobody."""

import io
import json
import os
import tarfile

import pytest

from adapters.picture_kit import add, png
from fcil_adapters.images import tar_index
from fcil_adapters.images.decoding import open_source
from fcil_adapters.images.shard_source import ShardSource, expanded
from fcil_adapters.images.tar_index import BLOCK, DamagedTar, members
from fcil_protocol.errors import DataError

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def shard(path, *found, form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in found:
            add(archive, name, data)
    return path


def pairs(*keys, label="cat"):
    for seed, key in enumerate(keys):
        yield f"{key}.png", png(seed)
        yield f"{key}.cls", f"{label}\n".encode()


def found(listing):
    return [(e.name, e.class_name, e.part) for e in listing.entries]


def indexed(data):
    data += bytes(BLOCK)
    return list(members(io.BytesIO(data), len(data)))


# --- tar ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_plain_files_are_found_where_the_library_finds_them(tmp_path, form):
    deep = "/".join(["a" * 40] * 4) + "/b.png"  # longer than a header's field
    content = [("x.png", b"1" * 700), (deep, b"22"), ("ä.cls", b""), ("y.json", b"{}")]
    path = shard(tmp_path / "x.tar", *content, form=form)
    data = path.read_bytes()
    index = indexed(data)
    assert [(m.name, data[m.offset : m.offset + m.size]) for m in index] == content
    with tarfile.open(path) as archive:
        known = [(m.name, m.offset_data, m.size) for m in archive.getmembers()]
    assert [tuple(m) for m in index] == known


def test_a_name_ends_at_a_nul_as_that_of_a_file_would():
    record = b"19 path=a.png\0.cls\n"
    data = header(kind=b"x", size=b"%011o\0" % len(record)) + record.ljust(BLOCK, b"\0")
    assert [m.name for m in indexed(data + header(b"b.png"))] == ["a.png"]


def test_folders_links_devices_and_sparse_files_are_no_files():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            add(archive, "a.png", type=kind, linkname="/etc/passwd")
        add(archive, "sparse.png", b"x", type=tarfile.GNUTYPE_SPARSE)
        add(archive, "sparser.png", b"x", pax_headers={"GNU.sparse.major": "1"})
        add(archive, "real.png", b"x")
    assert [m.name for m in indexed(out.getvalue())] == ["real.png"]


def header(name=b"a.png", size=b"00000000000\0", kind=b"0"):
    """Return a header with a valid checksum."""
    data = bytearray(BLOCK)
    data[: len(name)] = name
    data[124:136] = size
    data[148:156] = b" " * 8
    data[156:157] = kind
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (header(size=b"00000001000\0"), "within a member"),
        (header(size=b"-0000001000\0"), "a number"),
        (header(size=b"00000000009\0"), "a number"),
        (header(size=b"\xff" * 12), "a number"),  # GNU's form of -1: the library goes back
        (header(size=b"\x80" + b"\xff" * 11), "within a member"),
        (header(kind=b"x", size=b"-0000001000\0"), "a number"),
        (header(kind=b"L", size=b"00001000000\0") + bytes(1 << 18), "too long"),
        (header(kind=b"x", size=b"00000000004\0") + b"0 a=".ljust(BLOCK), "a record"),
        (header(kind=b"x", size=b"00000000004\0") + b"99 a".ljust(BLOCK), "a record"),
        (header()[:-1] + b"!", "the checksum"),
        (b"no tar", "within a header"),
        (b"", "without the zeros"),
    ],
)
def test_a_header_that_lies_ends_the_reading_and_keeps_what_was_before(data, why):
    good = header(b"good.png")
    read, seen = members(io.BytesIO(good + data), len(good + data)), []
    with pytest.raises(DamagedTar, match=why):
        seen.extend(m.name for m in read)
    assert next(members(io.BytesIO(good + data), len(good + data))).name == "good.png"


def test_the_size_of_a_pax_record_replaces_that_of_the_header():
    record = b"11 size=3\n".replace(b"11", b"10")
    data = header(kind=b"x", size=b"%011o\0" % len(record)) + record.ljust(BLOCK, b"\0")
    assert [m.size for m in indexed(data + header() + bytes(BLOCK))] == [3]


# --- shards ---------------------------------------------------------------------------------


def test_an_image_has_the_label_of_its_key_by_cls_or_json(tmp_path):
    path = shard(
        tmp_path / "x.tar",
        ("./1.cls", b"cat\n"),  # before its image, and as `tar cf x.tar .` writes names
        ("./1.jpg", png(1)),
        ("a.b/2.png", png(2)),
        ("a.b/2.json", json.dumps({"label": 7, "caption": "x"}).encode()),
        ("3.WEBP", png(3)),
        ("3.json", b'{"label": "dog"}'),
        ("3.cls", b"12"),
        ("4.seg.png", b"a mask, which is no image of its key"),
        ("5.txt", b"x"),
        (".6.png", b"x"),
    )
    source = open_source(path)
    assert isinstance(source, ShardSource)
    listing = source.listing()
    assert found(listing) == [
        ("x.tar/1.jpg", "cat", None),
        ("x.tar/3.WEBP", "12", None),
        ("x.tar/a.b/2.png", "7", None),
    ]
    assert listing.faults == ()
    assert [source.read(e) for e in listing.entries] == [png(1), png(3), png(2)]


@pytest.mark.parametrize(
    "label",
    [
        (),
        (("1.cls", b"\xff"),),
        (("1.json", b"[]"),),
        (("1.json", b"[" * 60_000),),
        (("1.json", b'{"label": true}'),),
        (("1.json", b'{"label": ' + b"1" * 5000 + b"}"),),
        (("1.json", b'{"label": "' + b"x" * tar_index.MAX_EXTRA_BYTES + b'"}'),),
    ],
)
def test_an_image_without_a_label_is_left_out_with_a_sentence(tmp_path, label):
    path = shard(tmp_path / "x.tar", ("1.png", png()), *label, *pairs("2"))
    listing = open_source(path).listing()
    assert found(listing) == [("x.tar/2.png", "cat", None)]
    (said,) = listing.faults
    assert said.startswith("image 'x.tar/1.png' is left out: its key has no label")


def test_an_image_whose_label_is_no_class_is_left_out_by_its_name(tmp_path):
    path = shard(tmp_path / "x.tar", *pairs("1", "2", label=".git"), *pairs("3"))
    listing = open_source(path).listing()
    assert found(listing) == [("x.tar/3.png", "cat", None)]
    (said,) = listing.faults
    why = "its label '.git' cannot be used: a class name must be one for a folder"
    assert said.startswith(f"image 'x.tar/1.png' and 1 more are left out: {why}")


def test_images_in_formats_that_are_not_read_are_counted_and_a_shard_of_them_is_named(tmp_path):
    shard(tmp_path / "x.tar", *pairs("1"), ("2.HEIC", b"x"), ("2.cls", b"cat"), ("3.seg.heic", b"x"),
          (".4.heic", b"x"))  # fmt: skip
    shard(tmp_path / "y.tar", ("a/1.avif", b"x"), ("a/1.cls", b"dog"))
    listing = open_source(tmp_path).listing()
    assert found(listing) == [("x.tar/1.png", "cat", None)]
    assert [fault.partition("; images are .bmp, .gif, .jpeg, ")[0] for fault in listing.faults] == [
        "shard 'y.tar' is left out: no image but files in formats that are not read (.avif)",
        "left out: 1 file beside the images in formats that are not read (.heic)",
    ]
    words = (
        r"holds no images with labels \(shard 'y.tar' is left out: no image but files in formats"
    )
    with pytest.raises(DataError, match=words):
        open_source(tmp_path / "y.tar").listing()


def test_members_that_point_outside_are_left_out_and_so_are_second_images(tmp_path):
    path = shard(
        tmp_path / "x.tar",
        *pairs("../1", "/2", "a/../3", "4"),
        ("4.jpg", png(9)),
        ("4.png", png(8)),
    )
    listing = open_source(path).listing()
    assert found(listing) == [("x.tar/4.png", "cat", None)]
    assert [said.partition(" ")[2].partition(" left out: ")[::2] for said in listing.faults] == [
        ("'../1.png' and 5 more are", "it points outside the archive"),
        ("'4.jpg' and 1 more are", "its key has an image already"),
    ]


def test_a_bomb_is_as_large_as_its_file_and_larger_images_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("fcil_adapters.images.image_source.MAX_FILE_BYTES", 4000)
    path = shard(tmp_path / "x.tar", ("1.png", bytes(5000)), ("1.cls", b"cat"), *pairs("2"))
    listing = open_source(path).listing()
    assert [e.name for e in listing.entries] == ["x.tar/2.png"]
    assert listing.faults == ("image 'x.tar/1.png' has 5000 bytes, more than 4000",)


def test_a_shard_that_ends_early_is_used_up_to_there(tmp_path):
    path = shard(tmp_path / "x.tar", *pairs("1", "2"))
    os.truncate(path, path.read_bytes().index(b"2.png") + BLOCK + 10)
    listing = open_source(path).listing()
    assert [e.name for e in listing.entries] == ["x.tar/1.png"]
    assert listing.faults == (
        "shard 'x.tar' is used up to its damage: it ends within a member",
    )  # fmt: skip
    (tmp_path / "y.tar").write_bytes(b"this is no tar")
    with pytest.raises(DataError, match="no images with labels.*its damage: it ends within a head"):
        open_source(tmp_path / "y.tar").listing()


def test_a_shard_that_is_cut_between_members_is_used_with_a_sentence(tmp_path):
    path = shard(tmp_path / "x.tar", *pairs("1", "2"), form=tarfile.USTAR_FORMAT)
    os.truncate(path, path.read_bytes().index(b"2.png"))
    source = open_source(path)
    listing = source.listing()
    assert [e.name for e in listing.entries] == ["x.tar/1.png"]
    assert source.read(listing.entries[0]) == png(0)
    assert listing.faults == (
        "shard 'x.tar' is used up to its damage: it ends without the zeros of a tar's end",
    )


def test_a_shard_that_was_rewritten_or_removed_is_noticed(tmp_path):
    path = shard(tmp_path / "x.tar", *pairs("1"))
    source = open_source(path)
    (entry,) = source.listing().entries
    assert source.unchanged(entry)
    os.utime(path, ns=(1, 1))
    assert not source.unchanged(entry)
    os.truncate(path, 600)
    with pytest.raises(DataError, match="its shard ends early"):
        source.read(entry)
    path.unlink()
    assert not source.unchanged(entry)
    with pytest.raises(DataError, match="No such file"):
        source.read(entry)
    with pytest.raises(DataError, match="cannot be read"):
        ShardSource(path).read(entry)


def test_a_pipe_is_no_shard(tmp_path):
    shard(tmp_path / "x.tar", *pairs("1"))
    os.mkfifo(tmp_path / "y.tar")
    listing = open_source(tmp_path).listing()
    assert [e.name for e in listing.entries] == ["x.tar/1.png"]
    assert listing.faults == ("shard 'y.tar' is left out: it is no file",)


# --- several shards -------------------------------------------------------------------------


def test_a_folder_of_shards_has_the_sides_of_their_names(tmp_path):
    for name in ("train-0", "train-1", "set-TEST-0", "val-0"):
        shard(tmp_path / f"{name}.tar", *pairs("1"))
    (tmp_path / "README.md").write_text("about them")
    (tmp_path / ".cache").mkdir()
    listing = open_source(tmp_path).listing()
    assert [(e.name, e.part) for e in listing.entries] == [
        ("set-TEST-0.tar/1.png", "test"),
        ("train-0.tar/1.png", "train"),
        ("train-1.tar/1.png", "train"),
    ]
    (said,) = listing.faults
    assert said.startswith("shard 'val-0.tar' is left out: others are named train or test")


def test_a_folder_of_classes_stays_one_where_a_tar_lies_in_it(tmp_path):
    shard(tmp_path / "x.tar", *pairs("1"))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.png").write_bytes(png())
    assert found(open_source(tmp_path).listing()) == [("cat/1.png", "cat", None)]


def test_a_pattern_names_shards_and_a_missing_one_is_said(tmp_path):
    for number in (8, 10):
        shard(tmp_path / f"s-{number:04}.tar", *pairs("1"))
    source = open_source(tmp_path / "s-{0008..0010}.tar")
    listing = source.listing()
    assert [e.name for e in listing.entries] == ["s-0008.tar/1.png", "s-0010.tar/1.png"]
    assert listing.faults == (
        "shard 's-0009.tar' is left out: it cannot be read (No such file or directory)",
    )
    assert source.read(listing.entries[1]) == png(0)
    with pytest.raises(DataError, match="there is no folder or file"):
        open_source(tmp_path / "t-{0..3}.tar")


def test_patterns_are_those_of_a_shell(tmp_path):
    def names(pattern):
        return [path.name for path in expanded(tmp_path / pattern)]

    assert names("a{9..11}.tar") == ["a9.tar", "a10.tar", "a11.tar"]
    assert names("a{09..10}.tar") == ["a09.tar", "a10.tar"]
    assert names("{0..1}-{1..2}.tar") == ["0-1.tar", "0-2.tar", "1-1.tar", "1-2.tar"]
    assert names("a{b,c}.tar") == ["a{b,c}.tar"]
    (tmp_path / "{3..1}").mkdir()
    assert names("{3..1}") == ["{3..1}"]  # it is there
    for pattern in ("{4..1}", "{0..999999999}", "{0..999}{0..999}"):
        with pytest.raises(DataError, match="must rise, and name at most"):
            names(pattern)
