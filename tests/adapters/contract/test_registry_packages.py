"""Methods of other packages: found by their metadata, broken ones named, doubles refused."""

import shutil
import sys
from dataclasses import replace

import pytest

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.manifest_checks import check_manifest
from fcil_adapters.contract.registry import (
    load_half,
    load_method,
    make_hparams,
    method_names,
    package_of,
)
from fcil_protocol.errors import ConfigError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that installs a package with one method."""

    def install(name, method, module, text):
        site = tmp_path / name
        info = site / f"{name}-3.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
        (info / "entry_points.txt").write_text(f"[fcil.methods]\n{method} = {module}:METHOD\n")
        (site / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


COPY = """
from dataclasses import replace
from fcil_adapters.methods.running_mean import METHOD as OTHER
METHOD = replace(OTHER, name="{}")
"""


def test_a_method_is_found_with_the_package_that_brings_it(package):
    package("twin_pack", "twin", "twin_module", COPY.format("twin"))
    assert "twin" in method_names()
    assert load_method("twin").name == "twin"
    assert package_of("twin") == "twin_pack 3.1"
    assert package_of("running_mean").startswith("fcil ")
    assert package_of("nobodys") == ""


@pytest.mark.parametrize("fault", ["1 / 0", "import no_such_module", "x =", "raise SystemError"])
def test_a_package_that_cannot_be_imported_is_named_whatever_it_raises(package, fault):
    package("bad_pack", "bad", "bad_module", fault)
    with pytest.raises(
        ConfigError, match=r"the method 'bad' \(bad_module:METHOD\) cannot be"
    ) as at:
        load_method("bad")
    assert "/bad_pack/bad_module.py:1 if the method is yours" in at.value.action


def test_a_module_that_is_missing_has_no_place_of_its_fault(package):
    package("bad_pack", "bad", "bad_module", "")
    package("lost_pack", "lost", "lost_module.inside", "")
    with pytest.raises(ConfigError, match="No module named 'lost_module'") as at:
        load_method("lost")
    assert at.value.action == "Install its package again."


def test_an_entry_point_of_another_name_than_the_method_is_refused(package):
    package("twin_pack", "twin", "twin_module", COPY.format("other"))
    with pytest.raises(ConfigError, match="not its manifest: found the manifest of 'other'"):
        load_method("twin")


def test_a_manifest_under_another_name_is_asked_for_by_the_one_of_the_entry_point(package):
    package("twin_pack", "twin", "twin_module", COPY.format("twin").replace("METHOD =", "MINE ="))
    with pytest.raises(ConfigError, match="'twin_module' has no attribute 'METHOD'") as at:
        load_method("twin")
    assert at.value.action.startswith("Name the manifest METHOD in twin_module, or correct")


def test_a_half_that_was_renamed_is_named(package):
    package("twin_pack", "twin", "twin_module", COPY.format("twin"))
    with pytest.raises(ConfigError, match="names twin_module:Learner, but .* no 'Learner'") as at:
        load_half("twin_module:Learner")
    assert "/twin_pack/twin_module.py" in at.value.action


def test_two_packages_with_one_name_are_refused_and_both_named(package):
    """Which of them is found first depends on the machine."""
    package("twin_pack", "running_mean", "twin_module", COPY.format("running_mean"))
    with pytest.raises(ConfigError, match=r"fcil .* and twin_pack 3.1 both offer"):
        load_method("running_mean")


def test_a_method_that_comes_and_goes_while_a_program_runs_is_noticed(package, tmp_path):
    package("first_pack", "first", "first_module", COPY.format("first"))
    assert "second" not in method_names()
    info = tmp_path / "first_pack" / "second_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second_pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fcil.methods]\nsecond = first_module:METHOD\n")
    assert {"first", "second"} <= set(method_names())
    shutil.rmtree(info)
    assert "second" not in method_names()


# --- manifests that load and are wrong ------------------------------------------------------

OWN = """
from dataclasses import replace
from pydantic import Field
from fcil_adapters.contract import Exchange, Hparams, Kind, Method, PayloadSchema, TensorSpec
from fcil_adapters.numerics.class_reports import count_spec


class Options(Hparams):
    share: float = Field(default=0.5, le=1)


def exchanges(options, backbone):
    peak = TensorSpec("peak", Kind.PROTOTYPE, ("c", "d"))
    return (Exchange("train", PayloadSchema((peak, count_spec("n", 1)))),)


def broadcast(options, backbone):
    return {"current": PayloadSchema((TensorSpec("peak", Kind.PROTOTYPE, ("c", "d")),))}


def dims(options, backbone, task):
    return {"c": len(task.classes), "d": backbone.dim}


class Learner: ...
class Aggregator: ...
class Model: ...


