"""Pictures are decoded and preprocessed alike everywhere; sources are listed with their faults."""

import itertools
import os
import unicodedata
import zipfile

import numpy as np
import pytest
from PIL import Image

from adapters.picture_kit import encoded, picture, png
from fcil_adapters.contract import Preprocessing
from fcil_adapters.images import folder_walk, image_source
from fcil_adapters.images.decoding import MAX_PIXELS, decode, digest, open_source, preprocess
from fcil_protocol.errors import ConfigError, DataError


def prep(size=8, **options):
    return Preprocessing(size=size, mean=(0.5,) * 3, std=(0.5,) * 3, **options)


def write(root, *names):
    for seed, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(seed))
    return root


def zipped(path, names, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for seed, name in enumerate(names):
            archive.writestr(name, png(seed))
    return path


def found(source):
    return [(e.name, e.class_name, e.part) for e in source.listing().entries]


# --- decode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_decode_to_the_same_pixels(form):
    image = picture()
    assert np.array_equal(np.asarray(decode(encoded(image, form))), np.asarray(image))


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "GIF"])
def test_other_formats_decode_to_the_same_size(form):
    assert decode(encoded(picture(), form)).size == (12, 8)


def test_exif_orientation_turns_the_picture_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: rotate by 90 degrees clockwise
    upright = decode(encoded(picture(), "PNG", exif=exif))
    assert upright.size == (8, 12)
    assert np.array_equal(np.asarray(upright), np.rot90(np.asarray(picture()), 3))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"no picture at all", "cannot be decoded"),
        (png()[:60], "cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
    ],
)
def test_a_useless_file_is_one_sentence(data, words):
    with pytest.raises(DataError, match=words) as caught:
        decode(data)
    assert "\n" not in str(caught.value)
    assert "0x" not in str(caught.value)


def test_every_truncation_of_a_picture_decodes_or_is_a_data_error():
    data = png()
    for cut in range(0, len(data), 7):
        try:
            decode(data[:cut])
        except DataError:
            continue


@pytest.mark.parametrize("height", [1500, 3000])
def test_more_pixels_than_the_limit_are_refused_before_they_are_unpacked(height):
    width = MAX_PIXELS // 1400
    bomb = encoded(Image.new("1", (width, height)))
    assert len(bomb) < 100_000
    with pytest.raises(DataError, match="Scale it down"):
        decode(bomb)


# --- preprocess -----------------------------------------------------------------------------


def test_a_square_of_the_right_size_stays_as_it_is():
    image = picture(8, 8)
    assert np.array_equal(preprocess(image, prep()), np.asarray(image))


@pytest.mark.parametrize("size", [(30, 8), (8, 31)])
def test_the_centre_of_a_longer_picture_is_taken(size):
    image = picture(*size)
    left, top = (size[0] - 8) // 2, (size[1] - 8) // 2
    expected = np.asarray(image)[top : top + 8, left : left + 8]
    assert np.array_equal(preprocess(image, prep()), expected)


def test_crop_pct_sets_the_shorter_side_before_the_crop():
    image = picture(40, 20)
    out = preprocess(image, prep(8, crop_pct=0.8))
    resized = image.resize((20, 10), Image.Resampling.BICUBIC)
    assert np.array_equal(out, np.asarray(resized)[1:9, 6:14])


@pytest.mark.parametrize("size", [(1, 1), (1, 50_000), (50_000, 1), (3, 200), (257, 255)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.9])
def test_any_size_becomes_the_square(size, crop_pct):
    out = preprocess(Image.new("RGB", size, (9, 8, 7)), prep(crop_pct=crop_pct))
    assert out.shape == (8, 8, 3)
    assert out.dtype == np.uint8
    assert np.array_equal(out, np.broadcast_to([9, 8, 7], out.shape))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB", "HSV"])
def test_every_colour_mode_becomes_rgb(mode):
    image = Image.new("RGB", (8, 8), (255, 255, 255))
    if mode == "LAB":
        image = Image.new("LAB", (8, 8), (255, 128, 128))
    out = preprocess(image.convert(mode) if mode != "LAB" else image, prep())
    assert out.shape == (8, 8, 3)
    assert out.min() >= 253


def test_sixteen_bit_greys_keep_their_range():
    values = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    out = preprocess(decode(encoded(Image.fromarray(values))), prep())
    assert np.array_equal(out[..., 0], np.rint(values / 257).astype(np.uint8))


