"""``fcil-server export``: which state it takes, and what it says when it cannot."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from adapters.kit import Federation as Method
from adapters.kit import Images, make_tasks, needs_peft, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_fields
from fcil_adapters.contract.registry import schema_digest
from fcil_adapters.export.exported_model import ExportedModel
from fcil_adapters.export.folder import CARD
from fcil_adapters.export.statistics_file import read_statistics
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId, UpdateId, new_run_id
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.cli.export import show_exported
from fcil_server.cli.main import app
from fcil_server.federation.config import load, to_toml
from fcil_server.federation.directory import Federation
from fcil_server.ledger.enums import OPENING
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.rounds.classes import ClassRegistry
from server.storage_kit import flip

ALICE = ClientId("a" * 26)
NAMES = (("ant", "bee"), ("cat",))
TASKS = make_tasks([0, 1], [2])


@dataclass
class Built:
    directory: Path
    run: RunId
    method: Method

    def state(self, number: int) -> Path:
        return states_folder(self.directory, self.run) / f"{number:06d}.safetensors"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Two tasks of running_mean, as a stopped server leaves them: states 0 to 3."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "federation"
    settings = ("method.name=running_mean",)
    federation = Federation.open(directory, None, settings)
    try:
        method = Method.of("running_mean", [toy_images({0: 4, 1: 3, 2: 5})], toy_backbone())
        ledger, run = federation.ledger, new_run_id()
        ledger.runs.add(
            run,
            method="running_mean",
            method_version=method.method.version,
            config=to_toml(load(None, settings)),
            hparams=method.hparams.model_dump(mode="json"),
            backbone=backbone_fields(NO_BACKBONE),
            schema_digest=schema_digest(method.method, method.hparams, NO_BACKBONE),
            seed=1,
        )
        ledger.clients.add(ALICE, "alice", curve=b"c" * 32, signing=b"s" * 32, sealing=b"x" * 1216)
        classes = ClassRegistry(ledger, run)
        states = StateStore(states_folder(directory, run))
        digests: list[Digest] = []
        for task, names in zip(TASKS, NAMES, strict=True):
            classes.announce(ALICE, names)
            assert classes.open_task(task.index) == task
            for kind in (OPENING, "train"):
                method.open(task) if kind == OPENING else method.round()
                number, parent = len(digests), digests[-1] if digests else None
                digests.append(states.save(number, method.state, parent, task.index))
                key = RoundKey(run, task.index, kind, 0)
                ledger.states.add(key, number, digests[-1], parent)
        return Built(directory, run, method)
    finally:
        federation.close()


def export(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def test_the_newest_state_is_exported_with_its_names(built: Built) -> None:
    done = export("--onnx", "model.onnx", "--json")
    data = json.loads(done.stdout)["data"]
    assert (data["task"], data["state"], data["names"]) == (1, 3, ["ant", "bee", "cat"])
    assert data["bytes"] == Path("model.onnx").stat().st_size
    assert "comparing it with the torch model on 4 images" in done.stderr
    model = ExportedModel.load(Path("model.onnx"))
    assert (model.info.run, model.info.method) == (built.run, "running_mean")
    images = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)
    model_here = built.method.model
    ctx = built.method.context("evaluate")
    fields = {**vars(ctx), "backbone_info": NO_BACKBONE}
    right = model_here.compose(type(ctx)(**fields), built.method.parts(), None).logits(images)
    np.testing.assert_allclose(model.logits(images), right, atol=1e-4)


@pytest.mark.full
def test_an_earlier_task_and_a_state_by_number(built: Built) -> None:
    said = export("--onnx", "first.onnx", "--task", "0").stdout
    assert f"running_mean 1, run {built.run}, state 1, of task 0: 2 classes" in said
    assert ExportedModel.load(Path("first.onnx")).info.names == ("ant", "bee")
    assert "state 2, of task 1: 2 classes" in export("--onnx", "s.onnx", "--state", "2").stdout


def evaluated(built: Built, **right: int) -> None:
    """Record that states of task 1 got so many of ten test images right."""
    with Ledger(built.directory / LEDGER_NAME) as ledger:
        for round_, (state, correct) in enumerate(right.items()):
            key = RoundKey(built.run, 1, "train", round_)
            ledger.rounds.open(key, asked=(ALICE,), base_state=1)
            tested = {"test_correct": correct, "test_total": 10}
            number = int(state.removeprefix("s"))
            ledger.rounds.close(key, "done", new_state=number, metrics=tested)


def test_the_best_and_the_last_state_are_exported_by_name(built: Built) -> None:
    evaluated(built, s2=9, s3=7)
    best = json.loads(export("--statistics", "b", "--state", "best", "--json").stdout)["data"]
    last = json.loads(export("--statistics", "l", "--state", "last", "--json").stdout)["data"]
    assert (best["state"], last["state"]) == (2, 3)
    evaluated_again = json.loads(export("--statistics", "n", "--state", "3", "--json").stdout)
    assert evaluated_again["data"]["state"] == 3


def test_a_best_state_whose_file_was_removed_is_named(built: Built) -> None:
    evaluated(built, s2=9)
    for path in built.state(2).parent.glob("000002.*"):
        path.unlink()
    said = export("--onnx", "m.onnx", "--state", "best", code=4).stderr
    assert "has no file of state 2; kept are the states 0 (task 0), 1 (task 0), 3" in said


def test_statistics_are_written_with_the_names_of_classes(built: Built) -> None:
    said = export("--statistics", "s.safetensors").stdout
    assert f"running_mean 1, run {built.run}, state 3, of task 1: 3 classes of 64 " in said
    info, tensors = read_statistics(Path("s.safetensors"))
    assert (info.names, info.source, info.features) == (("ant", "bee", "cat"), "means", "pixels")
    assert tensors["count"].tolist() == [4, 3, 5]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--task", "2"], 4, "has no file of task 2; kept are the states 0 (task 0), 1 (task 0)"),
        (["--state", "9"], 4, "has no file of state 9; kept are"),
        (["--state", "best"], 4, "is tested, so there is no best one"),
        (["--state", "first"], 4, "unknown state 'first'; expected best, last or a number"),
        (["--state", "-1"], 4, "unknown state '-1'; expected best, last or a number"),
        (["--state", "\u0663"], 4, "expected best, last or a number"),
        (["--state", "1", "--task", "0"], 4, "expected --task or --state, not both"),
        (["--state", "0"], 4, "the model knows no class yet"),
        (["--run", "rx"], 4, "no run's id begins with 'rx'"),
        (["--precision", "int8"], 4, "expected at least 16, got 0"),
        (["--precision", "fp8"], 4, "unknown precision 'fp8'"),
        (["--opset", "7"], 4, "opset 7 is not possible"),
        (["--calibrate", "none"], 4, "there is no folder none"),
        (["--dir", "none"], 1, "none holds no federation"),
        (["-c", "run.device=cuda"], 4, "'run.device' cannot be set for an export"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    built: Built, arguments: list[str], code: int, said: str
) -> None:
    done = export("--onnx", "model.onnx", *arguments, code=code)
    assert said in done.stderr
    assert not Path("model.onnx").exists()


def test_a_place_that_is_no_file_is_refused_before_any_work(built: Built) -> None:
    Path("link.onnx").symlink_to(os.devnull)
    os.mkfifo("pipe.onnx")
    for place in ("no/model.onnx", ".", "m" * 300, "link.onnx", "pipe.onnx"):
        assert "expected a file in a folder that exists" in export("--onnx", place, code=4).stderr


def test_a_damaged_state_is_named(built: Built) -> None:
    flip(built.state(3))
    assert "000003.safetensors" in export("--onnx", "model.onnx", code=1).stderr


def test_a_run_of_another_version_of_the_method_is_refused(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcil_adapters.contract import registry

    newer = type(built.method.method)(**{**vars(built.method.method), "version": "2"})
    monkeypatch.setattr(registry, "load_method", lambda _: newer)
    done = export("--onnx", "model.onnx", code=1)
    assert "was started with running_mean 1" in done.stderr
    assert "Export it with the fcil that began it" in done.stderr


def test_a_run_from_before_an_option_that_changes_no_state_is_exported(built: Built) -> None:
    with Ledger(built.directory / LEDGER_NAME) as ledger, ledger.transaction():
        ledger.database.execute("UPDATE runs SET schema_digest = ?", ("e" * 64,))
    export("--onnx", "model.onnx")
    assert ExportedModel.load(Path("model.onnx")).info.run == built.run


@pytest.mark.parametrize(("agreement", "said"), [(0.0, False), (0.9, True)])
def test_a_limit_that_is_none_is_not_told(
    agreement: float, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"x")
    checked = SimpleNamespace(images=4, provider="CPU", error=1e-6, agreement=1.0)
    info = SimpleNamespace(
        checked=checked, tolerance=SimpleNamespace(error=1e-3, agreement=agreement), names=["a"],
        classes=[0], precision="fp32", opset=20, method="m", method_version=1, run="r", state=1,
        task=0,
    )  # fmt: skip
    show_exported(file, cast("Any", info), 1)
    out = capsys.readouterr().out
    assert "the same class for 100.0%" in out
    assert ("(at least" in out) is said


# --- adapters -------------------------------------------------------------------------------


def test_a_method_without_lora_has_no_adapter(built: Built) -> None:
    said = " ".join(export("--peft", "adapter", code=4).stderr.split())
    assert "running_mean trains no LoRA" in said
    assert "--onnx model.onnx" in said
    assert not Path("adapter").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected one of --onnx, --timm, --peft, --statistics, --mlflow; got none"),
        (["--onnx", "m.onnx", "--peft", "a"], "got --onnx and --peft"),
        (["--peft", "a", "--precision", "int8"], "--precision goes with --onnx and --mlflow"),
        (["--peft", "no/such/a"], "expected a folder, in one that exists"),
        (["--timm", "no/such/a"], "expected a folder, in one that exists"),
        (["--timm", "federation"], "so it is no earlier export"),
        (["--timm", "a", "--opset", "18"], "--opset goes with --onnx and --mlflow; --timm has"),
        (["--timm", "a"], "running_mean works on pixels"),
        (
            ["--statistics", "s", "--force"],
            "--force goes with --onnx and --mlflow; --statistics has",
        ),
        (["--statistics", "federation"], "expected a file in a folder that exists"),
        (["--peft", "federation"], "so it is no earlier export"),
    ],
)
def test_bad_formats_get_one_sentence(built: Built, arguments: list[str], said: str) -> None:
    assert said in " ".join(export(*arguments, code=4).stderr.split())


@pytest.fixture
def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """One task of fedavg_lora on the embedded backbone: states 0 and 1."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "federation"
    settings = ("method.name=fedavg_lora", "method.rank=2", "method.blocks=[0]", "wire.half=none")
    federation = Federation.open(directory, None, settings)
    try:
        backbone = load_backbone()
        small = toy_images({0: 4, 1: 3})
        images = Images(small.pictures.repeat(2, 1).repeat(2, 2), small.labels)
        options = {"rank": 2, "blocks": [0], "epochs": 1, "batch_size": 4}
        method = Method.of("fedavg_lora", [images], backbone, **options)
        ledger, run = federation.ledger, new_run_id()
        ledger.runs.add(
            run,
            method="fedavg_lora",
            method_version=method.method.version,
            config=to_toml(load(None, settings)),
            hparams=method.hparams.model_dump(mode="json"),
            backbone=backbone_fields(backbone.info),
            schema_digest=schema_digest(method.method, method.hparams, backbone.info),
            seed=1,
        )
        ledger.clients.add(ALICE, "alice", curve=b"c" * 32, signing=b"s" * 32, sealing=b"x" * 1216)
        classes = ClassRegistry(ledger, run)
        classes.announce(ALICE, NAMES[0])
        states = StateStore(states_folder(directory, run))
        assert classes.open_task(0) == TASKS[0]
        method.run(TASKS[0])
        digest = states.save(0, method.state, None, 0)
        ledger.states.add(RoundKey(run, 0, "train", 0), 0, digest, None)
        return Built(directory, run, method)
    finally:
        federation.close()