METHOD = Method(
    name="own", version="1", title="", citation="", hparams=Options, exchanges=exchanges,
    broadcast=broadcast, dims=dims, learner="own_module:Learner",
    aggregator="own_module:Aggregator", model="own_module:Model",
)
"""


ONE = 'Exchange("train", PayloadSchema((peak, count_spec("n", 1))))'  # of them


@pytest.fixture
def own(package):
    """Return a function that installs a method with one mistake, and loads it."""

    def install(right="", wrong=""):
        assert right in OWN
        package("own_pack", "own", "own_module", OWN.replace(right, wrong, 1))
        return load_method("own")

    return install


@pytest.mark.parametrize("name", method_names())
def test_the_manifests_of_installed_methods_are_in_order(name):
    check_manifest(load_method(name), backbone_by_name("embedded"))


def test_a_manifest_without_a_mistake_is_in_order(own):
    check_manifest(own(), NO_BACKBONE)


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("exchanges=exchanges", "exchanges=lambda o, b: [o]", "a tuple of Exchange, got list of"),
        ("broadcast=broadcast", "broadcast=lambda o, b: 3", "mapping of PayloadSchema, got int"),
        ("(peak, count", "(peak, peak, count", "'train': tensor 'peak' is declared 2 times"),
        ("Kind.PROTOTYPE", '"prototipe"', "'peak' is of kind 'prototipe', allowed are lora"),
        ("Kind.PROTOTYPE", '"prototype"', "has its kind as text, expected Kind.PROTOTYPE"),
        ('"d"))\n    return (', '"d"), max_abs=1e999)\n    return (', "'peak' has no finite bound"),
        ('("c", "d"))\n', '(1.5, "d"))\n', "size 1.5 is neither a whole number nor a symbol"),
        ('Exchange("train"', 'Exchange("trian"', "'trian': its kind is none of prepare, train,"),
        ('count_spec("n", 1)', 'count_spec("n", "c")', "its upload lacks the samples used"),
        ("default=0.5", "default=5", "default: option 'share' of method own: Input should be"),
        ("default=0.5, ", "", "default: option 'share' of method own: Field required"),
        ("module:Learner", "module:Lerner", "no 'Lerner', did you mean 'Learner'?"),
        ("own_module:Model", "own_modul:Model", "model: there is no module 'own_modul'"),
        ("own_module:Model", "own_module", "'own_module' does not have the form package.mod"),
        ("len(task.classes)", "task.classes", "expected a dict of whole numbers, got dict of int"),
    ],
)
def test_a_mistake_in_a_manifest_is_named_with_its_method(own, right, wrong, words):
    with pytest.raises(ConfigError, match="the manifest of the method 'own' is wrong: ") as at:
        check_manifest(own(right, wrong), NO_BACKBONE)
    assert words in at.value.message
    assert "if the method is yours" in at.value.action


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (f"return ({ONE},)", f"return [{ONE}]"),
        ("len(task.classes)", "__import__('numpy').int64(len(task.classes))"),
        ("class Learner: ...", "globals()['Learner'] = object"),
        ("own_module:Learner", "own_gpu.learner:Learner"),
    ],
)
def test_other_ways_to_say_it_are_in_order(own, right, wrong, tmp_path):
    """Among them a half in a package that cannot be imported here, such as one for GPUs."""
    method = own(right, wrong)
    where = tmp_path / "own_pack" / "own_gpu"
    where.mkdir()
    (where / "__init__.py").write_text("raise RuntimeError('no driver')")
    (where / "learner.py").write_text("class Learner: ...")
    check_manifest(method, NO_BACKBONE)


def test_options_that_do_not_fit_the_backbone_are_no_mistake_of_the_manifest():
    method = load_method("plora")
    shallow = replace(backbone_by_name("embedded"), depth=1)
    check_manifest(method, shallow)
    with pytest.raises(ConfigError, match="block 1 does not exist"):
        method.exchanges(method.hparams(), shallow)


def test_an_option_that_is_given_needs_no_default(own):
    method = own("default=0.5, ", "")
    check_manifest(method, NO_BACKBONE, method.hparams(share=0.25))


def test_a_mistake_in_a_schema_is_named_with_the_function_that_returns_it(own):
    method = own('count_spec("n", 1)))),)', 'count_spec("n", 1)))))')
    with pytest.raises(ConfigError, match=r"exchanges \(.*/own_pack/own_module.py:12\): expected"):
        check_manifest(method, NO_BACKBONE)


@pytest.mark.parametrize(
    ("right", "wrong", "line", "words"),
    [
        ("task.classes", "task.clases", 22, "AttributeError: 'TaskInfo' object has no attribute"),
        ("(peak, count", "(peek, count", 14, "NameError: name 'peek' is not defined"),
        ("return {", "return 1 / 0, {", 18, "ZeroDivisionError: division by zero"),
    ],
)
def test_an_exception_in_a_manifests_function_is_the_methods_with_its_line(
    own, right, wrong, line, words
):
    with pytest.raises(
        ConfigError, match=f"the manifest of the method 'own' fails with {words}"
    ) as at:
        check_manifest(own(right, wrong), NO_BACKBONE)
    assert f"/own_pack/own_module.py:{line} if the method is yours" in at.value.action


def test_an_exception_in_a_check_of_options_is_the_methods_with_its_line(own):
    """pydantic takes what is no ValueError for nobody's fault."""
    wrong = """le=1)

    def model_post_init(self, _):
        self.missing["gamma"]"""
    method = own("le=1)", wrong)
    with pytest.raises(ConfigError, match="the manifest of the method 'own' fails with") as at:
        make_hparams(method, {})
    assert "/own_pack/own_module.py:12 if the method is yours" in at.value.action
