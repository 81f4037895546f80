"""A CSV of paths and labels is a source like a folder; what a line cannot mean is said with it."""

import os

import pytest

from adapters.picture_kit import png
from fcil_adapters.images.decoding import open_source
from fcil_adapters.images.list_source import ListSource
from fcil_adapters.images.sources import LooseSource
from fcil_protocol.errors import DataError


def listed(root, text, *names, file="list.csv"):
    for seed, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(seed))
    path = root / file
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return open_source(path)


def found(listing):
    return [(e.name, e.class_name, e.part) for e in listing.entries]


def test_a_list_names_images_by_path_with_their_labels(tmp_path):
    source = listed(tmp_path, "path,label\nb/2.png,dog\n./a.png,cat\n", "a.png", "b/2.png")
    assert isinstance(source, ListSource)
    listing = source.listing()
    assert found(listing) == [("a.png", "cat", None), ("b/2.png", "dog", None)]
    assert listing.faults == ()
    assert [source.read(e) for e in listing.entries] == [png(0), png(1)]
    assert all(source.unchanged(e) for e in listing.entries)


def test_columns_have_any_order_and_further_ones_are_ignored(tmp_path):
    text = '\ufeffid,Split, label ,path\r\n1,test,"a ""b""","x, y.png"\r\n\r\n2,train,c,z.png\r\n'
    listing = listed(tmp_path, text, "x, y.png", "z.png").listing()
    assert found(listing) == [("x, y.png", 'a "b"', "test"), ("z.png", "c", "train")]


def test_a_file_that_changed_is_noticed_and_one_that_is_gone_is_an_error(tmp_path):
    source = listed(tmp_path, "path,label\na.png,cat\nb.png,dog\n", "a.png", "b.png")
    first, second = source.listing().entries
    os.utime(tmp_path / "a.png", ns=(1, 1))
    (tmp_path / "b.png").unlink()
    assert not source.unchanged(first)
    with pytest.raises(DataError, match=r"'b.png' cannot be read \(No such file"):
        source.read(second)


def test_an_absolute_path_is_taken_where_it_is_written_and_no_other_leads_out(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "out.png").write_bytes(png())
    text = f"path,label\n{tmp_path}/out.png,cat\n../out.png,cat\na/../../out.png,cat\n"
    source = listed(inside, text)
    listing = source.listing()
    assert found(listing) == [(f"{tmp_path}/out.png", "cat", None)]
    assert source.read(listing.entries[0]) == png()
    (said,) = listing.faults
    assert said.startswith("line 3 of list.csv and 1 more are left out: its path leads out of the ")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("gone.png,cat,train", "its image cannot be read (No such file or directory)"),
        ("a\0.png,cat,train", "its image cannot be read (embedded null byte)"),
        (" ,cat,train", "its path is empty"),
        (".,cat,train", "its path is empty"),
        ("folder,cat,train", "its path is no file"),
        ("a.png,cat,val", "its split is 'val', neither train nor test"),
        ("ok.png,dog,train", "an earlier line has its path"),
        ("./ok.png,cat,train", "an earlier line has its path with another label"),
    ],
)
def test_a_line_that_names_no_image_is_left_out_with_its_number(tmp_path, row, reason):
    (tmp_path / "folder").mkdir()
    listing = listed(
        tmp_path, f"path,label,split\nok.png,dog,test\n{row}\n", "ok.png", "a.png"
    ).listing()
    assert found(listing) == [("ok.png", "dog", "test")]
    assert listing.faults == (f"line 3 of list.csv is left out: {reason}",)


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        ("", "a class name must be non-empty"),
        ("../x", "a class name must be one for a folder"),
        ("..", "a class name must be one for a folder"),
        (".git", "a class name must be one for a folder"),
        ("OK", "it names the same class as 'ok'; write both alike"),
    ],
)
def test_lines_whose_label_is_no_class_are_left_out_with_number_and_count(tmp_path, label, fault):
    text = f"path,label\na.png,ok\nb.png,{label}\nc.png,{label}\n"
    listing = listed(tmp_path, text, "a.png", "b.png", "c.png").listing()
    assert found(listing) == [("a.png", "ok", None)]
    (said,) = listing.faults
    lines, why = "line 3 of list.csv and 1 more are", f"its label {label!r} cannot be used: {fault}"
    assert said.startswith(f"{lines} left out: {why}")


def test_a_second_spelling_is_left_out_on_both_sides(tmp_path):
    text = "path,label,split\na.png,ok,train\nb.png,OK,train\nc.png,OK,test\nd.png,ok,test\n"
    listing = listed(tmp_path, text, "a.png", "b.png", "c.png", "d.png").listing()
    assert found(listing) == [("a.png", "ok", "train"), ("d.png", "ok", "test")]
    (said,) = listing.faults
    assert said.startswith("line 3 of list.csv and 1 more are left out: its label 'OK' cannot be ")


