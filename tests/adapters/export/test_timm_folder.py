"""Folders for timm: timm computes what the model does, from the picture on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image

from adapters.kit import Federation, Images, make_tasks, needs_peft, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.contract import Preprocessing, registry
from fcil_adapters.export import timm_folder
from fcil_adapters.export.exported_model import LearningFacts, Origin
from fcil_adapters.export.folder import ABOUT, CARD
from fcil_adapters.export.load import check_method, wanted_form
from fcil_adapters.export.timm_folder import export_timm
from fcil_adapters.export.timm_model import (
    CONFIG,
    FILES,
    PREPROCESSOR,
    WEIGHTS,
    TimmInfo,
    labels,
    model_config,
    preprocessor_config,
)
from fcil_adapters.images.decoding import preprocess
from fcil_protocol.errors import DataError, InternalError, StorageError
from fcil_protocol.formats import format_bytes

TASKS = make_tasks([1, 0], [4], [6, 2])
CLIENTS = [toy_images({1: 5, 0: 3, 4: 4, 2: 2}, 1), toy_images({1: 3, 2: 6}, 3)]
NAMES = {0: "null", 1: "Käse", 2: "two", 6: "never seen"}
LEARNED = LearningFacts(
    clients=2, images=23, rounds=7, accuracy=61.25, tested=80, up_bytes=4_000_000, down_bytes=90_000
)
ORIGIN = Origin("f" * 32, "r20260102-030405-abcd", 2, 9, NAMES, learned=LEARNED)
IMAGES = toy_images(dict.fromkeys((0, 1, 2, 4), 3), 5).pictures
FAST = {"lr_lora": 0.3}  # so that the change is no rounding

# Of each kind of head and of each way in which weights are put together, one.
MODELS = {
    "fedavg_lora": (FAST, "same"),
    "pilora": (FAST, "shifted"),
    "fed_talora": ({**FAST, "residual": "dense"}, "same"),
    "icarl": (FAST, "scaled"),
    "ccvr": ({**FAST, "head": "quadratic"}, "none"),
    "adapt_once": ({"adapt": {**SMALL["adapt_once"]["adapt"], **FAST}}, "none"),
    "fedncm": ({"metric": "euclidean"}, "shifted"),
    "gaussian_head": ({}, "same"),
    "analytic": ({"features": "linear", "form": "ridge"}, "scaled"),
}
FROZEN = ("fedncm", "gaussian_head", "analytic")
QUICK = ("pilora", "fedncm", "gaussian_head", "analytic", "adapt_once")


def learned(name: str, **options) -> Federation:
    given = {
        k: v
        for k, v in SMALL[name].items()
        if (k, options.get("features")) != ("projection", "linear")
    }
    fed = Federation.of(name, CLIENTS, toy_backbone(), **{**given, **options})
    for task in TASKS:
        fed.run(task)
    return fed


def export(fed, target, images=None) -> TimmInfo:
    return export_timm(fed.method, fed.context("evaluate"), fed.parts(), ORIGIN, target, images)


def as_users_load(folder):
    import timm  # fcil first makes its import possible beside any torchvision

    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in MODELS]
)
def test_timm_computes_what_the_model_does(name, tmp_path):
    options, kind = MODELS[name]
    fed = learned(name, **options)
    own = {k: v.clone() for k, v in fed.backbone.module.state_dict().items()}
    info = export(fed, tmp_path / "model", IMAGES[:3])
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == sorted(FILES)
    assert (info.method, info.task, info.state, info.scores) == (name, 2, 9, kind)
    assert info.checked.images == 7
    assert info.checked.error < 1e-5
    assert bool(info.changed) is (name not in FROZEN)
    assert all(torch.equal(v, own[k]) for k, v in fed.backbone.module.state_dict().items())
    model = as_users_load(tmp_path / "model")
    with torch.no_grad():
        got = model(fed.backbone.normalise(IMAGES)).numpy()
    assert got.shape == (len(IMAGES), 16 if kind == "none" else 4)
    expected = fed.predictor()
    if kind == "none":
        assert model.num_classes == 0
        return
    wanted = expected.logits(IMAGES).astype(np.float64)
    assert info.classes == expected.classes
    assert (got.argmax(1) == wanted.argmax(1)).all()
    if kind == "shifted":
        got, wanted = (x - x.mean(1, keepdims=True) for x in (got, wanted))
    if kind == "scaled":
        got, wanted = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (got, wanted))
    assert np.abs(got - wanted).max() < 1e-4 * np.ptp(wanted, axis=1).mean()


def embedded(image_size=None, pad=0) -> Federation:
    small = toy_images({0: 4, 1: 3})
    pictures = np.pad(
        small.pictures.repeat(2, 1).repeat(2, 2), ((0, 0), (pad,) * 2, (pad,) * 2, (0, 0))
    )
    images = Images(pictures, small.labels)
    options = {"rank": 2, "blocks": [0], "epochs": 1, "batch_size": 4, **FAST}
    fed = Federation.of("fedavg_lora", [images], load_backbone(image_size=image_size), **options)
    fed.run(make_tasks([1, 0])[0])
    return fed


@pytest.mark.full
@pytest.mark.parametrize(("size", "pad"), [(None, 0), (48, 8)])
def test_a_photo_gets_the_same_scores_by_the_cards_own_lines(size, pad, tmp_path, monkeypatch):
    """The backbone that ships, at its own size of images and at another."""
    fed = embedded(size, pad)
    export(fed, tmp_path / "model")
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 72, 3), np.uint8))
    photo.save(tmp_path / "model" / "photo.png")
    code = (tmp_path / "model" / CARD).read_text().split("```python\n")[1].partition("```")[0]
    monkeypatch.chdir(tmp_path / "model")
    values: dict = {}
    exec(code.replace("photo.jpg", "photo.png"), values)
    pixels = preprocess(photo, fed.backbone.info.preprocessing)[None]
    wanted = fed.predictor().logits(pixels)
    np.testing.assert_allclose(values["outputs"].numpy(), wanted, atol=1e-4)


@needs_peft  # which brings transformers
@pytest.mark.full
def test_transformers_opens_it_too(tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageClassification, BitImageProcessor

    fed = embedded()
    export(fed, tmp_path / "model")
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 72, 3), np.uint8))
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    assert model.config.id2label == {0: "Käse", 1: "null"}
    wanted = fed.predictor().logits(preprocess(photo, fed.backbone.info.preprocessing)[None])
    for processor in (AutoImageProcessor, BitImageProcessor):
        prepared = processor.from_pretrained(tmp_path / "model")(photo, return_tensors="pt")
        with torch.no_grad():
            got = model(**prepared).logits.numpy()
        np.testing.assert_allclose(got, wanted, atol=1e-3)


def test_a_model_that_timm_knows_is_named(tmp_path):
    """And is made again with the run's size of images."""
    backbone = toy_backbone()
    named = replace(backbone.info, name="vit_tiny_patch16_224.augreg_in21k")
    backbone.info = named
    architecture, arguments = timm_folder._architecture(backbone)
    assert architecture == "vit_tiny_patch16_224.augreg_in21k"
    assert arguments == {"img_size": 16}
    config = json.loads(model_config(architecture, arguments, named.preprocessing, ("a",), 16))
    assert config["architecture"] == "vit_tiny_patch16_224"
    assert config["pretrained_cfg"]["tag"] == "augreg_in21k"


