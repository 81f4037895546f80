"""The systemd units: whole, hardened, and in step with how the daemons behave."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from deploy.kit import UNITS, unit
from fcil_protocol.errors import ConfigError, TrustError, UsageError

SYSTEM = [path for path in UNITS if path.parent.name != "user"]
MOST_EXPOSED = 1.6  # of 10; a unit that does nothing about it has 9.6
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def name(path) -> str:
    return path.name


@pytest.fixture
def here(tmp_path):
    """Lay a unit out so that its program exists, as on a machine where fcil is installed."""

    def lay(path) -> str:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"/opt/fcil/bin/fcil-\w+", "/bin/true", text)
        (tmp_path / path.name).write_text(text, encoding="utf-8")
        return str(tmp_path / path.name)

    return lay


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, check=False)


@needs_systemd
@pytest.mark.parametrize("path", SYSTEM, ids=name)
def test_systemd_finds_nothing_wrong_with_a_unit(path, here):
    found = analyze("verify", "--man=no", here(path))
    assert (found.returncode, found.stderr) == (0, "")


@needs_systemd
def test_systemd_finds_nothing_wrong_with_a_users_unit(here, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a user's manager is not needed
    (path,) = [p for p in UNITS if p.parent.name == "user"]
    found = analyze("verify", "--user", "--man=no", here(path))
    assert (found.returncode, found.stderr) == (0, "")


@needs_systemd
def test_systemd_finds_what_is_wrong_with_one(here, tmp_path):
    path = tmp_path / "wrong" / "fcil-server.service"
    path.parent.mkdir()
    text = SYSTEM[0].read_text(encoding="utf-8")
    path.write_text(text.replace("WatchdogSec=", "WatchDog="), encoding="utf-8")
    assert "WatchDog" in analyze("verify", "--man=no", here(path)).stderr


@needs_systemd
@pytest.mark.parametrize("path", SYSTEM, ids=name)
def test_a_unit_is_hardly_exposed(path, here):
    found = analyze("security", "--offline=true", "--no-pager", here(path))
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", found.stdout)
    assert match, found.stderr
    assert float(match[1]) <= MOST_EXPOSED


@pytest.mark.parametrize("path", UNITS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_unit_waits_for_ready_and_watches(path):
    found = unit(path)
    assert found["Type"] == ["notify"]  # Service.ready, Service._alive
    assert found["NotifyAccess"] == ["main"]  # never the worker
    assert found["KillMode"] == ["mixed"]  # the daemon ends its worker itself
    assert found["OOMPolicy"] == ["continue"]  # a worker that is killed is replaced
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert found["Restart"] == ["on-failure"]
    assert found["UMask"] == ["0077"]
    assert found["WatchdogSec"] == ["2min"]


@pytest.mark.parametrize("path", UNITS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_unit_is_not_started_again_where_that_cannot_help(path):
    (codes,) = unit(path)["RestartPreventExitStatus"]
    wanted = {ConfigError.exit_code, UsageError.exit_code}
    if "server" not in path.name:  # the server's 2 is a port that is in use, which may end
        wanted.add(TrustError.exit_code)
    assert {int(c) for c in codes.split()} == wanted


@pytest.mark.parametrize("path", SYSTEM, ids=name)
def test_what_a_unit_keeps_lies_where_it_may_write(path):
    found = unit(path)
    (state,), (cache,) = found["StateDirectory"], found["CacheDirectory"]
    places = " ".join(found["Environment"]).split()
    assert f"XDG_STATE_HOME=/var/lib/{state}" in places
    assert f"XDG_CACHE_HOME=/var/cache/{cache}" in places
    assert found["WorkingDirectory"] == [f"/var/lib/{state}"]
    assert found["StateDirectoryMode"] == found["CacheDirectoryMode"] == ["0700"]


@pytest.mark.parametrize("path", SYSTEM, ids=name)
def test_only_the_unit_without_torch_forbids_what_torch_needs(path):
    found = unit(path)
    edge = path.name == "fcil-edge.service"
    assert ("MemoryDenyWriteExecute" in found) is edge
    assert ("PrivateDevices" in found) is edge
    assert ("ORT_DISABLE_TELEMETRY=1" in found["Environment"]) is edge


@pytest.mark.parametrize("path", [p for p in SYSTEM if "server" not in p.name], ids=name)
def test_a_ticket_is_handed_over_as_a_credential(path):
    found = unit(path)
    (credential,) = found["LoadCredential"]
    place = "/etc/fcil/%i.ticket" if "@" in path.name else "/etc/fcil/client.ticket"
    assert credential == f"ticket:{place}"
    assert found["ExecStart"][0].endswith("--ticket ${CREDENTIALS_DIRECTORY}/ticket")
