"""``fcil-client predict`` on a small made-up client, without a server: words, data, errors, codes."""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from client.model_kit import (
    give_model,
    keep,
    means,
    order_of,
    picture,
    put_part,
    write_shades,
)
from fcil_adapters.backbones import engines
from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.images.decoding import open_source
from fcil_client.cli import main as cli
from fcil_client.cli import model as cli_model
from fcil_client.data import manifest
from fcil_client.data.split import Fractions
from fcil_client.predict import calibration
from fcil_client.predict import images as predict_images
from fcil_client.predict.calibration import fit_temperature, softmax, unknown_score
from fcil_client.predict.predict import Current, Means
from fcil_client.state import current_model
from fcil_client.state.home import Home
from fcil_protocol.errors import BackboneMismatch, DataError, MethodMismatch

SHADES = {"black": 0, "dark": 1, "white": 4}


@pytest.fixture
def client(home, enrolment, tmp_path):
    """A client with a model of five shades, three of which it holds; its daemon does not run."""
    folder = write_shades(tmp_path / "images", SHADES, 12)
    home.save_enrolment(replace(enrolment, data=str(folder)))
    scan(home, folder)
    give_model(home)
    return home


def scan(home, folder):
    fractions = Fractions(0.4, 0.4, 0.2)
    manifest.scan(open_source(folder), home.directory / manifest.NAME, home.salt(), fractions)


@pytest.fixture
def shots(tmp_path):
    """Three pictures to be named, one of them below a folder of its own."""
    folder = tmp_path / "shots"
    (folder / "b").mkdir(parents=True)
    (folder / "c.png").write_bytes(picture(4))
    (folder / "a.png").write_bytes(picture(0))
    (folder / "b" / "x.PNG").write_bytes(picture(3.2))
    return folder


def run(*arguments, code=0, stdin=None):
    done = CliRunner().invoke(cli.app, ["predict", *map(str, arguments)], input=stdin)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def rows(*arguments, code=0, **options):
    """Return the rows of ``--json`` by the images' names, and the model."""
    data = json.loads(run(*arguments, "--json", code=code, **options).stdout)
    assert data["schema_version"] == 2
    return {r["image"].rpartition("/")[2]: r for r in data["data"]["images"]}, data


def best(row):
    return row["top"][0]["name"] or row["top"][0]["class"]


# --- what is said ---------------------------------------------------------------------------


def test_a_folder_is_named_in_a_stable_order_with_names_as_far_as_they_are_known(client, shots):
    lines = run(shots).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        str(shots / "a.png"), str(shots / "c.png"), str(shots / "b" / "x.PNG"),
    ]  # fmt: skip
    assert [line.partition(": ")[2].partition(" 0.")[0] for line in lines] == [
        "black", "white", "unnamed-3",
    ]  # fmt: skip


def test_the_words_beside_it_say_which_model_it_is_and_how_old(client, shots):
    said = run(shots).stderr
    assert "after task 1 of run" in said
    assert "calibrated on" in said


def test_json_has_one_envelope_with_the_model_and_a_row_per_image(client, shots):
    found, told = rows(shots, "--top", 2, "--unknown")
    assert told["status"] == "ok"
    assert told["data"]["failed"] == 0
    model = told["data"]["model"]
    assert (model["method"], model["classes"], model["calibrated"]) == ("running_mean", 5, True)
    row = found["x.PNG"]
    assert [one["class"] for one in row["top"]] == [3, 4]
    assert [one["name"] for one in row["top"]] == [None, "white"]
    assert 0 < row["top"][1]["probability"] < row["top"][0]["probability"] < 1
    assert 0 <= row["unknown"] <= 1