def test_float_pictures_are_read_from_0_to_1_or_to_255():
    unit = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    small = preprocess(Image.fromarray(unit), prep())
    large = preprocess(Image.fromarray(unit * 255), prep())
    assert small.max() == 255
    assert np.array_equal(small, large)
    broken = unit.copy()
    broken[0, 0] = np.nan
    assert preprocess(Image.fromarray(broken), prep())[0, 0, 0] == 0


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_mid_grey(mode):
    if mode == "P":
        image = Image.new("P", (8, 8), 0)
        image.putpalette([200, 0, 0] * 256)
        data = encoded(image, transparency=0)
    else:
        data = encoded(Image.new("RGBA", (8, 8), (200, 0, 0, 0)).convert(mode))
    assert np.all(preprocess(decode(data), prep()) == 128)


def test_an_unknown_interpolation_is_named():
    with pytest.raises(ConfigError, match="'cubic'.*bicubic"):
        preprocess(picture(), prep(interpolation="cubic"))


def test_the_digest_is_sha256():
    assert digest(b"").hex().startswith("e3b0c44298fc1c14")


# --- sources --------------------------------------------------------------------------------


def test_class_folders_are_listed_by_name_and_other_files_passed_over(tmp_path):
    write(tmp_path, "dog/b.PNG", "dog/a.jpeg", "cat/deep/x.png", "cat/.hidden.png", ".git/y.png")
    (tmp_path / "cat/notes.txt").write_text("no image")
    assert found(open_source(tmp_path)) == [
        ("cat/deep/x.png", "cat", None),
        ("dog/a.jpeg", "dog", None),
        ("dog/b.PNG", "dog", None),
    ]
    assert open_source(tmp_path).listing().faults == ()


def test_train_and_test_above_the_classes_are_parts(tmp_path):
    write(tmp_path, "train/cat/1.png", "test/cat/2.png", "test/dog/3.png", "val/cat/4.png")
    source = open_source(tmp_path)
    assert found(source) == [
        ("train/cat/1.png", "cat", "train"),
        ("test/cat/2.png", "cat", "test"),
        ("test/dog/3.png", "dog", "test"),
    ]
    assert source.listing().faults == ("folder 'val' next to train/ and test/ is left out",)


def test_a_class_may_be_called_train(tmp_path):
    write(tmp_path, "train/1.png", "bus/2.png")
    assert found(open_source(tmp_path)) == [
        ("bus/2.png", "bus", None),
        ("train/1.png", "train", None),
    ]


