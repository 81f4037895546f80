"""Methods of other packages: found by their metadata, broken ones named, doubles refused."""

import shutil
import sys

import pytest

from fcil_adapters.contract.registry import load_method, method_names, package_of
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
    with pytest.raises(ConfigError, match="not its manifest"):
        load_method("twin")


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