def test_jsonl_is_a_line_per_image(client, shots):
    lines = run(shots, "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line)["top"][0]["class"] for line in lines] == [0, 4, 3]


def test_a_single_file_may_have_any_name(client, tmp_path):
    (tmp_path / "frame").write_bytes(picture(1))
    found, _ = rows(tmp_path / "frame")
    assert best(found["frame"]) == "dark"


def test_standard_input_is_one_image(client, shots):
    found, _ = rows("-", shots / "c.png", stdin=picture(0))
    assert (best(found["-"]), best(found["c.png"])) == ("black", "white")


def test_more_classes_than_there_are_is_all_of_them(client, shots):
    found, _ = rows(shots, "--top", 99)
    assert len(found["a.png"]["top"]) == 5
    assert sum(one["probability"] for one in found["a.png"]["top"]) == pytest.approx(1, abs=1e-5)


def test_batches_change_nothing(client, shots):
    assert rows(shots, "--batch", 1)[0] == rows(shots, "--batch", 2)[0] == rows(shots)[0]


def test_what_is_between_all_classes_is_less_known(client, tmp_path):
    (tmp_path / "odd.png").write_bytes(picture(2.5))
    (tmp_path / "sure.png").write_bytes(picture(0))
    found, _ = rows(tmp_path / "odd.png", tmp_path / "sure.png", "--unknown")
    assert found["sure.png"]["unknown"] < found["odd.png"]["unknown"]
    limit = (found["sure.png"]["unknown"] + found["odd.png"]["unknown"]) / 2
    found, _ = rows(tmp_path / "odd.png", tmp_path / "sure.png", "--unknown-above", limit)
    assert [found[n]["is_unknown"] for n in ("odd.png", "sure.png")] == [True, False]
    lines = run(tmp_path / "odd.png", "--unknown-above", limit).stdout
    assert lines.partition(": ")[2].startswith("unknown; ")


# --- what is wrong --------------------------------------------------------------------------


def test_broken_images_are_named_the_others_go_on_and_the_code_says_so(client, shots):
    (shots / "b0.png").write_bytes(b"no image")
    (shots / "b1.png").write_bytes(picture(0)[:200])
    found, told = rows(shots, code=1)
    assert (told["status"], told["data"]["failed"]) == ("error", 2)
    assert "cannot be decoded" in found["b0.png"]["error"]
    assert "top" not in found["b1.png"]
    assert best(found["c.png"]) == "white"
    done = run(shots, code=1)
    assert len(done.stdout.splitlines()) == 3
    assert "b0.png: the image cannot be decoded" in done.stderr


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_pipe_among_the_images(client, shots):
    os.mkfifo(shots / "pipe.png")
    found = rows(shots, code=1)[0]
    assert "it is not a file" in found["pipe.png"]["error"]
    assert "top" in found["a.png"]


def test_only_broken_images_is_no_crash(client, tmp_path):
    (tmp_path / "x.png").write_bytes(b"")
    assert "empty" in rows(tmp_path / "x.png", code=1)[0]["x.png"]["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.png"], "there is no image or folder nowhere.png"),
        (["n" * 300], "(File name too long)"),
        ([""], "there is no image or folder"),
        (["-", "-"], "standard input is one image"),
        (["x", "--data", "nowhere"], "nowhere is not enrolled with a federation"),
        (["x", "--engine", "abacus", "--model", "m.onnx"], "holds everything"),
        (["-", "--model", "m.onnx"], "m.onnx cannot be read"),
        (["x", "--watch"], "--watch takes one folder"),
        ([".", "--watch", "--json"], "--format jsonl"),
    ],
)
def test_bad_arguments_get_one_sentence(client, arguments, words):
    done = run(*arguments, code=4)
    assert words in " ".join(done.output.replace("│", " ").split())