def test_the_comparison_sees_a_small_change_of_one_weight(tmp_path, monkeypatch):
    fed = learned("pilora", **FAST)
    export(fed, tmp_path / "model")
    before = {name: (tmp_path / "model" / name).read_bytes() for name in FILES}
    right = timm_folder._merged

    def slightly_wrong(*args):
        state = right(*args)
        return {**state, "blocks.1.mlp.fc1.weight": state["blocks.1.mlp.fc1.weight"] * 1.01}

    monkeypatch.setattr(timm_folder, "_merged", slightly_wrong)
    with pytest.raises(InternalError, match="the folder as timm .* differs from the model"):
        export(fed, tmp_path / "model")
    assert {name: (tmp_path / "model" / name).read_bytes() for name in FILES} == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_card_says_how_it_was_learned(tmp_path):
    fed = learned("pilora", **FAST)
    info = export(fed, tmp_path / "model")
    card = (tmp_path / "model" / CARD).read_text()
    digest = hashlib.sha256((tmp_path / "model" / WEIGHTS).read_bytes()).hexdigest()
    for words in (
        info.run, info.backbone.digest, digest, "23 training images of 2 clients", "7 rounds",
        "61.25 % of 80 test images of the clients", f"{format_bytes(4_000_000)} from the clients", "timm 1.0",
        "merged into 1 of its weights", 'pipeline_tag: "image-classification"',
    ):  # fmt: skip
        assert words in card
    (code,) = card.split("```python\n")[1:]
    compile(code.partition("```")[0], "card", "exec")
    assert TimmInfo.model_validate_json((tmp_path / "model" / ABOUT).read_text()) == info
    config = json.loads((tmp_path / "model" / CONFIG).read_text())
    assert config["label_names"] == ["Käse", "null", "class 4", "two"]
    names = safetensors.numpy.load_file(tmp_path / "model" / WEIGHTS)
    assert names["head.weight"].shape == (4, 16)


