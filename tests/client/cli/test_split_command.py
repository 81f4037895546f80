"""`fcil-client split` says what it did, as text, JSON and a picture, and refuses in a sentence."""

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from adapters.worker_kit import fill
from client.partition_kit import listing
from fcil_client.cli.main import app
from fcil_client.data.partition_file import load
from fcil_client.data.partition_make import Request, make
from fcil_client.data.partition_picture import Box, Word, draw, png, svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for number, cls in enumerate(("ant", "bee", "cat", "dog")):
        fill(root, "train", cls, range(100 * number, 100 * number + 6))
        fill(root, "test", cls, range(100 * number + 50, 100 * number + 52))
    return root


@pytest.fixture
def split(data, tmp_path, monkeypatch):
    """Run the command in an empty folder; the data is given."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        return CliRunner().invoke(app, ["split", "--data", str(data), *map(str, words)])

    return run


def test_it_shows_a_table_of_clients_and_tasks_and_how_to_join(split, data):
    result = split("--clients", 2, "--tasks", 2, "--alpha", 2, "--order", "natural")
    assert result.exit_code == 0, result.output
    assert "quantity (alpha = 2): 2 clients, 2 tasks of 2 classes, order natural" in result.stdout
    assert "24 train images" in result.stdout
    assert "8 test images, divided evenly" in result.stdout
    table = [line.split() for line in result.stdout.split("\n\n")[1].splitlines()]
    assert table == [
        ["slot", "classes", "train", "test", "t0", "t1"],
        ["0", "4", "12", "4", "6", "6"],
        ["1", "4", "12", "4", "6", "6"],
    ]
    assert (
        "A client has 12 train images (median 12) of 4 classes; a class is held by 2"
        in result.stdout
    )
    assert f"join --data {data} --partition partition.json --slot K" in result.stderr
    assert "fcil-server serve --partition partition.json   # --until-done" in result.stderr
    assert f"swarm --data {data} --partition partition.json " in result.stderr
    assert load_here("partition.json").clients == 2


def load_here(name):
    return load(Path(name))


def test_its_json_holds_the_whole_table_and_the_files_digest(split):
    words = ("--clients", 3, "--partition", "dirichlet", "--beta", 5, "--tasks", 2, "--seed", 4)
    out = json.loads(split(*words, "--out", "d.json", "--json").stdout)["data"]
    made = load_here("d.json")
    assert out["digest"] == made.digest
    assert out["parameters"] == made.parameters
    assert [row["train"] for row in out["holdings"]] == [len(made.train(k)) for k in range(3)]
    assert [sum(row["tasks"]) for row in out["holdings"]] == [len(made.train(k)) for k in range(3)]
    assert [row["classes"] for row in out["holdings"]] == [len(made.counts(k)) for k in range(3)]
    rows = split(*words, "--out", "d.json", "--format", "jsonl").stdout.splitlines()
    assert [json.loads(row) for row in rows] == out["holdings"]


def test_many_clients_are_shown_in_part(split):
    text = split("--clients", 24, "--tasks", 1, "--partition", "iid").stdout
    assert "more (--format json has all)" not in text
    text = split("--clients", 25, "--tasks", 1, "--partition", "iid", "--min-images", 0,
                 "--out", "m.json").stdout  # fmt: skip
    assert "... and 5 more (--format json has all)" in text


def test_a_file_may_list_the_classes_in_their_order(split, tmp_path):
    (tmp_path / "order.txt").write_text("dog\n\nant \n")
    split("--clients", 2, "--tasks", 2, "--alpha", 1, "--order", "order.txt")
    assert load_here("partition.json").tasks == (("dog",), ("ant",))


def test_again_it_writes_the_same_file_and_never_over_another_one(split, tmp_path):
    words = ("--clients", 2, "--tasks", 2)
    split(*words)
    first = (tmp_path / "partition.json").read_bytes()
    assert split(*words).exit_code == 0
    assert (tmp_path / "partition.json").read_bytes() == first
    other = split(*words, "--seed", 1)
    assert other.exit_code == 4
    assert "partition.json already holds another partition" in other.stderr
    (tmp_path / "half.json").write_bytes(first[:100])
    (tmp_path / "folder").mkdir()
    for there in ("half.json", "folder"):
        refused = split(*words, "--out", there)
        assert refused.exit_code == 4
        assert f"{there} already exists and is not a complete partition" in refused.stderr
    assert (tmp_path / "partition.json").read_bytes() == first


def test_folders_of_clients_are_not_written_into_the_data_which_would_become_another(split, data):
    refused = split("--clients", 2, "--tasks", 2, "--export", data / "train" / "new")
    assert refused.exit_code == 4
    assert "is inside the data" in refused.stderr
    assert not (data / "train" / "new").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--alpha", 3], "cannot hold alpha = 3 classes of task 0, which has 2"),
        (["--partition", "iid", "--alpha", 2], "--alpha is for --partition quantity, and this one"),
        (["--balance"], "--balance is for --partition dirichlet, and this one is quantity"),
        (
            ["--partition", "hepco", "--min-images", 2],
            "--min-images is for --partition quantity or",
        ),
        (["--order", "sideways"], "unknown class order 'sideways'"),
        (["--picture", "who.jpg"], "a picture is a .svg or .png file, got 'who.jpg'"),
        (["--export", "."], "already exists and is not empty"),
        (["--data", "nowhere"], "there is no folder or file nowhere"),
    ],
)
def test_what_is_not_possible_is_said_in_a_sentence_and_writes_nothing(
    words, sentence, split, tmp_path
):
    (tmp_path / "there.txt").write_text("")
    result = split("--clients", 2, "--tasks", 2, *words)
    assert result.exit_code == 4
    assert sentence in " ".join(result.stderr.split())
    assert [p.name for p in tmp_path.iterdir()] == ["there.txt"]


def test_export_and_picture_are_written_beside_the_file(split, tmp_path):
    words = ("--clients", 2, "--tasks", 2, "--picture", "who.svg", "--export", "clients")
    assert split(*words).exit_code == 0
    assert ET.parse(tmp_path / "who.svg").getroot().tag == f"{SVG}svg"
    assert len(list((tmp_path / "clients").glob("client-*/train/*/*.png"))) == 24
    assert len(list((tmp_path / "clients").glob("client-*/test/*/*.png"))) == 8


# --- picture -------------------------------------------------------------------------------


def picture(clients=4, classes=6, tasks=2, **fields):
    return make(
        listing(classes, 40), Request(**{"clients": clients, "tasks": tasks, "alpha": 2, **fields})
    )


def test_a_picture_has_a_cell_for_each_client_and_class_with_its_number():
    one = picture()
    shapes = draw(one).shapes
    assert sum(isinstance(s, Box) for s in shapes) == 4 * 6
    words = [s.text for s in shapes if isinstance(s, Word)]
    for slot in range(4):
        for n in one.counts(slot).values():
            assert str(n) in words
            words.remove(str(n))
    assert [w for w in words if w.startswith("task ")] == ["task 0", "task 1"]
    assert set(one.tasks[0]) < set(words)


def test_more_images_are_a_darker_cell_and_none_is_an_empty_one():
    one = picture(kind="dirichlet", beta=0.3, seed=2)
    fills = {}
    boxes = iter([s for s in draw(one).shapes if isinstance(s, Box)])
    for task in one.tasks:
        for slot in range(4):
            for name in task:
                fills.setdefault(one.counts(slot).get(name, 0), next(boxes).fill)
    by_count = [sum(fills[n]) for n in sorted(fills) if n]
    assert by_count == sorted(by_count, reverse=True)
    assert sum(fills[0]) > by_count[0]


def test_svg_and_png_show_the_same_and_names_cannot_break_out_of_the_svg():
    names = ["<script>", "a&b", '"q"', "d"]
    one = make(listing(names, 9), Request(clients=3, tasks=2, kind="iid"))
    drawn = draw(one)
    tree = ET.fromstring(svg(drawn))
    assert {"<script>", "a&b", '"q"'} < {node.text for node in tree.iter(f"{SVG}text")}
    assert not list(tree.iter(f"{SVG}script"))
    image = Image.open(io.BytesIO(png(drawn)))
    assert image.size == (round(drawn.width * 2), round(drawn.height * 2))
    box = next(s for s in drawn.shapes if isinstance(s, Box))
    assert image.getpixel((round(box.x * 2) + 1, round(box.y * 2) + 1)) == box.fill


def test_everything_is_inside_the_picture_also_with_a_thousand_clients():
    for one in (picture(), picture(clients=1000, classes=4, kind="iid", min_images=0)):
        drawn = draw(one)
        assert drawn.height < 1400 or one.clients < 1000
        for shape in drawn.shapes:
            assert 0 <= shape.x <= drawn.width
            assert 0 <= shape.y <= drawn.height
            if isinstance(shape, Box):
                assert shape.x + shape.width <= drawn.width
                assert shape.y + shape.height <= drawn.height