@pytest.mark.parametrize("astray", [["train"], ["test"], ["train", "test"]])
def test_an_image_astray_changes_neither_classes_nor_sides(tmp_path, astray):
    whole = ["train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "test/dog/4.png"]
    before = found(open_source(write(tmp_path, *whole)))
    write(tmp_path, *(f"{side}/preview.png" for side in astray))
    listing = open_source(tmp_path).listing()
    assert found(open_source(tmp_path)) == before
    assert listing.faults == tuple(
        f"1 images lie directly in {side}/, in no class folder, such as '{side}/preview.png'"
        for side in astray
    )


def test_an_image_astray_in_train_alone_makes_it_no_class(tmp_path):
    write(tmp_path, "train/cat/1.png", "train/dog/2.png", "train/preview.png")
    assert [(n, c) for n, c, _ in found(open_source(tmp_path))] == [
        ("train/cat/1.png", "cat"),
        ("train/dog/2.png", "dog"),
    ]


def test_a_class_called_train_may_have_folders_if_it_has_classes_beside_it(tmp_path):
    write(tmp_path, "train/1.png", "train/old/2.png", "train/old/3.png", "bus/4.png")
    assert {c for _, c, _ in found(open_source(tmp_path))} == {"bus", "train"}


def test_sides_with_capitals_are_classes_and_named(tmp_path):
    write(tmp_path, "Train/cat/1.png", "Test/cat/2.png")
    assert {c for _, c, _ in found(open_source(tmp_path))} == {"Train", "Test"}
    faults = open_source(tmp_path).listing().faults
    assert [f.partition(":")[0] for f in faults] == [
        "folder 'Test' is taken as a class",
        "folder 'Train' is taken as a class",
    ]


@pytest.mark.parametrize("top", ["", "photos/"])
def test_a_zip_reads_like_its_folder_with_or_without_a_folder_around_it(tmp_path, top):
    names = ["train/cat/1.png", "train/dog/2.png", "test/cat/3.png"]
    path = zipped(tmp_path / "data.zip", [top + n for n in names] + ["__MACOSX/train/cat/1.png"])
    source = open_source(path)
    entries = source.listing().entries
    assert [(e.class_name, e.part) for e in entries] == [
        ("cat", "train"),
        ("dog", "train"),
        ("cat", "test"),
    ]
    assert [source.read(e) for e in entries] == [png(0), png(1), png(2)]
    source.close()


@pytest.mark.parametrize(
    "inside", [["cat/1.png", "dog/2.png"], ["train/cat/1.png", "note.png", "test/cat/2.png"]]
)
def test_an_only_folder_of_folders_is_a_class_and_named_with_what_to_give_instead(tmp_path, inside):
    write(tmp_path, *(f"pictures/{name}" for name in inside))
    listing = open_source(tmp_path).listing()
    assert {e.class_name for e in listing.entries} == {"pictures"}
    said = "folder 'pictures', the only one, is taken as a class: if the classes are folders in it, name "
    assert listing.faults == (f"{said}'{tmp_path}/pictures' instead",)
    write(tmp_path, "other/1.png")
    assert open_source(tmp_path).listing().faults == ()


def test_reading_gives_the_bytes_of_the_file(tmp_path):
    source = open_source(write(tmp_path, "cat/1.png"))
    assert source.read(next(source.entries())) == png(0)


def test_class_names_are_normalised_and_bad_ones_left_out_with_a_sentence(tmp_path):
    decomposed = unicodedata.normalize("NFD", "café")
    write(tmp_path, f"{decomposed} /1.png", f"{'x' * 200}/2.png", "a\tb/3.png")
    listing = open_source(tmp_path).listing()
    assert [e.class_name for e in listing.entries] == ["café"]
    assert len(listing.faults) == 2
    assert "'a\\tb' is left out" in listing.faults[0]


def test_of_two_folders_of_one_class_the_second_is_left_out_with_a_sentence(tmp_path):
    listing = open_source(write(tmp_path, "Cat/1.png", "cat/2.png")).listing()
    assert [e.name for e in listing.entries] == ["Cat/1.png"]
    assert "'cat' is left out: it names the same class as 'Cat'" in listing.faults[0]


def test_a_test_folder_that_spells_a_class_of_train_otherwise_is_left_out_too(tmp_path):
    names = ["train/cat/1.png", "test/Cat/2.png", "test/cat/3.png", "test/Dog/4.png"]
    source = open_source(write(tmp_path, *names))
    assert [(n, c) for n, c, _ in found(source)] == [
        ("train/cat/1.png", "cat"),
        ("test/Dog/4.png", "Dog"),
        ("test/cat/3.png", "cat"),
    ]
    assert source.listing().faults == (
        "folder 'test/Cat' is left out: it names the same class as 'cat'; give both one name",
    )


@pytest.mark.parametrize("names", [[], ["1.png", "2.png"], [".hidden/1.png"]])
def test_a_folder_without_class_folders_is_told_the_layout(tmp_path, names):
    with pytest.raises(DataError, match=r"FOLDER/<class>/<image>"):
        open_source(write(tmp_path, *names)).listing()


@pytest.mark.parametrize("method", ["ZIP_STORED", "ZIP_DEFLATED", "ZIP_BZIP2", "ZIP_LZMA"])
def test_a_damaged_member_of_a_zip_is_one_unreadable_image(tmp_path, method):
    names = ["cat/1.png", "dog/1.png"]
    path = zipped(tmp_path / "d.zip", names, compression=getattr(zipfile, method))
    with zipfile.ZipFile(path) as archive:
        first, second = archive.infolist()
    data = bytearray(path.read_bytes())
    begins = first.header_offset + 30 + len(first.filename)
    for at in range(begins, begins + first.compress_size):
        data[at] ^= 0xFF
    path.write_bytes(data)
    source = open_source(path)
    by_name = {entry.name: entry for entry in source.listing().entries}
    with pytest.raises(DataError, match=r"cat/1\.png"):
        source.read(by_name["cat/1.png"])
    assert source.read(by_name["dog/1.png"])


def test_a_missing_path_and_a_file_that_is_no_zip_are_told_the_layout(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"no zip")
    for name, words in (("nowhere", "no folder or file"), ("x.zip", "not a readable zip")):
        with pytest.raises(DataError, match=words) as caught:
            open_source(tmp_path / name)
        assert "FOLDER/<class>/<image>" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("x.tar.gz", "unpack it (gunzip x.tar.gz)."),
        ("x.TGZ", "unpack it (gunzip x.TGZ)."),
        ("x.tar.zst", "unpack it (unzstd x.tar.zst)."),
        ("photo.JPG", "It is one image: give the folder of its class folders."),
    ],
)
def test_a_file_of_another_kind_comes_with_advice(tmp_path, name, advice):
    (tmp_path / name).write_bytes(b"no zip")
    with pytest.raises(DataError) as caught:
        open_source(tmp_path / name)
    assert advice in str(caught.value)