@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.875, 0.95])
def test_libraries_scale_pictures_to_the_same_side(crop_pct):
    """Timm rounds the side down, fcil to the nearest, transformers is given it."""
    p = Preprocessing(224, (0.5,) * 3, (0.5,) * 3, "bicubic", crop_pct)
    config = json.loads(model_config("vit", {}, p, (), 16))["pretrained_cfg"]
    assert int(224 / config["crop_pct"]) == round(224 / crop_pct)
    assert abs(config["crop_pct"] - crop_pct) < 0.002
    side = json.loads(preprocessor_config(p))["size"]["shortest_edge"]
    assert side == round(224 / crop_pct)
    assert json.loads(preprocessor_config(p))["resample"] == 3


def test_a_class_without_a_name_gets_a_label_of_its_own():
    assert labels((3, 5), {3: "bee"}) == ("bee", "class 5")


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("l2p", "l2p changes no weight of it"),
        ("hgp", "hgp changes no weight of it"),
        ("running_mean", "running_mean works on pixels"),
    ],
)
def test_methods_without_such_a_model_say_so_before_any_work(name, why):
    with pytest.raises(DataError, match=f"{why}.*--onnx"):
        check_method("timm", registry.load_method(name))


def test_all_others_are_not_refused_by_name():
    refused = {
        "coda_prompt", "fed_cprompt", "fedavg_prompt", "hepco", "hgp", "l2p", "running_mean",
    }  # fmt: skip
    for name in set(SMALL) - refused:
        check_method("timm", registry.load_method(name))


@pytest.mark.parametrize(
    ("name", "options"), [("gaussian_head", {"head": "quadratic"}), ("analytic", {})]
)
def test_a_model_of_which_nothing_would_be_in_it_is_refused(name, options, tmp_path):
    with pytest.raises(DataError, match="leaves the backbone as it is.*--onnx"):
        export(learned(name, **options), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_before_the_first_round_there_is_nothing_to_export(tmp_path):
    fed = Federation.of("fedavg_lora", CLIENTS, toy_backbone(), **SMALL["fedavg_lora"])
    fed.open(TASKS[0])
    with pytest.raises(DataError, match="knows no class yet"):
        export(fed, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_earlier_model(tmp_path, monkeypatch):
    fed = learned("fedncm")
    export(fed, tmp_path / "model")
    before = (tmp_path / "model" / WEIGHTS).read_bytes()

    def full(*_args, **_more):
        raise StorageError("cannot write it")

    monkeypatch.setattr(timm_folder, "write_atomic", full)
    with pytest.raises(StorageError):
        export(fed, tmp_path / "model")
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_adapters_folder_is_not_replaced_by_a_model(tmp_path):
    (tmp_path / "a").mkdir()
    for name in (ABOUT, "adapter_config.json"):
        (tmp_path / "a" / name).write_text("{}")
    with pytest.raises(DataError, match="holds 'adapter_config.json', so it is no earlier export"):
        wanted_form({"timm": tmp_path / "a"})
    assert PREPROCESSOR in FILES
