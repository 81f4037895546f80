"""Adapters for PEFT: the library computes what the model does, and nothing else is written.

Importing the library takes seconds: one quick test does, where it is installed.
`heads.scorer.LinearLayer` is tested by the scores of the methods that have each kind.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch

from adapters.kit import Federation, make_tasks, needs_peft, now, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.contract import registry
from fcil_adapters.export import load, peft_folder
from fcil_adapters.export.exported_model import Checked, Origin
from fcil_adapters.export.folder import ABOUT, CARD
from fcil_adapters.export.load import check_has_adapter, wanted_form
from fcil_adapters.export.peft_adapter import CONFIG, FILES, WEIGHTS, AdapterInfo
from fcil_adapters.export.peft_folder import export_adapter
from fcil_protocol.errors import ConfigError, DataError, InternalError, StorageError, UsageError

TASKS = make_tasks([1, 0], [4], [6, 2])
CLIENTS = [toy_images({1: 5, 0: 3, 4: 4, 2: 2}, 1), toy_images({1: 3, 2: 6}, 3)]
NAMES = {0: "null", 1: "Käse", 2: "two", 6: "never seen"}
ORIGIN = Origin("f" * 32, "r20260102-030405-abcd", 2, 9, NAMES)
IMAGES = toy_images(dict.fromkeys((0, 1, 2, 4), 3), 5).pictures
FAST = {"lr_lora": 0.3}  # so that the change is no rounding

# Of each way in which changes or heads are put together, one; the others share their code.
LORA = {
    "fedavg_lora": FAST,
    "pilora": FAST,
    "fed_talora": FAST,
    "lorm": {**FAST, "modules": ["qkv", "fc1"]},
    "plora": FAST,
    "adapt_once": {"adapt": {**SMALL["adapt_once"]["adapt"], **FAST}},
    "icarl": FAST,
    "fedclm": FAST,
    "ffa_lora": {**FAST, "scale": 0.3, "modules": ["v", "proj"]},
    "ccvr": {**FAST, "head": "quadratic"},
}
SCORES = {
    "pilora": "shifted",
    "plora": "shifted",
    "fedclm": "shifted",
    "icarl": "scaled",
    "adapt_once": "none",
    "ccvr": "none",
}
QUICK = ("pilora",)


def learned(name: str, **options) -> Federation:
    fed = Federation.of(name, CLIENTS, toy_backbone(), **{**SMALL[name], **options})
    for task in TASKS:
        fed.run(task)
    return fed


def export(fed, target, images=None) -> AdapterInfo:
    ctx = fed.context("evaluate")
    return export_adapter(fed.method, ctx, fed.parts(), ORIGIN, target, images)


def as_users_load(fed, folder, classes):
    """Return the outputs of the folder on a new model of timm with the base's weights."""
    from peft import PeftModel
    from timm.models.vision_transformer import VisionTransformer

    module, info = fed.backbone.module, fed.backbone.info
    base = VisionTransformer(
        img_size=info.preprocessing.size, patch_size=module.patch_embed.patch_size[0],
        embed_dim=info.dim, depth=info.depth, num_heads=info.heads, num_classes=classes,
    )  # fmt: skip
    missing = base.load_state_dict(module.state_dict(), strict=False)
    assert not missing.unexpected_keys
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        return model(fed.backbone.normalise(IMAGES)).numpy()


def outputs(name, fed):
    """Return what the head's outputs must be, by the definition of each kind, in float64."""
    predictor = fed.predictor()
    scores = predictor.logits(IMAGES).astype(np.float64)
    kind = SCORES.get(name, "same")
    if kind == "same":
        return scores
    if name == "adapt_once":
        return predictor.extractor.features(IMAGES)
    with torch.no_grad():
        features = predictor.features(torch.from_numpy(IMAGES)).double().numpy()
    if kind == "none":
        return features
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return scores + lengths**2 if kind == "shifted" else scores * lengths


@pytest.fixture
def unchecked(monkeypatch):
    """Leave the library out."""
    checked = Checked(images=4, provider="none", error=0.0, agreement=1.0)
    monkeypatch.setattr(peft_folder, "_check", lambda *_: checked)


