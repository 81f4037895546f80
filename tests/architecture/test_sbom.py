"""The software bill of materials: what is installed for fcil, and nothing else."""

import json
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
import zmq
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sbom"


def sbom(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bill(tmp_path_factory):
    path = tmp_path_factory.mktemp("sbom") / "sbom.json"
    done = sbom("--output", str(path))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return json.loads(path.read_bytes())


def versions(bill):
    return {c["name"]: c["version"] for c in bill["components"]}


def test_it_is_cyclonedx_about_fcil(bill):
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    about = bill["metadata"]["component"]
    assert (about["name"], about["version"]) == ("fcil", version("fcil"))


@pytest.mark.parametrize("name", ["torch", "pyzmq", "cryptography", "safetensors", "timm"])
def test_it_lists_what_is_installed_with_versions(bill, name):
    assert versions(bill)[name] == version(name)


def test_it_lists_the_libraries_that_face_the_network(bill):
    assert versions(bill)["libzmq"] == zmq.zmq_version()
    assert versions(bill)["OpenSSL"][0].isdigit()


def test_it_lists_what_the_page_brings_into_a_browser(bill):
    listed = {c["name"]: c["licenses"][0]["license"]["id"] for c in bill["components"]
              if c.get("purl", "").startswith("pkg:npm/")}  # fmt: skip
    assert listed == {"uplot": "MIT", "idiomorph": "0BSD"}


def test_every_package_can_be_looked_up(bill):
    for component in bill["components"]:
        if component["name"] not in ("libzmq", "OpenSSL", "uplot", "idiomorph"):
            name = canonicalize_name(component["name"])
            assert component["purl"].startswith(f"pkg:pypi/{name}@")


def test_whatever_fcil_needs_is_there_and_tools_for_development_are_not(bill):
    names = {canonicalize_name(name) for name in versions(bill)}
    for text in distribution("fcil").requires:
        need = Requirement(text)
        if need.marker is None:
            assert canonicalize_name(need.name) in names
    assert not names & {"pytest", "ruff", "mypy", "hypothesis", "atheris", "cyclonedx-python-lib"}


def test_it_says_who_needs_what(bill):
    needs = {d["ref"]: d.get("dependsOn", []) for d in bill["dependencies"]}
    assert f"pyzmq=={version('pyzmq')}" in needs[bill["metadata"]["component"]["bom-ref"]]
    known = {c["bom-ref"] for c in bill["components"]}
    assert {ref for others in needs.values() for ref in others} <= known


def test_without_extras_there_is_no_torch():
    done = sbom("--extras", "")
    assert done.returncode == 0, done.stderr
    assert "torch" not in versions(json.loads(done.stdout))


def test_an_unknown_extra_is_said():
    done = sbom("--extras", "nonsense")
    assert done.returncode == 4
    assert "nonsense" in done.stderr


@pytest.mark.full
def test_it_is_the_same_bytes_for_the_same_release(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one, other = sbom(), sbom()
    assert one.stdout == other.stdout
    assert '"timestamp": "2023-11-14T22:13:20+00:00"' in one.stdout