@pytest.mark.full
def test_a_folder_for_timm_says_how_it_was_learned(adapted: Built) -> None:
    """The adapter's run has one round of one client, which no test followed."""
    key = RoundKey(adapted.run, 0, "train", 0)
    with Ledger(adapted.directory / LEDGER_NAME) as ledger:
        ledger.rounds.open(key, asked=(ALICE,), base_state=-1)
        update = UpdateId("b" * 64)
        with ledger.transaction():
            ledger.updates.accept(
                key, ALICE, update_id=update, samples=7, tensor_bytes=1, sealed_bytes=2
            )
        ledger.updates.mark_counted(key)
        ledger.rounds.close(key, "done", new_state=0, metrics={"test_correct": 3, "test_total": 4})
    data = json.loads(export("--timm", "model", "--json").stdout)["data"]
    assert (data["folder"], data["names"], data["scores"]) == ("model", ["ant", "bee"], "same")
    assert data["checked"]["error"] < 1e-5
    assert data["learned"] == {
        "clients": 1, "images": 7, "rounds": 1, "accuracy": 75.0, "tested": 4, "tester": "server",
        "up_bytes": 0, "down_bytes": 0,
    }  # fmt: skip
    card = Path("model", CARD).read_text()
    assert "7 training images of 1 clients" in card
    assert "75.00 % of 4 test images of the server" in card
    said = export("--timm", "again", "--state", "best").stdout
    assert "with the classifier" in said
    assert "(at most 1e-4)" in said


@needs_peft
@pytest.mark.full
def test_an_adapter_of_the_embedded_backbone_is_used_as_its_card_says(
    adapted: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card's own lines, run in the folder."""
    done = export("--peft", "adapter", "--json")
    data = json.loads(done.stdout)["data"]
    assert (data["folder"], data["names"], data["scores"]) == ("adapter", ["ant", "bee"], "same")
    assert data["checked"]["error"] < 1e-5
    card = Path("adapter", CARD).read_text()
    code = card.split("```python\n")[1].partition("```")[0]
    picture = np.random.default_rng(1).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    Image.fromarray(picture).save("adapter/photo.jpg")
    monkeypatch.chdir("adapter")
    values: dict[str, Any] = {}
    exec(code, values)
    assert values["outputs"].shape == (1, 2)
    assert values["about"]["run"] == adapted.run
    said = export("--dir", str(adapted.directory), "--peft", "../again").stdout
    assert "rank" in said
    assert "with the head" in said
    assert "(at most 1e-4)" in said