def test_an_empty_folder_says_what_an_image_is(client, tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").write_text("no image")
    assert "there is no image in" in run(tmp_path / "none", code=4).stderr


def test_a_client_without_a_model_says_when_it_will_have_one(home, enrolment, shots):
    home.save_enrolment(enrolment)
    assert "has no model yet" in run(shots, code=4).stderr


def test_of_several_clients_one_must_be_named(client, enrolment, shots, tmp_path):
    other = Home.of(enrolment.federation, tmp_path / "other")
    other.save_enrolment(replace(enrolment, data=str(tmp_path / "other")))
    assert "2 clients" in run(shots, code=4).stderr
    assert len(rows(shots, "--data", tmp_path / "images")[0]) == 3


def test_nobody_enrolled_says_what_to_do(home, shots):
    assert "--model FILE.onnx" in run(shots, code=4).stderr


def test_a_damaged_model_is_one_sentence(client, shots):
    for path in client.model_folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged" in run(shots, code=1).stderr


def test_a_model_that_knows_no_class_says_so(client, shots):
    empty = put_part(client, "current", means(()), state=9)
    keep(client, order_of([empty], state=9))
    assert "knows no class yet" in run(shots, code=4).stderr


# --- engines --------------------------------------------------------------------------------


def of_method(name, **info):
    """Return what of a model says which backbone it needs."""
    known = replace(NO_BACKBONE, name="embedded", **info)
    record = SimpleNamespace(weights=None)
    return SimpleNamespace(method=registry.load_method(name), info=known, record=record)


def backbone(model, **means):
    return Current(None, Means(**means), lambda *_: None).backbone(model)


def without_torch(monkeypatch, **installed):
    monkeypatch.setattr(engines, "installed", lambda: engines.Engines(**installed))


def test_without_torch_a_model_that_changes_the_backbone_names_the_way_out(monkeypatch):
    without_torch(monkeypatch, onnxruntime="1.31")
    with pytest.raises(MethodMismatch, match="'pilora', which changes the backbone.*--model FILE"):
        backbone(of_method("pilora"))
    with pytest.raises(MethodMismatch, match="'pilora', which changes the backbone.*--model FILE"):
        backbone(of_method("pilora"), engine="onnx")


def test_with_neither_engine_it_says_what_to_install(monkeypatch):
    without_torch(monkeypatch)
    with pytest.raises(MethodMismatch, match="torch or onnxruntime is needed.*pip install"):
        backbone(of_method("fedncm"))


def test_the_engine_that_starts_sooner_is_taken_and_the_other_where_it_cannot(monkeypatch):
    tried = []

    def load(engine, *_):
        tried.append(engine)
        if engine == "onnx" and len(tried) == 1:
            raise DataError("no graph")
        return SimpleNamespace(info=of_method("fedncm").info)

    monkeypatch.setattr(engines, "load", load)
    without_torch(monkeypatch, torch="2", timm="1", onnxruntime="1.31")
    assert backbone(of_method("fedncm"))[0] == "torch"
    assert tried == ["onnx", "torch"]
    assert backbone(of_method("fedncm"))[0] == "onnx"
    assert backbone(of_method("pilora"))[0] == "torch"
    assert tried == ["onnx", "torch", "onnx", "torch"]


def test_another_backbone_than_the_models_is_refused_with_both(monkeypatch):
    other = SimpleNamespace(info=replace(NO_BACKBONE, digest="a" * 64))
    monkeypatch.setattr(engines, "load", lambda *_: other)
    with pytest.raises(BackboneMismatch, match=f"{'b' * 12}.*{'a' * 12}.*--weights"):
        backbone(of_method("fedncm", digest="b" * 64))


def test_a_backbone_stays_loaded_while_it_is_the_models(monkeypatch):
    loads = []
    info = of_method("fedncm").info
    monkeypatch.setattr(engines, "load", lambda *a: loads.append(a) or SimpleNamespace(info=info))
    current = Current(None, Means(), lambda *_: None)
    assert current.backbone(of_method("fedncm")) is current.backbone(of_method("fedncm"))
    assert len(loads) == 1


# --- calibration ----------------------------------------------------------------------------


def test_it_is_measured_once_for_each_model_and_only_on_select_images(client, shots, monkeypatch):
    calls = []
    fit = calibration.fit_temperature
    monkeypatch.setattr(
        calibration, "fit_temperature", lambda s, c: calls.append(len(c)) or fit(s, c)
    )
    first, second = (rows(shots)[1]["data"]["model"] for _ in range(2))
    assert first == second
    scanned = manifest.load(client.directory / manifest.NAME, client.salt())
    assert calls == [sum(image.side == "select" for image in scanned.images)]
    keep(client, order_of([put_part(client, "current", means((0, 1, 4)), state=9)], state=9))
    third = rows(shots)[1]["data"]["model"]
    assert len(calls) == 2
    assert third["temperature"] != first["temperature"]


def test_without_images_of_its_own_it_says_that_it_is_not_calibrated(client, shots, tmp_path):
    shutil.rmtree(tmp_path / "images")
    assert "not calibrated" in run(shots).stderr
    model = rows(shots)[1]["data"]["model"]
    assert (model["calibrated"], model["temperature"]) == (False, None)


def test_what_was_measured_stays_when_the_images_go(client, shots, tmp_path):
    before = rows(shots)[1]["data"]["model"]
    shutil.rmtree(tmp_path / "images")
    assert rows(shots)[1]["data"]["model"] == before


def test_it_can_be_left_out(client, shots):
    assert rows(shots, "--no-calibrate")[1]["data"]["model"]["calibrated"] is False
    assert not (client.directory / calibration.NAME).exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": 1, "key": "x"}', b"\xff"])
def test_a_damaged_cache_is_made_anew(client, shots, text):
    expected = rows(shots)[1]["data"]["model"]["temperature"]
    (client.directory / calibration.NAME).write_bytes(text)
    assert rows(shots)[1]["data"]["model"]["temperature"] == expected


def drawn(n, scale, seed=0):
    """Return scores whose softmax at temperature ``scale`` is how often each class is right."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (n, 4))
    p = softmax(logits.astype(np.float32), 1.0)
    labels = np.array([rng.choice(4, p=row) for row in p])
    return (logits * scale).astype(np.float32), labels


@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
def test_the_temperature_that_scores_were_made_with_is_found(scale):
    assert fit_temperature(*drawn(4000, scale)) == pytest.approx(scale, rel=0.1)


def test_the_temperature_minimises_the_cross_entropy():
    scores, labels = drawn(300, 7.0, seed=3)
    n = len(labels)
    right = (n + 1) / (n + 2)
    targets = np.full((n, 4), (1 - right) / 3)
    targets[np.arange(n), labels] = right

    def loss(t):
        return -(targets * np.log(softmax(scores, t))).sum()

    found = fit_temperature(scores, labels)
    assert loss(found) < min(loss(found * 1.01), loss(found / 1.01))


def test_a_few_images_all_right_claim_no_certainty():
    scores = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]]
    p = softmax(scores, fit_temperature(scores, np.array([0, 1, 2, 3, 0])))
    assert 0.8 < p.max() < 0.9  # 6 / 7


def test_scores_without_any_difference_end_at_a_finite_temperature():
    assert np.isfinite(fit_temperature(np.ones((5, 3), np.float32), np.zeros(5, np.int64)))
    assert np.isfinite(fit_temperature(np.ones((5, 1), np.float32), np.zeros(5, np.int64)))


def test_the_unknown_score_is_0_for_certainty_and_1_for_none():
    p = np.array([[1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0]])
    assert unknown_score(p) == pytest.approx([0, 1, np.log(2) / np.log(3)])
    assert unknown_score(np.ones((2, 1))).tolist() == [0, 0]


# --- images ---------------------------------------------------------------------------------


def test_hidden_files_other_files_and_links_upwards_are_passed_over(tmp_path):
    for name in ("b.jpg", "a.PNG", ".hidden.png", "notes.txt", "sub/z.png", ".git/y.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in predict_images.walk(tmp_path)]
    assert found == ["a.PNG", "b.jpg", "sub/z.png"]


def test_images_are_decoded_ahead_but_never_more_than_two_batches(client):
    begun = []

    def pictures():
        for i in range(20):
            begun.append(i)
            yield predict_images.InputImage(str(i), picture(1))

    preprocessing = current_model.load(client).info.preprocessing
    coming = predict_images.batches(pictures(), preprocessing, size=2, threads=2)
    assert [one.name for one in next(coming)] == ["0", "1"]
    assert begun == [0, 1, 2, 3]
    assert [one.name for batch in coming for one in batch] == [str(i) for i in range(2, 20)]


def test_a_reader_that_has_enough_ends_it_without_a_word(client, shots, monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(cli_model, "row_text", gone)
    assert "error" not in run(shots).output


def test_a_class_without_a_name_is_explained_once(client, shots):
    done = run(shots, "--top", "5")
    assert done.stdout.count("unnamed-") > 1
    assert done.stderr.count("share_names") == 1
    assert "share_names" not in run(shots, "--top", "5", "--json").stderr


def test_what_is_below_too_many_folders_is_left_out_with_a_sentence(tmp_path):
    """The walk would end in the interpreter's own limit."""
    deep = tmp_path.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    (deep / "below.png").touch()
    (tmp_path / "d" / "seen.png").touch()
    faults = []
    assert [p.name for p in predict_images.walk(tmp_path, faults)] == ["seen.png"]
    assert len(faults) == 1
    assert "is too deep: what is below it is left out" in faults[0]
