"""How browsers are let in from the command line: links on terminals only, and the end of sessions."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import webbrowser
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fcil_protocol.errors import DiskFull, KeyFileError, TrustError, UsageError
from fcil_protocol.process import control_socket
from fcil_server.cli import page as cli_page
from fcil_server.cli.main import app
from fcil_server.daemon import commands
from fcil_server.daemon.context import ServerContext
from fcil_server.daemon.page_access import page_link
from fcil_server.federation.directory import Federation
from fcil_server.federation.page_key import KEY_NAME, make_key
from fcil_server.federation.sections import FederationSection
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.storage.check import check
from fcil_server.web.page.access.links import PageLinks
from fcil_server.web.page.access.sessions import KeyedSessions
from fcil_server.web.supervisor import WebProcess, page_site

LINK = re.compile(r"(https?://[^/]+)/enter#([\w-]{43})")


class Place:
    """A federation with a server, as far as the page's commands look at it."""

    audit_done = ServerContext.audit_done

    def __init__(self, directory: Path, **page: Any) -> None:
        section = FederationSection(**{"page": "127.0.0.1:0", **page})
        self.federation = Federation.open(directory, None, ())
        self.ledger = self.federation.ledger
        self.config = SimpleNamespace(federation=section)
        self.links = PageLinks()
        self.page = WebProcess(directory, page_site(section), lambda *_: None)
        self.addresses = lambda: ["lab.example:7710"]
        self.commands = commands.Commands(self, None, None, None, None)  # type: ignore[arg-type]
        make_key(directory)

    def audited(self) -> list[tuple[str, str, str]]:
        return [(row.actor, row.action, row.detail) for row in self.ledger.audit.newest()]

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return asyncio.run(self.commands.answer(op, {"uid": 7, **fields}))

    def running(self, work: Callable[[], Any]) -> Any:
        """Do something while the control socket answers."""

        async def both() -> Any:
            door = await control_socket.serve(self.federation.directory, self.commands.answer)
            try:
                return await asyncio.to_thread(work)
            finally:
                door.close()

        return asyncio.run(both())

    def close(self) -> None:
        self.page.close()
        self.federation.close()


@pytest.fixture
def place(tmp_path: Path):
    made = Place(tmp_path / "federation")
    yield made
    made.close()


def command(place: Place, *arguments: str) -> tuple[str, str]:
    directory = str(place.federation.directory)
    done = CliRunner().invoke(app, ["page", "--dir", directory, *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


# --- links ----------------------------------------------------------------------------------


def test_the_command_prints_a_link_that_lets_one_browser_in_once(place: Place) -> None:
    out, err = place.running(lambda: command(place))
    origin, token = LINK.fullmatch(out.strip()).groups()
    assert origin == place.page.origin("127.0.0.1")
    assert "once, within 24 hours" in err
    assert place.ask("page_enter", token=token, **{"from": "192.0.2.1"}) == {"ok": True}
    with pytest.raises(TrustError):
        place.ask("page_enter", token=token)
    assert [action for _, action, _ in place.audited()] == ["page_link", "page_enter"]
    assert place.audited()[-1] == ("uid 7", "page_enter", "from 192.0.2.1")
    ledger = place.federation.directory / LEDGER_NAME
    for file in (ledger, *ledger.parent.glob(f"{LEDGER_NAME}-*")):
        assert token.encode() not in file.read_bytes()


def test_a_full_disk_lets_nobody_in_and_costs_no_link(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = LINK.search(place.ask("page_link")["url"])[2]

    def full(*_: object) -> None:
        raise DiskFull("no space is left.")

    with monkeypatch.context() as now:
        now.setattr(place.ledger.audit, "add", full)
        with pytest.raises(DiskFull):
            place.ask("page_enter", token=token)
    assert place.ask("page_enter", token=token) == {"ok": True}


def test_machines_can_ask_for_a_link(place: Place) -> None:
    out, _ = place.running(lambda: command(place, "--json"))
    data = json.loads(out)["data"]
    assert LINK.fullmatch(data["url"])
    assert datetime.fromisoformat(data["expires"]).tzinfo is not None


def test_a_browser_is_led_there_by_a_file_of_this_users_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, int]] = []

    def opens(url: str) -> bool:
        file = Path(url.removeprefix("file://"))
        seen.append((url, file.read_text(), stat.S_IMODE(file.stat().st_mode)))
        return True

    monkeypatch.setattr(webbrowser, "open", opens)
    monkeypatch.setattr(cli_page, "OPENING_S", 0.0)
    out, err = place.running(lambda: command(place, "--open"))
    ((url, text, mode),) = seen
    token = LINK.search(text)[2]
    assert token not in url + out + err, "other users see what a program is called with"
    assert mode == 0o600
    assert not Path(url.removeprefix("file://")).parent.exists()
    assert place.ask("page_enter", token=token)


def test_without_a_browser_the_link_is_printed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    out, err = place.running(lambda: command(place, "--open"))
    assert LINK.fullmatch(out.strip())
    assert "No browser" in err


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        ("[::1]:0", "[::1]"),
        ("0.0.0.0:0", "lab.example"),
        ("localhost:0", "localhost"),
    ],
)
def test_a_link_names_a_host_that_browsers_find(tmp_path: Path, address: str, told: str) -> None:
    made = Place(tmp_path / "federation", page=address)
    try:
        url = page_link(made, "uid 7")["url"]  # type: ignore[arg-type]
    finally:
        made.close()
    assert url.startswith(f"http://{told}:")