def test_the_spelling_of_the_training_images_counts(tmp_path):
    text = "path,label,split\na.png,ok,test\nb.png,OK,train\nc.png,OK,train\n"
    listing = listed(tmp_path, text, "a.png", "b.png", "c.png").listing()
    assert found(listing) == [("b.png", "OK", "train"), ("c.png", "OK", "train")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1 must name the columns path and label once"),
        ("a.png,cat\n", "line 1 must name the columns path and label once.*got 'a.png,cat"),
        ("path,label,path\n", "line 1 must name"),
        ("path,label\na.png\n", "line 2 must have 2 fields, as the header has; got 1"),
        ("path,label\na.png,cat\nb, c.png,dog\n", "line 3 must have 2 fields.*got 3"),
        ('path,label\n"a.png,cat\n', "line 2 cannot be read as CSV"),
        (b"path,label\na.png,cat\n\xff.png,dog\n", "line 3 is not text in UTF-8"),
        ("path,label\n", "holds no images with labels"),
        ("path,label\nx.png,cat\n", "holds no images with labels.*line 2 of list.csv is left out"),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error_with_its_line(tmp_path, text, words):
    with pytest.raises(DataError, match=words):
        listed(tmp_path, text, "a.png").listing()


def test_a_list_is_bounded_and_so_are_its_images(tmp_path, monkeypatch):
    source = listed(tmp_path, "path,label\na.png,cat\nb.png,cat\n", "a.png", "b.png")
    (tmp_path / "b.png").write_bytes(bytes(5000))
    monkeypatch.setattr("fcil_adapters.images.image_source.MAX_FILE_BYTES", 4000)
    listing = source.listing()
    assert [e.name for e in listing.entries] == ["a.png"]
    assert listing.faults == ("image 'b.png' has 5000 bytes, more than 4000",)
    monkeypatch.setattr("fcil_adapters.images.list_source.MAX_LIST_BYTES", 10)
    with pytest.raises(DataError, match="more than 0 MiB"):
        source.listing()


def test_the_lists_of_hugging_face_have_the_column_file_name(tmp_path):
    text = "file_name,text,label\n1.png,a cat,cat\nb/2.png,,7\n"
    listing = listed(tmp_path, text, "1.png", "b/2.png", file="metadata.csv").listing()
    assert found(listing) == [("1.png", "cat", None), ("b/2.png", "7", None)]
    own = "path,label,file_name\n1.png,cat,b/2.png\n"  # a column that is ignored
    assert found(listed(tmp_path, own).listing()) == [("1.png", "cat", None)]


def test_json_lines_are_a_list(tmp_path):
    text = (
        '{"file_name": "1.png", "label": "cat\u2028", "x": [1]}\r\n\n{"label": 7, "path": "b/2.png", '
        '"split": "test"}\n{"path": "b/2.png", "label": 7}\n{"path": "3.png", "label": null}'
    )
    source = listed(tmp_path, text, "1.png", "b/2.png", "3.png", file="metadata.jsonl")
    listing = source.listing()
    assert source.form == "JSON list"
    assert found(listing) == [("1.png", "cat", None), ("b/2.png", "7", "test")]
    assert [fault.partition(":")[0] for fault in listing.faults] == [
        "line 4 of metadata.jsonl is left out",
        "line 5 of metadata.jsonl is left out",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"path": ', "line 2 cannot be read as JSON"),
        ("[" * 100_000, "line 2 cannot be read as JSON"),
        ("7", "line 2 must be an object with path .* got '7'"),
        ('{"path": "a.png"}', "line 2 must be an object with path"),
        ('{"label": "cat"}', "line 2 must be an object with path"),
    ],
)
def test_json_lines_that_cannot_be_read_are_an_error_with_their_line(tmp_path, line, words):
    text = f'{{"path": "a.png", "label": "cat"}}\n{line}\n'
    with pytest.raises(DataError, match=words):
        listed(tmp_path, text, "a.png", file="list.jsonl").listing()


def test_a_folder_names_the_lists_of_labels_that_it_does_not_read(tmp_path):
    folder = tmp_path / "data"
    listed(folder / "cat", "file_name,text\n1.png,a cat\n", "1.png", file="metadata.csv")
    assert open_source(folder).listing().faults == ()  # captions
    for number, first in enumerate(["file_name,labels", "file_name,a label", "file_name;label"]):
        listed(folder / f"bird{number}", f"{first}\n1.png,x\n", "1.png", file="metadata.csv")
    text = '{"file_name": "1.png", "text": "the label of a jar"}\n'
    listed(folder / "jar", text, "1.png", file="metadata.jsonl")
    assert open_source(folder).listing().faults == ()  # no column of labels
    assert LooseSource(folder).listing().faults == ()
    listed(folder / "dog", "label,file_name\nx,2.png\n", "2.png", file="metadata.csv")
    listed(folder / "owl", '{"file_name": "3.png", "label": 1}', "3.png", file="metadata.jsonl")
    assert LooseSource(folder).listing().faults == ()  # no folder of it is a class
    (said,) = open_source(folder).listing().faults
    assert said.startswith("list 'dog/metadata.csv' and 1 more are left out: in a folder, the ")
    flat = tmp_path / "flat"
    listed(flat, "file_name,label\n1.png,cat\n", "1.png", file="metadata.csv")
    with pytest.raises(
        DataError, match=r"holds 1 images in no class folder \(list 'metadata.csv' is"
    ):
        open_source(flat).listing()
