"""The processes behind the server's HTTP doors: checked at the start, started again at their end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fcil_protocol.errors import ConfigError
from fcil_server.federation.sections import FederationSection
from fcil_server.web import supervisor
from fcil_server.web.supervisor import WebProcess, WebProgram, api_site, figures_site, page_site
from orphans import ends_with_its_parent

SITES = {"metrics": figures_site, "page": page_site, "api": api_site}


def site(key: str, address: str, **given) -> WebProgram:
    return SITES[key](FederationSection(**{key: address}, **given))


def process(key: str, address: str, **given) -> WebProcess:
    return WebProcess(Path("federation"), site(key, address, **given), lambda *_: None)


def words(key: str, **given) -> list[str]:
    """Return what the process would be started with."""
    made = process(key, "127.0.0.1:0", **given)
    try:
        return made._command(3)[1:]
    finally:
        made.close()


@pytest.mark.parametrize("key", SITES)
def test_without_an_address_there_is_no_door(key: str) -> None:
    made = process(key, "")
    assert (made.describe(), made.address, made.served) == (None, "", False)
    asyncio.run(made.run())  # nothing to keep running
    made.close()


@pytest.mark.parametrize(
    ("key", "what"), [("metrics", "metrics"), ("page", "the dashboard"), ("api", "the HTTP API")]
)
@pytest.mark.parametrize("given", ["cert", "key"])
def test_a_certificate_without_an_address_is_refused(key: str, what: str, given: str) -> None:
    with pytest.raises(ConfigError, match=f"no address of {what}") as told:
        process(key, "", **{f"{key}_{given}": "c.pem"})
    assert f"--{key} 127.0.0.1:" in told.value.action


@pytest.mark.parametrize(("key", "first"), [("metrics", "prometheus_client"), ("page", "jinja2")])
def test_missing_packages_are_named_before_anything_listens(
    key: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{key} needs the packages {first}, starlette"):
        process(key, "127.0.0.1:0")


def test_the_page_needs_what_writes_figures_only_if_it_shows_them() -> None:
    assert "prometheus_client" not in site("page", "127.0.0.1:0").packages
    assert "prometheus_client" in site("page", "127.0.0.1:0", page_metrics=True).packages


@pytest.mark.parametrize("key", SITES)
def test_a_bad_certificate_is_told_before_anything_listens(key: str, tmp_path: Path) -> None:
    given = {f"{key}_cert": str(tmp_path / "c.pem"), f"{key}_key": "k.pem"}
    with pytest.raises(ConfigError, match="cannot read the certificate"):
        process(key, "0.0.0.0:0", **given)


def test_what_the_configuration_says_of_the_page_reaches_its_process() -> None:
    place = ["--dir", str(Path("federation").resolve()), "--fd", "3"]
    program = ["-P", "-m", "fcil_server.web.page.server", *place]
    assert words("page") == [*program, "--health", "--clients", "0"]
    more = {"page_read_only": True, "page_metrics": True, "page_health": False}
    given = words("page", **more, page_beside=["a", "b"], metrics_clients=7)
    read_only, figures = ["--read-only", "--metrics"], ["--clients", "7"]
    assert given == [*program, *read_only, *figures, "--beside", "a", "--beside", "b"]


def test_the_status_says_where_the_page_is_and_what_it_may() -> None:
    made = process("page", "127.0.0.1:0", page_read_only=True)
    port = made._socket.getsockname()[1]
    told = {"address": f"http://127.0.0.1:{port}", "pid": None, "read_only": True}
    assert made.describe() == told
    assert made.origin("lab.example") == f"http://lab.example:{port}"
    assert made.origin("2001:db8::1") == f"http://[2001:db8::1]:{port}"
    made.close()


def test_a_process_that_ends_again_and_again_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    made = process("metrics", "127.0.0.1:0")
    enough = asyncio.Event()

    def say(_level: str, _code: str, text: str) -> None:
        said.append(text)
        if len(said) == 6:
            enough.set()

    made._notify = say
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.001, 0.002, 0.003))
    monkeypatch.setattr(made, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])

    async def until_five_ends() -> None:
        task = asyncio.create_task(made.run())
        await asyncio.wait_for(enough.wait(), 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(until_five_ends())
    made.close()
    assert said[0].startswith("metrics are at http://127.0.0.1:")
    assert said[1] == (
        "the process that serves metrics ended with exit code 3; it is restarted in 0.001 s"
    )
    assert [text.rsplit(" ", 2)[1] for text in said[1:6]] == [
        "0.001",
        "0.002",
        "0.003",
        "0.003",
        "0.003",
    ]


def test_a_process_answers_what_is_under_way_before_it_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = process("page", "127.0.0.1:0")
    begun, told = tmp_path / "begun", tmp_path / "told"
    os.mkfifo(begun)

    def command(_fd: int) -> list[str]:
        story = f"open({str(begun)!r}, 'w'); open(0).read(); open({str(told)!r}, 'w')"
        return [sys.executable, "-IS", "-c", story]

    monkeypatch.setattr(made, "_command", command)

    async def until_the_server_ends() -> None:
        task = asyncio.create_task(made.run())
        await asyncio.to_thread(begun.read_text)  # it runs
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(until_the_server_ends())
    made.close()
    assert told.exists()


SERVER = """
import asyncio
from pathlib import Path
from fcil_server.federation.sections import FederationSection
from fcil_server.web import supervisor

made = supervisor.WebProcess(
    Path({place!r}),
    supervisor.{site}(FederationSection({key}="127.0.0.1:0")),
    lambda *_: None,
)

async def serve():
    running = asyncio.create_task(made.run())
    port = made.address.split(":")[2].partition("/")[0]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")
    await reader.readline()  # it works, and the connection stays open
    print(made.describe()["pid"], flush=True)
    await running

asyncio.run(serve())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "key",
    [
        "api",
        pytest.param("metrics", marks=pytest.mark.full),
        pytest.param("page", marks=pytest.mark.full),
    ],
)
def test_a_process_ends_with_a_server_that_is_killed(key: str, tmp_path: Path) -> None:
    ends_with_its_parent(SERVER.format(place=str(tmp_path), key=key, site=SITES[key].__name__))