def test_loose_images_beside_classes_are_a_fault(tmp_path):
    listing = open_source(write(tmp_path, "cat/1.png", "2.png")).listing()
    assert [e.name for e in listing.entries] == ["cat/1.png"]
    assert listing.faults == ("1 images are in no class folder, such as '2.png'",)


@pytest.mark.parametrize("as_zip", [False, True])
def test_files_in_formats_that_are_not_read_are_counted_and_a_folder_of_them_is_named(
    tmp_path, as_zip
):
    names = [
        "cat/1.png", "cat/2.HEIC", "cat/3.avif", "cat/notes.txt", "cat/.4.heic", "dog/1.png",
        "dog/2.heic", "yak/1.heic", "yak/2.heic", "yak/x.json", "emu/notes.txt",
        "__MACOSX/yak/1.heic" if as_zip else ".old/1.heic",
    ]  # fmt: skip
    path = zipped(tmp_path / "d.zip", names) if as_zip else write(tmp_path / "d", *names)
    source = open_source(path)
    listing = source.listing()
    source.close()
    assert [e.name for e in listing.entries] == ["cat/1.png", "dog/1.png"]
    assert [fault.partition("; images are .bmp, .gif, .jpeg, ")[0] for fault in listing.faults] == [
        "folder 'yak' is left out: no image but files in formats that are not read (.heic)",
        "left out: 3 files beside the images in formats that are not read (.avif, .heic)",
    ]


def test_a_source_of_nothing_but_other_formats_says_so(tmp_path):
    words = (
        r"no images \(folder 'cat' is left out: no image but files in formats.*\.dng.*images are"
    )
    with pytest.raises(DataError, match=words):
        open_source(write(tmp_path, "cat/1.dng")).listing()


@pytest.mark.parametrize(
    "name", ["../cat/1.png", "/etc/cat/1.png", "c:/cat/1.png", "a\\..\\b/1.png"]
)
def test_zip_members_that_point_elsewhere_are_left_out(tmp_path, name):
    path = zipped(tmp_path / "d.zip", ["dog/1.png", name])
    listing = open_source(path).listing()
    assert [e.name for e in listing.entries] == ["dog/1.png"]
    assert "points outside the archive" in listing.faults[0]


def test_encrypted_zip_members_are_left_out(tmp_path):
    path = zipped(tmp_path / "d.zip", ["cat/1.png", "dog/1.png"])
    data = bytearray(path.read_bytes())
    second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    data[second + 8] |= 1  # the flag in the central directory
    path.write_bytes(data)
    listing = open_source(path).listing()
    assert [e.class_name for e in listing.entries] == ["cat"]
    assert listing.faults == ("zip member 'dog/1.png' is encrypted",)


def test_huge_files_are_left_out_of_folders_and_zips(tmp_path, monkeypatch):
    write(tmp_path / "f", "cat/1.png", "cat/2.png")
    (tmp_path / "f/cat/2.png").write_bytes(bytes(5000))
    with zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/1.png", png())
        archive.writestr("cat/2.png", bytes(5000))
    monkeypatch.setattr(image_source, "MAX_FILE_BYTES", 4000)
    for source in (open_source(tmp_path / "f"), open_source(tmp_path / "z.zip")):
        listing = source.listing()
        assert [e.name for e in listing.entries] == ["cat/1.png"]
        assert listing.faults == ("image 'cat/2.png' has 5000 bytes, more than 4000",)


def test_a_file_that_vanished_or_was_damaged_is_a_data_error_on_reading(tmp_path):
    folder = open_source(write(tmp_path / "f", "cat/1.png"))
    entry = next(folder.entries())
    (tmp_path / "f/cat/1.png").unlink()
    with pytest.raises(DataError, match=r"'cat/1.png' cannot be read \(No such file"):
        folder.read(entry)
    path = zipped(tmp_path / "z.zip", ["cat/1.png"])
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    archive = open_source(path)
    with pytest.raises(DataError, match="cannot be read"):
        archive.read(next(archive.entries()))
    archive.close()


def test_a_link_to_a_folder_above_ends_and_a_link_to_another_class_is_read(tmp_path):
    write(tmp_path, "cat/1.png")
    os.symlink(tmp_path, tmp_path / "cat/up")
    os.symlink(tmp_path / "cat", tmp_path / "tiger")
    names = [e.name for e in open_source(tmp_path).listing().entries]
    assert names == ["cat/1.png", "tiger/1.png"]


