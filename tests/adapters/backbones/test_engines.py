"""Which engine runs a backbone: what is installed, what was chosen, and what a method needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fcil_adapters.backbones import engines
from fcil_adapters.backbones.engines import choose, choose_for, frozen_methods, installed, load
from fcil_adapters.backbones.known import EMBEDDED_DIGEST, embedded_file
from fcil_adapters.contract import registry
from fcil_protocol.errors import ConfigError, MethodMismatch


@pytest.fixture
def here(monkeypatch):
    """Let only some packages be installed."""

    def only(*names):
        monkeypatch.setattr(engines, "_is_here", lambda package: package in names)

    return only


def test_what_is_installed_is_told_without_importing_it():
    code = (
        "import sys\nfrom fcil_adapters.backbones.engines import installed\n"
        "e = installed()\n"
        "print(e.torch[:2], e.onnxruntime[:2], e.distributions, e.clash)\n"
        "print({'torch', 'timm', 'onnxruntime'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("2. 1. {'onnxruntime': '1.")
    assert second == "set()"


def test_providers_are_those_of_the_installed_onnxruntime():
    assert "CPUExecutionProvider" in installed().providers()


def test_onnxruntime_neither_keeps_a_device_id_nor_calls_home(tmp_path):
    """Its maker's builds do both unless they are told not to; nothing here calls home."""
    code = "from fcil_adapters.backbones.engines import load\nload('onnx', device='cpu')\n"
    env = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    env |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("packages", "engine", "chosen"),
    [
        (("torch", "timm", "onnxruntime"), "auto", "torch"),
        (("torch", "timm", "onnxruntime"), "onnx", "onnx"),
        (("torch", "onnxruntime"), "auto", "onnx"),  # torch alone has no backbone
        (("onnxruntime",), "auto", "onnx"),
        (("torch", "timm"), "auto", "torch"),
    ],
)
def test_auto_is_torch_where_it_is_installed(here, packages, engine, chosen):
    here(*packages)
    assert choose(engine) == chosen
    assert choose_for(registry.load_method("fedncm"), engine) == chosen


@pytest.mark.parametrize(
    ("packages", "engine", "words"),
    [
        ((), "auto", "torch or onnxruntime is needed"),
        ((), "onnx", "onnxruntime is needed"),
        (("onnxruntime",), "torch", "torch and timm cannot be found"),
        (("torch",), "torch", "timm cannot be found"),
        (("torch", "timm"), "abacus", "unknown engine 'abacus'; known are auto, torch, onnx"),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(here, packages, engine, words):
    here(*packages)
    with pytest.raises(ConfigError, match=words) as caught:
        choose(engine)
    assert engine == "abacus" or "pip install" in caught.value.action


def test_a_method_with_gradients_names_itself_and_torch(here):
    here("onnxruntime")
    with pytest.raises(MethodMismatch) as caught:
        choose_for(registry.load_method("pilora"))
    assert "'pilora'" in caught.value.message
    assert "pip install 'fcil[client]'" in caught.value.action
    assert "adapt_once, analytic, fedncm, gaussian_head, running_mean" in caught.value.action


def test_such_a_method_and_the_engine_onnx_do_not_go_together():
    with pytest.raises(MethodMismatch, match="'hgp' .* started with --engine onnx"):
        choose_for(registry.load_method("hgp"), "onnx")


def test_a_frozen_method_where_nothing_is_installed_says_so(here):
    here()
    with pytest.raises(MethodMismatch, match=r"'analytic' needs a backbone: torch or onnxruntime"):
        choose_for(registry.load_method("analytic"))


def test_frozen_methods_are_those_whose_client_half_imports_no_torch():
    """The manifest says it; here it is tried, and the others are tried as well."""
    code = (
        "import sys\n"
        "from fcil_adapters.contract import registry\n"
        "from fcil_protocol.errors import ConfigError\n"
        "sys.modules['torch'] = sys.modules['timm'] = None\n"
        "for name in registry.method_names():\n"
        "    method = registry.load_method(name)\n"
        "    try:\n"
        "        registry.load_half(method.learner), registry.load_half(method.model)\n"
        "    except ConfigError:\n"
        "        continue\n"
        "    print(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == frozen_methods()


def test_a_half_that_imports_torch_all_the_same_says_what_it_lacks(monkeypatch, tmp_path):
    """A method that declares frozen=True wrongly, or needs no backbone but torch."""
    (tmp_path / "wrong_half.py").write_text("import timm_of_another_name\nclass Learner: pass\n")
    (tmp_path / "torch_half.py").write_text("import torch.nn\nclass Learner: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch.nn", raising=False)
    with pytest.raises(ConfigError, match="torch_half needs torch, which is not installed here"):
        registry.load_half("torch_half:Learner")
    with pytest.raises(ModuleNotFoundError, match="timm_of_another_name"):
        registry.load_half("wrong_half:Learner")


class TestTwoOnnxruntimes:
    @pytest.fixture
    def other(self, tmp_path, monkeypatch):
        """Install a second distribution beside the real one, as pip would note it."""
        info = tmp_path / "onnxruntime_gpu-1.30.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.30.0\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))

    def test_clash_and_the_sentence_says_what_to_do(self, other):
        clash = installed().clash
        assert "onnxruntime 1." in clash
        assert "and onnxruntime-gpu 1.30.0 are both installed" in clash
        assert "pip uninstall onnxruntime onnxruntime-gpu" in clash

    def test_one_alone_does_not(self):
        assert installed().clash == ""


class TestLoad:
    def test_either_engine_loads_the_same_backbone(self):
        for engine in ("torch", "onnx"):
            loaded = load(engine, device="cpu")
            assert loaded.info.digest == EMBEDDED_DIGEST
            assert loaded.device == "cpu"
            assert loaded.description.startswith("cpu (")

    def test_memory_is_bounded_where_the_gpu_that_was_hoped_for_does_not_work(self, monkeypatch):
        bounded = []
        gpu = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(engines.Engines, "providers", lambda _: gpu)
        monkeypatch.setattr(engines.memory_limit, "enforce", lambda: bounded.append(True))
        assert load("onnx").runtime.device == "cpu"
        assert bounded

    def test_torch_takes_the_weights_of_an_exported_graph(self):
        assert load("torch", "embedded", embedded_file(".onnx")).info.digest == EMBEDDED_DIGEST

    def test_what_is_left_of_an_onnxruntime_is_named(self, tmp_path):
        """pip uninstall of one of two leaves an empty package behind."""
        (tmp_path / "onnxruntime").mkdir()
        (tmp_path / "onnxruntime" / "__init__.py").touch()
        assert self.told(tmp_path, "onnx").startswith("onnxruntime cannot be used here")

    def test_a_torch_that_cannot_be_imported_is_named(self, tmp_path):
        (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: no such file')")
        told = self.told(tmp_path, "torch")
        assert told == "torch cannot be used here: libcudart.so.12: no such file."

    def told(self, folder, engine):
        code = (
            "import sys\nfrom fcil_adapters.backbones import engines\n"
            "from fcil_protocol.errors import ConfigError\n"
            "try:\n    engines.load(sys.argv[1])\n"
            "except ConfigError as error:\n    print(error.message)\n"
        )
        env = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code, engine],
            capture_output=True, text=True, check=True, env=env,
        )  # fmt: skip
        return done.stdout.strip()
