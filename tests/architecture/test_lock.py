"""requirements.lock is that of constraints.txt and pyproject.toml, and holds what it should."""

import re
import tomllib
from pathlib import Path

import locked

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PROJECT_TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PROJECT_TEXT)["project"]
EXTRAS = PROJECT["optional-dependencies"]
STALE = "run python3 scripts/lock"


def first_names(requirements):
    return {locked.normal(re.match(r"[\w.-]+", r)[0]) for r in requirements}


def pins(text):
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    return {locked.normal(name): version for name, version in found}


def test_versions_are_those_of_the_constraints():
    stated = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert stated.keys() >= locked.UNLOCKED, "scripts/venv takes torch's version from there"
    kept = {name: v for name, v in stated.items() if name not in locked.UNLOCKED}
    assert pins(LOCK) == kept, STALE


def test_every_package_has_digests_and_is_read():
    found = locked.blocks(LOCK)
    assert {name for _, name, _ in found} == pins(LOCK).keys()
    for _, name, text in found:
        assert re.fullmatch(r"\S+ (\\\n    --hash=sha256:[0-9a-f]{64} ?)+\n", text), name


def test_what_is_required_directly_is_marked_with_its_extra():
    marked = {name: needs for needs, name, _ in locked.blocks(LOCK)}
    assert all("fcil" in marked[name] for name in first_names(PROJECT["dependencies"])), STALE
    for extra, requirements in EXTRAS.items():
        for name in first_names(requirements) & marked.keys():
            assert marked[name] & {"fcil", extra}, f"{name} of {extra}: {STALE}"


def test_only_extras_for_few_have_packages_that_are_not_locked():
    assert locked.unlocked(list(EXTRAS), LOCK, PROJECT_TEXT) == [
        "edge-gpu",
        "hub",
        "mlflow",
        "wandb",
        "otel",
        "contract",
    ]


def test_it_names_no_host_and_no_path():
    assert "://" not in LOCK
    assert "/" not in re.sub(r"^#.*", "", LOCK, flags=re.MULTILINE)


def test_what_the_tests_need_on_every_python_is_locked():
    assert pins(LOCK).keys() >= locked.TESTS


def test_every_python_that_is_allowed_is_claimed_and_no_other():
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    allowed = [f"3.{minor}" for minor in range(int(low), int(high))]
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert claimed == allowed
    script = (ROOT / "scripts" / "venv").read_text(encoding="utf-8")
    assert f"(3, {low}) <= sys.version_info < (3, {high})" in script
    assert f"Python {allowed[0]} to {allowed[-1]};" in script