def tangled(root, count):
    """Make class folders of which each links to all others."""
    for i in range(count):
        write(root, f"k{i}/{i}.png")
    for i, j in itertools.permutations(range(count), 2):
        os.symlink(root / f"k{j}", root / f"k{i}" / f"to{j}")
    return root


@pytest.mark.parametrize("side", [".", "train"])
def test_class_folders_that_link_to_each_other_are_each_read_once_in_a_class(tmp_path, side):
    tangled(tmp_path / side, 12)
    listing = open_source(tmp_path).listing()
    assert len(listing.entries) == 12 * 12
    mine = [e.name.removeprefix("train/") for e in listing.entries if e.class_name == "k7"]
    assert sorted(mine) == sorted(["k7/7.png", *(f"k7/to{j}/{j}.png" for j in range(12) if j != 7)])
    passed = 12 * 11 * 11  # from each that a link led to, to all others
    (said,) = listing.faults
    assert said.startswith(f"{passed} folders are skipped, such as ")
    assert said.endswith(": links lead there a second time, or form a loop")


def test_of_a_folder_and_a_link_to_it_in_one_class_the_folder_is_read(tmp_path):
    write(tmp_path, "cat/z/1.png", "cat/y/deep/2.png")
    os.symlink(tmp_path / "cat/z", tmp_path / "cat/a")
    os.symlink(tmp_path / "cat/y", tmp_path / "cat/b")
    listing = open_source(tmp_path).listing()
    assert [e.name for e in listing.entries] == ["cat/y/deep/2.png", "cat/z/1.png"]
    assert listing.faults[0].startswith("2 folders are skipped, such as 'cat/a': ")


def test_no_more_links_are_followed_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_walk, "MAX_LINKS", 50)
    listing = open_source(tangled(tmp_path, 10)).listing()
    assert len(listing.entries) == 10 + 50


def test_folders_below_the_deepest_are_passed_over_with_a_sentence(tmp_path):
    deepest = "/".join(["cat", *"d" * (folder_walk.MAX_DEPTH - 1)])
    write(tmp_path, f"{deepest}/1.png", f"{deepest}/d/2.png", "dog/3.png")
    listing = open_source(tmp_path).listing()
    assert [e.name for e in listing.entries] == [f"{deepest}/1.png", "dog/3.png"]
    said = f"1 folders are skipped, such as '{deepest}/d': they are more than 32 folders deep"
    assert listing.faults == (said,)


def test_a_changed_file_has_another_stamp(tmp_path):
    source = open_source(write(tmp_path, "cat/1.png"))
    before = next(source.entries())
    os.utime(tmp_path / "cat/1.png", ns=(1, 1))
    after = next(source.entries())
    assert (before.size, before.name) == (after.size, after.name)
    assert before.stamp != after.stamp


def test_a_zip_whose_names_are_utf8_without_saying_so_reads_like_its_folder(tmp_path):
    """So does Linux's `zip -r`."""
    names = ["\N{LATIN CAPITAL LETTER U WITH DIAERESIS}bung/1.png", "\u65e5\u672c/2.png"]
    path = zipped(tmp_path / "data.zip", names)
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := data.find(mark, start + 1)) >= 0:
            data[start + at + 1] &= ~0x08  # the flag
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert not {i.flag_bits & 0x800 for i in archive.infolist()} - {0}
    source = open_source(path)
    entries = source.listing().entries
    assert {e.name for e in entries} == set(names)
    assert {e.name: source.read(e) for e in entries} == {n: png(i) for i, n in enumerate(names)}
    source.close()


def test_a_zip_with_names_of_an_old_code_page_keeps_them(tmp_path):
    path = zipped(tmp_path / "data.zip", ["x/1.png"])
    path.write_bytes(path.read_bytes().replace(b"x/1.png", b"\x9a/1.png"))
    source = open_source(path)
    (entry,) = source.listing().entries
    assert entry.class_name == "\N{LATIN CAPITAL LETTER U WITH DIAERESIS}"
    assert source.read(entry) == png(0)
    source.close()


def test_an_image_beside_the_classes_of_a_wrapped_zip_is_named_and_left_out(tmp_path):
    names = ["data/cat/1.png", "data/cat/2.png", "data/dog/3.png", "data/preview.png"]
    source = open_source(zipped(tmp_path / "data.zip", names))
    listing = source.listing()
    source.close()
    assert {e.class_name for e in listing.entries} == {"cat", "dog"}
    assert listing.faults == ("1 images are in no class folder, such as 'data/preview.png'",)
