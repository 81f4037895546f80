"""``fcil-server methods``: what it shows, its JSON, its options and its faults."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fcil_adapters.contract import registry
from fcil_adapters.contract.registry import load_method, method_names
from fcil_protocol.payloads.schema import Kind
from fcil_server.cli.main import app

FEDNCM = load_method("fedncm")


def ask(*arguments: str):
    result = CliRunner().invoke(app, ["methods", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(*arguments: str):
    return json.loads(ask(*arguments, "--json"))["data"]["methods"]


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["methods", *arguments])
    assert result.exit_code == 4, result.output
    assert result.stdout == ""
    return result.stderr


def test_without_a_name_every_method_has_a_line_and_its_paper():
    text = ask()
    for name in method_names():
        assert any(line.startswith(f"{name} ") for line in text.splitlines()), name
        # The papers come first, so that the end of a long output is the table.
        assert f"\n{text}".index(f"\n{name}: ") < f"\n{text}".index(f"\n{name} ")
    assert "https://arxiv.org/abs/2401.02094" in text
    assert "vit_nano_patch4_32 (width 128)" in text
    assert "fcil-server methods NAME" in text
    (line,) = [x for x in text.splitlines() if x.startswith("running_mean ")]
    # 10 x 64 floats, 11 int64 up; 20 int64 down
    assert line.split() == [
        "running_mean",
        "yes",
        "prototype,",
        "count",
        "2.65",
        "kB",
        "2.72",
        "kB",
    ]
    (line,) = [x for x in text.splitlines() if x.startswith("hepco ")]
    assert line.split()[1] == "no"  # its server distils single clients' models


def test_a_method_that_cannot_be_imported_hides_no_other(monkeypatch):
    monkeypatch.setattr(registry, "method_names", lambda: ["absent", "fedncm"])
    result = CliRunner().invoke(app, ["methods", "--json"])
    assert [row["name"] for row in json.loads(result.stdout)["data"]["methods"]] == ["fedncm"]
    assert "left out: no installed package offers the method 'absent'" in result.stderr


def _dims_of_some(options, backbone, task):
    """Fail for options other than the defaults, as a mistake in a branch does."""
    if options.metric == "euclidean":
        return {"c": len(task.clases)}
    return FEDNCM.dims(options, backbone, task)


def test_a_mistake_in_a_manifest_is_the_methods_and_hides_no_other(monkeypatch):
    wrong = replace(FEDNCM, learner=f"{FEDNCM.learner}s")
    monkeypatch.setattr(registry, "load_method", {"fedncm": FEDNCM, "wrong": wrong}.__getitem__)
    monkeypatch.setattr(registry, "method_names", lambda: ["wrong", "fedncm"])
    assert "the manifest of the method 'fedncm' is wrong: learner: " in refused("wrong")
    result = CliRunner().invoke(app, ["methods", "--json"])
    assert [row["name"] for row in json.loads(result.stdout)["data"]["methods"]] == ["fedncm"]
    assert "left out: the manifest of the method 'fedncm' is wrong" in result.stderr


def test_a_mistake_that_options_lead_to_is_the_methods(monkeypatch):
    mistaken = replace(FEDNCM, dims=_dims_of_some)
    monkeypatch.setattr(registry, "load_method", lambda _name: mistaken)
    assert ask("fedncm")
    said = " ".join(refused("fedncm", "-c", "method.metric=euclidean").split())
    assert "error [config_invalid]: the manifest of the method 'fedncm' fails with Attr" in said
    assert "test_methods_command.py" in said


def test_a_name_shows_exchanges_parts_totals_presets_and_options():
    text = ask("plora", "--backbone", "vit_base_patch16_224.dino", "--past", "20")
    assert "https://arxiv.org/abs/2401.02094v1" in text
    lines = {tuple(line.split()[:2]): line for line in text.splitlines() if line.strip()}
    assert "<= 169,208" in lines["up", "train"]
    assert "5 rounds a task" in lines["up", "train"]
    # Half precision, but for the 10 class means that are up to half of the prototypes' numbers.
    assert "lora 122,880, prototype 46,080, count 248" in lines["up", "train"]
    assert "1 round a task" in lines["up", "prepare"]
    assert "once a task" in lines["down", "current"]
    assert "each round, kept after its task" in lines["down", "task"]
    assert "each training round" in lines["down", "lora"]
    assert "<=" not in lines["down", "lora"]
    assert "a client that joins in this task fetches 153,920 more" in text
    assert "reweight.temperature = mul" in lines["preset", "paper:"]
    assert any(line.startswith("reweight.owners_only ") for line in text.splitlines())


def test_a_part_that_comes_once_or_takes_the_place_of_others_says_so():
    text = ask("fed_talora", "--backbone", "vit_base_patch16_224")
    assert "every 16 rounds, in place of the log" in text
    assert "one more each round" in text
    frozen = ask("fed_talora", "-c", "method.freeze_a=true")
    (line,) = [x for x in frozen.splitlines() if x.startswith("down  fixed")]
    assert line.split()[2] == "once"


def test_json_is_complete_with_and_without_a_name():
    every = {row["name"]: row for row in rows()}
    assert sorted(every) == method_names()
    for name, row in every.items():
        assert rows(name) == [row]
    row = every["pilora"]
    assert row["citation"].startswith("H. Guo")
    assert row["presets"]["paper"]["reweight.distance"] == "squared"
    assert row["options"]["reweight.eta"]["default"] == 0.2
    assert row["options"]["reweight.eta"]["help"]
    assert row["setting"]["backbone"] == "vit_nano_patch4_32"
    assert [up["exchange"] for up in row["traffic"]["up"]] == ["prepare", "train", "evaluate"]
    assert [down["cadence"] for down in row["traffic"]["down"]] == ["opening", "own"]
    assert every["running_mean"]["setting"]["backbone"] is None


def test_jsonl_has_a_line_per_method():
    lines = ask("--format", "jsonl").splitlines()
    assert [json.loads(line)["name"] for line in lines] == method_names()


def test_options_change_the_figures_and_show_beside_their_defaults():
    assert "4 (here 8)" in ask("pilora", "-c", "method.rank=8")
    (plain,), (wide,) = rows("pilora"), rows("pilora", "-c", "method.rank=8")
    lora = [row["traffic"]["round"]["up"]["kinds"]["lora"] for row in (plain, wide)]
    assert lora == [4096, 8192]  # A and B of q and v: 4 x 4 x 128 halves
    (full,) = rows("pilora", "-c", "wire.half=none")
    assert full["traffic"]["round"]["up"]["kinds"]["lora"] == 8192
    assert (
        full["traffic"]["round"]["up"]["kinds"]["count"]
        == (plain["traffic"]["round"]["up"]["kinds"]["count"])
    )


def test_of_kinds_that_only_some_methods_have_each_takes_its_own():
    every = {row["name"]: row for row in rows("-c", 'wire.half=["lora"]')}
    plain = {row["name"]: row for row in rows("-c", "wire.half=none")}
    smaller = {
        n for n, row in every.items()
        if row["traffic"]["task"]["up"]["bytes"] < plain[n]["traffic"]["task"]["up"]["bytes"]
    }  # fmt: skip
    assert {"pilora", "fed_talora", "ffa_lora"} <= smaller
    assert smaller == {n for n in method_names() if Kind.LORA in load_method(n).half}
    (preset,) = rows("pilora", "-c", "method.preset=paper")
    assert preset["options"]["reweight.temperature"]["value"] == "mul"
    assert preset["options"]["reweight.temperature"]["default"] == "div"


def test_classes_clients_and_rounds_can_be_chosen():
    (row,) = rows(
        "fed_talora", "--classes", "3", "--past", "6", "--clients", "4",
        "-c", "round.rounds_per_task=7",
    )  # fmt: skip
    setting = row["setting"]
    assert [setting[k] for k in ("classes", "past", "clients", "rounds")] == [3, 6, 4, 7]
    assert row["traffic"]["up"][0]["kinds"]["head"] == 3 * (128 + 1) * 2
    residual = next(d for d in row["traffic"]["down"] if d["part"] == "residual")
    sides = 4 * (2 * (128 + 128) + 2 * (128 + 512))  # four blocks of q, v, fc1, fc2
    assert residual["bytes"] == (4 - 1) * 4 * sides * 4  # (K - 1) r rows and columns, float32


def test_a_federation_gives_the_defaults_of_its_own_method(tmp_path):
    (tmp_path / "federation.toml").write_text(
        '[run]\nbackbone = "vit_tiny_patch16_224"\nevaluate = false\n'
        '[method]\nname = "pilora"\nrank = 2\nreweight = { eta = 0.5 }\n'
        "[round]\nrounds_per_task = 9\n"
    )
    where = ("--dir", str(tmp_path))
    (own,) = rows("pilora", *where, "-c", "method.reweight.min_count=3")
    values = {name: option["value"] for name, option in own["options"].items()}
    assert [values[k] for k in ("rank", "reweight.eta", "reweight.min_count")] == [2, 0.5, 3]
    assert own["setting"]["backbone"] == "vit_tiny_patch16_224"
    assert [up["rounds"] for up in own["traffic"]["up"]] == [1, 9]
    (other,) = rows("plora", *where, "--backbone", "embedded")
    assert other["options"]["rank"]["value"] == 4
    assert other["setting"]["dim"] == 128
    assert {r["name"]: r for r in rows(*where)}["pilora"]["options"]["rank"]["value"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pilroa",), "Did you mean 'pilora'?"),
        (("pilora", "--backbone", "resnet50"), "'embedded' and names such as vit_base"),
        (("-c", "method.rank=8"), "but no method"),
        (("pilora", "-c", "method.rnk=8"), "did you mean 'rank'?"),
        (("pilora", "-c", "method.blocks=[6]"), "has the blocks 0 to 5"),
        (("pilora", "-c", "method.preset=none"), "it has: paper, repo, short"),
    ],
    ids=str,
)
def test_what_does_not_fit_gets_one_sentence(arguments, words):
    error = refused(*arguments)
    assert words in error
    assert "Traceback" not in error


def test_it_needs_no_torch():
    program = (
        "import sys\n"
        "from fcil_server.reports.traffic.method_list import describe_methods\n"
        "from fcil_server.cli.show_methods import show_methods\n"
        "rows = describe_methods(None, backbone='vit_large_patch16_224', past=20)\n"
        "show_methods(rows)\n"
        "assert not {'torch', 'timm', 'torchvision'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "vit_large_patch16_224 (width 1024)" in done.stdout
