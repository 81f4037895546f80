"""The backbone run by onnxruntime: the same features as torch's, of exactly the weights named."""

from __future__ import annotations

import gc
import json
import shutil
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from digits import load_digits
from fcil_adapters.backbones import onnx_session
from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.backbones.known import EMBEDDED, EMBEDDED_DIGEST, embedded_file
from fcil_adapters.backbones.onnx_backbone import METADATA, load_onnx_backbone
from fcil_adapters.backbones.onnx_session import CPU, CUDA, TENSORRT, open_session
from fcil_adapters.backbones.probes import compare_probes, probe_features, probe_images
from fcil_adapters.backbones.weights import WeightsFile
from fcil_client.cli.main import app
from fcil_protocol.errors import ConfigError, DataError, OutOfMemory, WorkerError

CLOSE = 1e-5  # relative; float32's own rounding over six blocks gives 1e-6


@pytest.fixture(scope="module")
def torch_side():
    return load_backbone()


@pytest.fixture(scope="module")
def onnx_side():
    return load_onnx_backbone(device="cpu", threads=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the folder and the answer of the command that exports the embedded backbone."""
    folder = tmp_path_factory.mktemp("exported")
    shutil.copy(embedded_file(".safetensors"), folder)
    done = CliRunner().invoke(
        app, ["backbone", "export", "embedded", "--out", str(folder), "--json"]
    )
    assert done.exit_code == 0, done.output
    return folder, json.loads(done.stdout)["data"]


@pytest.fixture
def files(tmp_path):
    """Return copies of the embedded graph and weights, to be damaged."""
    paths = [tmp_path / f"{EMBEDDED}{suffix}" for suffix in (".onnx", ".safetensors")]
    for path in paths:
        shutil.copy(embedded_file(path.suffix), path)
    return paths


def digits(count):
    pictures = (load_digits().images[:count] * (255 / 16)).round().astype(np.uint8)
    return np.repeat(np.kron(pictures, np.ones((1, 4, 4), np.uint8))[..., None], 3, axis=3)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return the folder of the embedded backbone exported for images of 16 pixels."""
    folder = tmp_path_factory.mktemp("small")
    done = CliRunner().invoke(
        app,
        [
            "backbone",
            "export",
            "embedded",
            "--image-size",
            "16",
            "--out",
            str(folder),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["data"]["image_size"] == 16
    return folder


@pytest.mark.full
class TestImageSize:
    def test_features_and_description_equal_torchs(self, small):
        ours = load_onnx_backbone(weights=small / f"{EMBEDDED}.onnx", device="cpu", image_size=16)
        theirs = load_backbone(image_size=16)
        assert ours.info == theirs.info
        images = digits(9)[:, ::2, ::2]
        error = compare_probes(ours.features(images), theirs.features(images))
        assert 0 < error < CLOSE

    def test_the_weights_file_is_that_of_every_size(self, small):
        """So torch loads it at any size, and it is stored once."""
        weights = WeightsFile.open(small / f"{EMBEDDED}.safetensors")
        assert weights.digest() == EMBEDDED_DIGEST

    def test_another_size_than_the_graphs_is_refused(self, small):
        with pytest.raises(DataError, match="images of 16 pixels, and the run's have 32") as raised:
            load_onnx_backbone(weights=small / f"{EMBEDDED}.onnx", device="cpu", image_size=32)
        assert "--image-size 32" in raised.value.action

    def test_a_graph_that_denies_its_size_is_refused(self, small, tmp_path):
        """Without the word that positions are resampled, the digest is not that of its weights."""
        for name in (f"{EMBEDDED}.onnx", f"{EMBEDDED}.safetensors"):
            shutil.copy(small / name, tmp_path)
        model = onnx.load(tmp_path / f"{EMBEDDED}.onnx", load_external_data=False)
        (entry,) = (e for e in model.metadata_props if e.key == METADATA)
        claim = json.loads(entry.value)
        del claim["resampled"]
        entry.value = json.dumps(claim)
        onnx.save(model, tmp_path / f"{EMBEDDED}.onnx")
        with pytest.raises(DataError, match="was exported with the weights"):
            load_onnx_backbone(weights=tmp_path / f"{EMBEDDED}.onnx", device="cpu")


class TestFeatures:
    @pytest.mark.parametrize("count", [1, 3, 8, 9, 31])
    def test_equal_torchs_for_batches_of_any_size(self, torch_side, onnx_side, count):
        images = digits(count)
        ours = onnx_side.features(images)
        assert (ours.shape, ours.dtype) == ((count, 128), np.float32)
        assert compare_probes(ours, torch_side.features(images)) < CLOSE

    def test_equal_torchs_on_the_probe_pictures_of_photographs_size(self, torch_side, onnx_side):
        error = compare_probes(probe_features(onnx_side), probe_features(torch_side))
        assert 0 < error < CLOSE, "not 0: these are two computations"

    def test_do_not_depend_on_how_the_images_lie_in_memory(self, onnx_side):
        images = digits(6)
        expected = onnx_side.features(images)
        for same in (np.asfortranarray(images), digits(12)[:6], images[::-1][::-1]):
            np.testing.assert_array_equal(onnx_side.features(same), expected)

    def test_of_no_image_are_none(self, onnx_side):
        assert onnx_side.features(digits(1)[:0]).shape == (0, 128)

    def test_each_pass_is_a_sign_of_life_and_takes_few_images(self, onnx_side):
        signs = []
        onnx_side.alive = lambda: signs.append(1)
        onnx_side.features(digits(9))
        assert len(signs) == 2

    def test_stay_right_when_nothing_else_holds_the_weights(self, torch_side):
        side = load_onnx_backbone(device="cpu", threads=1)
        gc.collect()
        np.zeros(5_000_000).fill(7)
        assert compare_probes(probe_features(side), probe_features(torch_side)) < CLOSE

    def test_describe_themselves_as_torchs_do(self, torch_side, onnx_side):
        assert onnx_side.info == torch_side.info
        assert onnx_side.device == "cpu"
        assert "1 thread, onnxruntime" in onnx_side.description
        assert CPU in onnx_side.description

    @pytest.mark.parametrize(
        ("words", "kind"),
        [("Failed to allocate memory for requested buffer", OutOfMemory), ("boom", WorkerError)],
    )
    def test_a_failing_pass_is_named(self, onnx_side, monkeypatch, words, kind):
        class Failing:
            def run(self, *_):
                raise RuntimeError(words)

        monkeypatch.setattr(onnx_side, "_session", Failing())
        with pytest.raises(kind, match=words) as caught:
            onnx_side.features(digits(1))
        assert type(caught.value) is kind

    def test_of_a_graph_for_one_image_are_not_repeated(self, onnx_side, monkeypatch):
        class OfOne:
            def run(self, *_):
                return [np.zeros((1, 128), np.float32)]

        monkeypatch.setattr(onnx_side, "_session", OfOne())
        with pytest.raises(WorkerError, match=r"shape \(1, 128\), expected \(2, 128\)"):
            onnx_side.features(digits(2))


class TestExport:
    @pytest.mark.full
    def test_gives_the_graph_that_ships(self, exported, torch_side):
        """Otherwise: fcil-client backbone export embedded --out adapters/fcil_adapters/data."""
        folder, answer = exported
        fresh, shipped = (
            onnx.load(path, load_external_data=False)
            for path in (folder / f"{EMBEDDED}.onnx", embedded_file(".onnx"))
        )
        assert references(fresh) == references(shipped)
        assert [p.value for p in fresh.metadata_props] == [p.value for p in shipped.metadata_props]
        assert fresh.opset_import == shipped.opset_import
        assert answer["agreement"] < CLOSE
        assert answer["digest"] == torch_side.info.digest

    def test_weights_exist_once_and_other_tools_find_them(self, torch_side):
        """The graph alone, opened by its path, finds its weights in the safetensors file."""
        graph = embedded_file(".onnx")
        assert graph.stat().st_size < 100_000
        onnx.checker.check_model(str(graph))
        session, _ = open_session(graph, "cpu", 1, cache="test")
        images = probe_images(torch_side.info)
        (features,) = session.run(None, {"pixels": images})
        assert compare_probes(features, torch_side.features(images)) < CLOSE

    def test_says_nothing_of_the_machine_that_made_it(self):
        data = embedded_file(".onnx").read_bytes()
        for trace in (b"/home", b"/work", b"site-packages", b".py", b"pkg.torch"):
            assert trace not in data

    def test_leaves_other_weights_alone(self, tmp_path):
        other = {k: v * 2 for k, v in shipped_weights().items()}
        safetensors.numpy.save_file(other, tmp_path / f"{EMBEDDED}.safetensors")
        done = CliRunner().invoke(app, ["backbone", "export", "embedded", "--out", str(tmp_path)])
        assert done.exit_code == 4
        assert "exists already, with other weights" in done.output
        assert not (tmp_path / f"{EMBEDDED}.onnx").exists()


def references(model):
    return {
        tensor.name: (tuple(tensor.dims), {e.key: e.value for e in tensor.external_data})
        for tensor in model.graph.initializer
    }


def shipped_weights():
    return safetensors.numpy.load_file(embedded_file(".safetensors"))


class TestWeights:
    def test_others_of_the_same_shapes_are_told_by_their_digest(self, files):
        graph, weights = files
        state = shipped_weights()
        state["norm.bias"] = state["norm.bias"] + np.float32(1e-6)
        safetensors.numpy.save_file(state, weights)
        other = WeightsFile.open(weights).digest()
        with pytest.raises(DataError) as caught:
            load_onnx_backbone("embedded", graph)
        assert "a92a53a1f90b" in str(caught.value)
        assert other[:12] in str(caught.value)

    @pytest.mark.parametrize("change", ["missing", "one more", "other shape", "half precision"])
    def test_that_do_not_fit_the_graph_are_refused(self, files, change):
        graph, weights = files
        state = shipped_weights()
        if change == "missing":
            del state["norm.bias"]
        elif change == "one more":
            state["extra"] = np.zeros(3, np.float32)
        elif change == "other shape":
            state["norm.bias"] = np.zeros(3, np.float32)
        else:
            state["norm.bias"] = state["norm.bias"].astype(np.float16)
        safetensors.numpy.save_file(state, weights)
        with pytest.raises(DataError, match=r"cannot load|expected F32"):
            load_onnx_backbone("embedded", graph)

    def test_of_a_head_are_ignored(self, files, torch_side):
        graph, weights = files
        head = {"head.weight": np.zeros((2, 128), np.float32)}
        safetensors.numpy.save_file(shipped_weights() | head, weights)
        side = load_onnx_backbone("embedded", weights, "cpu")
        assert compare_probes(probe_features(side), probe_features(torch_side)) < CLOSE

    def test_inside_the_graph_are_refused(self, files):
        graph, _ = files
        model = onnx.load(graph)  # reads them in
        onnx.save(model, graph)
        with pytest.raises(DataError, match="cannot load"):
            load_onnx_backbone("embedded", graph)


class TestFiles:
    def test_a_graph_without_its_weights_names_the_file(self, files):
        graph, weights = files
        weights.unlink()
        with pytest.raises(DataError, match=f"there is no {weights}"):
            load_onnx_backbone("embedded", graph)

    def test_weights_without_a_graph_name_the_command(self, files):
        graph, weights = files
        graph.unlink()
        with pytest.raises(DataError, match="fcil-client backbone export"):
            load_onnx_backbone("embedded", weights)

    def test_a_graph_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(DataError, match=r"there is no graph .*nothing\.onnx"):
            load_onnx_backbone("embedded", tmp_path / "nothing.onnx")

    def test_another_backbone_needs_a_file(self):
        with pytest.raises(DataError, match=r"--weights vit_tiny_patch16_224\.onnx"):
            load_onnx_backbone("vit_tiny_patch16_224")

    @pytest.mark.parametrize("keep", [0, 1, 20_000, 47_000])
    def test_a_graph_cut_short_is_no_onnx_file(self, files, keep):
        graph, _ = files
        graph.write_bytes(graph.read_bytes()[:keep])
        with pytest.raises(DataError, match=r"is not an ONNX file, or is cut short|cannot load"):
            load_onnx_backbone("embedded", graph)

    def test_words_are_no_onnx_file(self, files):
        graph, _ = files
        graph.write_text("these are words")
        with pytest.raises(DataError, match="is not an ONNX file"):
            load_onnx_backbone("embedded", graph)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (None, "does not say which backbone it is"),
            ("[1", "is malformed"),
            ('{"format": 1, "backbone": {"name": 3}}', "is malformed"),
            ('{"format": 2}', "has the format 2, this fcil reads 1"),
        ],
    )
    def test_a_graph_that_says_something_else_of_itself_is_refused(self, files, text, words):
        graph, _ = files
        model = onnx.load(graph, load_external_data=False)
        model.ClearField("metadata_props")
        if text is not None:
            model.metadata_props.add(key=METADATA, value=text)
        graph.write_bytes(model.SerializeToString())
        with pytest.raises(DataError, match=words):
            load_onnx_backbone("embedded", graph)

    def test_another_opset_is_told_by_its_number(self, files):
        graph, _ = files
        model = onnx.load(graph, load_external_data=False)
        model.opset_import[0].version = 99
        graph.write_bytes(model.SerializeToString())
        with pytest.raises(DataError, match=r"onnxruntime 1.* cannot load .*not know opset 99"):
            load_onnx_backbone("embedded", graph)


class FakeRuntime:
    """onnxruntime with the providers of a GPU build, which may fail or silently fall back."""

    __version__ = "9.9"

    def __init__(self, providers, *, works=(CPU,), raises=()):
        self.providers, self.works, self.raises = providers, works, raises
        self.tried = []
        self.OrtValue = SimpleNamespace(ortvalue_from_numpy=lambda array: array)

    def get_available_providers(self):
        return self.providers

    def SessionOptions(self):
        return SimpleNamespace(
            add_session_config_entry=lambda *_: None, add_external_initializers=lambda *_: None
        )

    def InferenceSession(self, _model, _options, providers):
        self.tried.append(providers)
        if providers[0][0] in self.raises:
            raise RuntimeError("CUDA failure 35: driver version is insufficient")
        taken = [name for name, _ in providers if name in self.works]
        return SimpleNamespace(get_providers=lambda: taken)


class TestDevices:
    def open(self, monkeypatch, runtime, device):
        monkeypatch.setattr(onnx_session, "import_onnxruntime", lambda: runtime)
        return open_session(embedded_file(".onnx"), device, 2, cache="abc")[1]

    def test_auto_takes_the_gpu_if_it_works(self, monkeypatch):
        runtime = FakeRuntime([TENSORRT, CUDA, CPU], works=(TENSORRT, CUDA, CPU))
        chosen = self.open(monkeypatch, runtime, "auto")
        assert (chosen.provider, chosen.device) == (CUDA, "cuda:0")
        assert runtime.tried[0][0][1]["use_tf32"] == "0"

    @pytest.mark.parametrize("trouble", [{"works": (CPU,)}, {"raises": (CUDA,)}])
    def test_auto_goes_on_with_the_processor_and_says_why(self, monkeypatch, trouble):
        chosen = self.open(monkeypatch, FakeRuntime([CUDA, CPU], **trouble), "auto")
        assert chosen.device == "cpu"
        assert chosen.description.endswith(f"{CPU}, {CUDA} does not work here)")

    @pytest.mark.parametrize("trouble", [{"works": (CPU,)}, {"raises": (CUDA,)}])
    def test_a_device_that_was_asked_for_and_does_not_work_is_an_error(self, monkeypatch, trouble):
        with pytest.raises(ConfigError, match=r"'cuda:1' cannot be used with onnxruntime"):
            self.open(monkeypatch, FakeRuntime([CUDA, CPU], **trouble), "cuda:1")

    def test_the_number_of_the_gpu_is_passed_on(self, monkeypatch):
        runtime = FakeRuntime([CUDA, CPU], works=(CUDA, CPU))
        assert self.open(monkeypatch, runtime, "cuda:3").device == "cuda:3"
        assert runtime.tried[0][0][1]["device_id"] == "3"

    def test_tensorrt_keeps_its_engines_in_the_state_home(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        runtime = FakeRuntime([TENSORRT, CUDA, CPU], works=(TENSORRT, CUDA, CPU))
        assert self.open(monkeypatch, runtime, "tensorrt").provider == TENSORRT
        folder = tmp_path / "fcil" / "tensorrt" / "abc"
        assert runtime.tried[0][0][1]["trt_engine_cache_path"] == str(folder)
        assert folder.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "tensorrt"])
    def test_a_build_without_the_provider_is_named_with_what_it_has(self, device):
        with pytest.raises(ConfigError, match=rf"has no .*{CPU}"):
            open_session(embedded_file(".onnx"), device, cache="x")

    @pytest.mark.parametrize("device", ["abacus", "cuda:x", "cuda:", "tensorrt:1"])
    def test_an_unknown_device_is_named(self, device):
        with pytest.raises(ConfigError, match="unknown to onnxruntime"):
            open_session(embedded_file(".onnx"), device, cache="x")

    def test_threads_follow_the_environment_that_a_daemon_sets(self, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert onnx_session.default_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "many")
        assert onnx_session.default_threads() >= 1