@needs_peft
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in LORA]
)
def test_the_library_computes_what_the_model_does(name, tmp_path):
    fed = learned(name, **LORA[name])
    info = export(fed, tmp_path / "adapter", IMAGES[:3])
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == sorted(FILES)
    assert (info.method, info.task, info.state, info.scores) == (
        name, 2, 9, SCORES.get(name, "same"),
    )  # fmt: skip
    assert info.checked.images == 7
    assert info.checked.error < 1e-5
    headed = info.scores != "none"
    got = as_users_load(fed, tmp_path / "adapter", len(info.classes) if headed else 0)
    wanted = outputs(name, fed)
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() < 1e-4 * np.ptp(wanted, axis=1).mean()
    if headed:
        expected = fed.predictor()
        assert info.classes == expected.classes
        assert (got.argmax(1) == expected.logits(IMAGES).argmax(1)).all()
        assert dict(zip(info.classes, info.names, strict=True)) == {
            0: "null", 1: "Käse", 2: "two", 4: "",
        }  # fmt: skip


@needs_peft
@pytest.mark.full
def test_what_was_learned_is_in_it_and_the_base_alone_is_refused(tmp_path, monkeypatch):
    """The comparison sees a change of a hundredth in one factor."""
    fed = learned("pilora", **FAST)
    right = peft_folder.adapter_tensors

    def slightly_wrong(*args):
        tensors = right(*args)
        name = next(n for n in tensors if n.endswith("lora_B.weight"))
        return {**tensors, name: tensors[name] * np.float32(1.01)}

    export(fed, tmp_path / "adapter")
    before = {name: (tmp_path / "adapter" / name).read_bytes() for name in FILES}
    monkeypatch.setattr(peft_folder, "adapter_tensors", slightly_wrong)
    with pytest.raises(InternalError, match="differs from the model by up to"):
        export(fed, tmp_path / "adapter")
    after = {name: (tmp_path / "adapter" / name).read_bytes() for name in FILES}
    assert after == before
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_ranks_add_up_and_the_runs_own_factors_stay(tmp_path, unchecked):
    """PILoRA's three tasks of rank 2 on q and v of one block, with no dense part."""
    fed = learned("pilora", **FAST)
    info = export(fed, tmp_path / "adapter")
    assert info.ranks == {"blocks.0.attn.qkv": 12}
    assert info.factored == ()
    tensors = safetensors.numpy.load_file(tmp_path / "adapter" / WEIGHTS)
    A = tensors["base_model.model.blocks.0.attn.qkv.lora_A.weight"]
    B = tensors["base_model.model.blocks.0.attn.qkv.lora_B.weight"]
    last = now(fed.parts())["lora.0.v.A"]
    assert any(np.array_equal(A[i : i + 2], last) for i in range(0, 12, 2))
    assert not B[16:32].any(), "k is not changed"
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (12, 12 * fed.hparams.scale)
    assert config["modules_to_save"] == ["head"]


def test_residuals_are_further_ranks_or_factored_where_they_are_dense(tmp_path, unchecked):
    lora = export(learned("fed_talora", **FAST), tmp_path / "a")
    assert max(lora.ranks.values()) > 4, "the residual's"
    dense = learned("fed_talora", **FAST, residual="dense")
    info = export(dense, tmp_path / "b")
    assert set(info.factored) == set(info.ranks)
    card = (tmp_path / "b" / CARD).read_text()
    assert "a pair is a singular value decomposition of the sum" in card
    assert "singular" not in (tmp_path / "a" / CARD).read_text()


def test_the_card_says_what_it_is_and_how_to_use_it(tmp_path, unchecked):
    fed = learned("fedavg_lora", **FAST)
    info = export(fed, tmp_path / "adapter")
    card = (tmp_path / "adapter" / CARD).read_text()
    assert card.startswith('---\nlibrary_name: "peft"\nbase_model: "timm/')
    for words in (info.run, info.backbone.digest, "num_classes=4", "PeftModel.from_pretrained"):
        assert words in card
    (code,) = card.split("```python\n")[1:]
    compile(code.partition("```")[0], "card", "exec")
    about = AdapterInfo.model_validate_json((tmp_path / "adapter" / ABOUT).read_text())
    assert about == info


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hgp", "analytic", "running_mean"])
def test_methods_without_lora_say_so(name):
    with pytest.raises(DataError, match=f"{name} trains no LoRA.*--onnx"):
        check_has_adapter(registry.load_method(name))