def test_a_server_without_a_page_says_how_to_serve_one(tmp_path: Path) -> None:
    made = Place(tmp_path / "federation", page="")
    try:
        for op in ("page_link", "page_enter"):
            with pytest.raises(UsageError, match="serves no dashboard") as told:
                made.ask(op)
            assert "serve --page" in told.value.action
    finally:
        made.close()


class Terminal:
    def __init__(self, *, real: bool) -> None:
        self.isatty = lambda: real


@pytest.mark.parametrize("real", [True, False])
def test_the_first_link_goes_to_a_terminal_and_nowhere_else(
    place: Place, monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(cli_page.sys, "stderr", Terminal(real=real))
    monkeypatch.setattr(cli_page.typer, "echo", lambda text, **_: said.append(text))
    cli_page.show_first_link(place)  # type: ignore[arg-type]
    assert [bool(LINK.search(text)) for text in said] == ([True] if real else [])
    assert len(place.links._open) == len(said), "what nobody sees is not made"


def test_a_full_disk_costs_the_first_link_and_not_the_server(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFull("the disk is full.")

    said: list[str] = []
    monkeypatch.setattr(place.ledger.audit, "add", full)
    monkeypatch.setattr(cli_page.sys, "stderr", Terminal(real=True))
    monkeypatch.setattr(cli_page.typer, "echo", lambda text, **_: said.append(text))
    cli_page.show_first_link(place)  # type: ignore[arg-type]
    assert "the disk is full" in said[0]
    assert not LINK.search(said[0])


# --- sessions -------------------------------------------------------------------------------


def test_signing_out_ends_all_sessions_and_voids_all_links(place: Place) -> None:
    keyed = KeyedSessions(place.federation.directory)
    cookies = {keyed.current().cookie: keyed.current().begin()}
    token = LINK.search(place.ask("page_link")["url"])[2]
    assert keyed.of(cookies)
    place.running(lambda: command(place, "--sign-out"))
    assert keyed.of(cookies) is None
    with pytest.raises(TrustError):
        place.ask("page_enter", token=token)
    assert place.audited()[-1][1] == "page_sign_out"


def test_signing_out_needs_no_running_server(tmp_path: Path) -> None:
    place = Place(tmp_path / "federation")
    keyed = KeyedSessions(place.federation.directory)
    cookies = {keyed.current().cookie: keyed.current().begin()}
    place.close()
    command(place, "--sign-out")
    assert keyed.of(cookies) is None
    with Ledger(place.federation.directory / LEDGER_NAME, read_only=True) as ledger:
        assert ledger.audit.newest()[-1].action == "page_sign_out"


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    make_key(tmp_path)
    made = (tmp_path / KEY_NAME).read_bytes()
    make_key(tmp_path)
    assert (tmp_path / KEY_NAME).read_bytes() == made
    assert len(made) == 32
    assert stat.S_IMODE((tmp_path / KEY_NAME).stat().st_mode) == 0o600


def open_to_others(path: Path) -> None:
    path.chmod(0o644)


def cut_short(path: Path) -> None:
    path.write_bytes(b"x" * 31)


@pytest.mark.parametrize(
    ("harm", "words"), [(open_to_others, "others can use"), (cut_short, "31 bytes, expected 32")]
)
def test_a_key_that_is_no_good_is_refused_and_found_by_check(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    directory = tmp_path / "federation"
    place = Place(directory)
    place.close()  # a check waits for a federation that is open
    assert not [f for f in check(directory) if KEY_NAME in f.text]
    harm(directory / KEY_NAME)
    with pytest.raises(KeyFileError, match=words):
        make_key(directory)
    assert [f.about for f in check(directory) if words in f.text] == ["keys"]


def test_what_the_page_asks_for_is_audited_as_the_pages() -> None:
    assert commands._actor({"uid": 7, "by": "page"}) == "uid 7, page"
    assert commands._actor({"uid": 7, "by": "somebody"}) == "uid 7"