def test_a_method_that_skips_its_lora_says_so(tmp_path):
    options = {**SMALL["adapt_once"], "adapt": {"rounds": 0}}
    fed = Federation.of("adapt_once", CLIENTS, toy_backbone(), **options)
    fed.run(TASKS[0])
    with pytest.raises(DataError, match="method.adapt.rounds is 0"):
        export(fed, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_every_method_with_lora_says_how_to_read_it():
    """And each of these functions exists."""
    without = {name for name in SMALL if not registry.load_method(name).changes}
    assert without == {
        "analytic", "coda_prompt", "fed_cprompt", "fedavg_prompt", "fedncm", "gaussian_head",
        "hepco", "hgp", "l2p", "running_mean",
    }  # fmt: skip
    for name in set(SMALL) - without:
        assert callable(registry.load_object(registry.load_method(name).changes))


def test_before_the_first_round_there_is_nothing_to_export(tmp_path):
    fed = Federation.of("fedavg_lora", CLIENTS, toy_backbone(), **SMALL["fedavg_lora"])
    fed.open(TASKS[0])
    with pytest.raises(DataError, match="knows no class yet"):
        export(fed, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def folder_with(tmp_path, name):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / name).write_text("x")
    return tmp_path / "there"


def link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    return tmp_path / "link"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (lambda t: folder_with(t, "thesis.tex"), "holds 'thesis.tex', so it is no earlier export"),
        (lambda t: folder_with(t, WEIGHTS), "lacks 'fcil.json', so it is no earlier export"),
        (lambda t: folder_with(t, "a") / "a", "expected a folder, in one that exists"),
        (lambda t: t / "none" / "adapter", "expected a folder, in one that exists"),
        (link, "expected a folder, in one that exists"),
        (lambda t: t / ("a" * 300), "expected a folder, in one that exists"),
    ],
)
def test_a_target_that_is_something_else_is_refused(target, said, tmp_path):
    with pytest.raises(DataError, match=said):
        wanted_form({"onnx": None, "peft": target(tmp_path)})


def test_an_earlier_export_and_an_empty_folder_may_be_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    for place in (folder_with(tmp_path, ABOUT), tmp_path / "empty", tmp_path / "new"):
        wanted = wanted_form({"onnx": None, "peft": place})
        assert (wanted.form, wanted.target, wanted.is_folder) == ("peft", place, True)


def test_a_folder_that_gets_other_files_meanwhile_is_left_alone(
    tmp_path, unchecked, monkeypatch
):  # fmt: skip
    fed = learned("pilora")
    check = peft_folder._check

    def meanwhile(*args):
        folder_with(tmp_path, "notes.txt")
        return check(*args)

    monkeypatch.setattr(peft_folder, "_check", meanwhile)
    with pytest.raises(DataError, match=r"holds 'notes.txt'"):
        export(fed, tmp_path / "there")
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["notes.txt"]


def test_a_full_disk_leaves_what_was_there(tmp_path, unchecked, monkeypatch):
    fed = learned("pilora")
    export(fed, tmp_path / "adapter")

    def full(*_args, **_more):
        raise StorageError("cannot write it")

    monkeypatch.setattr(peft_folder, "write_atomic", full)
    with pytest.raises(StorageError):
        export(fed, tmp_path / "adapter")
    assert sorted(os.listdir(tmp_path / "adapter")) == sorted(FILES)
    assert os.listdir(tmp_path) == ["adapter"]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ({}, "expected one of --onnx, --peft; got none"),
        ({"onnx": "m.onnx", "peft": "a"}, "got --onnx and --peft"),
    ],
)
def test_one_format_is_chosen(targets, said, tmp_path):
    given = {"onnx": None, "peft": None, **{k: tmp_path / v for k, v in targets.items()}}
    with pytest.raises(UsageError, match=said):
        wanted_form(given)


def test_options_of_onnx_are_refused_with_an_adapter(tmp_path):
    wanted_form({"onnx": tmp_path / "m"}, precision="int8", force=True)
    wanted_form({"peft": tmp_path / "a"})
    with pytest.raises(
        UsageError, match="--precision goes with --onnx and --mlflow.*--precision and --force"
    ):
        wanted_form({"peft": tmp_path / "a"}, precision="int8", force=True)


def test_all_that_is_missing_is_named_with_one_command(monkeypatch):
    for name in ("peft", "transformers", "accelerate"):
        monkeypatch.setitem(load.sys.modules, name, None)
    with pytest.raises(ConfigError) as told:
        load.exporter("server", "peft")
    assert "a PEFT adapter needs packages that are not installed (peft, transformers, " in str(
        told.value
    )
    assert "fcil[peft]" in str(told.value)


def test_a_predictor_without_features_is_refused(tmp_path, monkeypatch):
    fed = learned("pilora")
    monkeypatch.setattr(peft_folder, "_loaded", lambda *_: (None, None))
    monkeypatch.setattr(peft_folder, "_version", lambda: "peft")
    half = registry.load_half(fed.method.model)

    class Model:
        def compose(self, *args):
            return replace(half.compose(*args), features=None)

    monkeypatch.setattr(peft_folder.registry, "load_half", lambda _: Model())
    with pytest.raises(DataError, match="has no features to compare"):
        export(fed, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []
