"""What the browser tests share: a Chromium that notes every fault of a page, and doors to it."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request

from fcil_protocol.process.children import ChildProcess, module_command
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.web.http_server import open_listener
from fcil_server.web.page.access.sessions import KeyedSessions

ARTEFACTS = Path(__file__).parents[2] / "test-artefacts" / "page"
DESK, PHONE = (1280, 900), (375, 800)  # CSS pixels
WAIT_MS = 45_000  # for what the page is to show; machines are shared
SECTIONS = (
    "head",
    "now",
    "accuracy",
    "training",
    "clients",
    "rounds",
    "bytes",
    "seconds",
    "tasks",
    "events",
    "configuration",
)
# All sandboxes of Chromium need what root, and most containers, do not have.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


def chromium() -> str:
    """Return the path of the system's Chromium.

    Raises:
        LookupError: there is none.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("FCIL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise LookupError("no Chromium found: install one, or set FCIL_CHROMIUM to its path.")
    return found


@dataclass
class Witness:
    """Notes what a page must never do; `check` fails if it did.

    Attributes:
        expected: patterns of console lines that the test itself provokes.
    """

    origin: str
    faults: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Listen to a page."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"script error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            where = message.location.get("url", "")
            self.faults.append(f"console {message.type}: {message.text} ({where})")

    def _dialog(self, dialog: Any) -> None:
        self.faults.append(f"a dialog opened: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if (
            parts.scheme not in {"data", "blob"}
            and f"{parts.scheme}://{parts.netloc}" != self.origin
        ):
            self.faults.append(f"a request left the origin: {request.url}")

    def expect(self, pattern: str) -> None:
        """Allow console lines that match."""
        self.expected.append(pattern)

    def check(self) -> None:
        """Fail if the page did anything of that."""
        bad = [f for f in self.faults if not any(re.search(p, f) for p in self.expected)]
        assert not bad, "\n".join(bad)


@dataclass
class Visit:
    """One browser (with its own cookies) at one door."""

    page: Page
    context: BrowserContext
    witness: Witness
    origin: str

    def section(self, name: str) -> Locator:
        """Return a section of the page."""
        return self.page.locator(f"section#{name}")

    def shot(self, name: str, *, whole: bool = True) -> None:
        """Keep a picture of what is seen now."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=whole, caret="initial")

    def look(self, name: str, *, whole: bool = True) -> None:
        """Keep pictures in light and dark, in both of which axe must find nothing."""
        faults = []
        for scheme in ("dark", "light"):
            self.page.emulate_media(color_scheme=scheme)
            self.shot(f"{name}-{scheme}", whole=whole)
            faults += [f"{scheme}: {fault}" for fault in axe_faults(self.page)]
        assert faults == []

    def ready(self) -> None:
        """Wait until the page is whole, and its scripts have drawn the charts."""
        self.page.wait_for_selector(f"section#{SECTIONS[-1]}")
        self.page.wait_for_function("() => performance.getEntriesByName('fcil-charts').length > 0")

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """Post JSON as a foreign program with this browser's cookies would."""
        return self.context.request.post(
            f"{self.origin}{path}", data=body, headers=dict(headers or {})
        )


class Chromium:
    """Opens visits, and checks all of them at the end of a test."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.visits: list[Visit] = []

    def visit(
        self,
        origin: str,
        *,
        cookie: tuple[str, str] | None = None,
        dark: bool = False,
        size: tuple[int, int] = DESK,
        **extra: Any,
    ) -> Visit:
        """Return a fresh browser's first page; nothing is loaded yet."""
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            **extra,
        )
        context.set_default_timeout(WAIT_MS)
        if cookie is not None:
            name, value = cookie
            context.add_cookies([{"name": name, "value": value, "url": origin}])
        page = context.new_page()
        visit = Visit(page, context, Witness(origin), origin)
        visit.witness.watch(page)
        self.visits.append(visit)
        return visit

    def close(self) -> None:
        """Close all visits; what they did is still known."""
        for visit in self.visits:
            visit.context.close()

    def check(self) -> None:
        """Fail if one of the pages misbehaved."""
        for visit in self.visits:
            visit.witness.check()


# Doors.


@dataclass
class Door:
    """The page's process over a directory, without a server: what it shows is the ledger's."""

    directory: Path
    origin: str

    def cookie(self) -> tuple[str, str]:
        """Return a cookie that lets a browser in."""
        sessions = KeyedSessions(self.directory).current()
        return sessions.cookie, sessions.begin()


@contextmanager
def ledger_door(directory: Path, build: Callable[[Path], Ledger], *options: str) -> Iterator[Door]:
    """Serve the page over a ledger that ``build`` writes into the directory."""
    with ExitStack() as stack:
        directory.mkdir(parents=True, exist_ok=True)
        build(directory / LEDGER_NAME).close()
        key = directory / "page.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(32))
        listening = stack.enter_context(open_listener("127.0.0.1:0"))
        fd = listening.fileno()
        place = ("--dir", str(directory), "--fd", str(fd))
        command = module_command("fcil_server.web.page.server", *place, *options)
        process = ChildProcess(command, fds=(fd,))
        stack.callback(process.wait)
        stack.callback(process.kill)
        origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
        _until_it_answers(process, origin)
        yield Door(directory, origin)


def _until_it_answers(process: subprocess.Popen[bytes], origin: str) -> None:
    """Wait for the first answer, whatever it is; the socket takes calls before anybody hears."""
    while process.poll() is None:
        with contextlib.suppress(TimeoutError):
            asked = http.client.HTTPConnection(urlsplit(origin).netloc, timeout=1)
            with contextlib.closing(asked):
                asked.request("GET", "/")
                asked.getresponse()
                return
    raise AssertionError(f"the page's process ended with exit code {process.returncode}")


def page_of(federation: LocalFederation) -> dict[str, Any]:
    """Return what the server's status says of its page."""
    status = federation.status()
    assert status is not None
    return dict(status["federation"]["page"])


def command(federation: LocalFederation, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``fcil-server`` on a federation's directory."""
    return subprocess.run(
        [sys.executable, "-m", "fcil_server", *arguments, "--dir", str(federation.federation)],
        env=federation.environment(), capture_output=True, check=False, timeout=120,
    )  # fmt: skip


# What is looked for in any view.


def axe_faults(page: Page) -> list[str]:
    """Return what axe calls serious or critical in the page as it is now."""
    found = Axe().run(page).response["violations"]
    return [
        f"{v['id']} ({v['impact']}): {v['help']}; "
        + "; ".join(f"{n['target']} {n.get('failureSummary', '')}" for n in v["nodes"][:3])
        for v in found
        if v["impact"] in {"serious", "critical"}
    ]


def too_wide(page: Page) -> list[str]:
    """Return what makes the page wider than the window: empty if it is not."""
    return list(
        page.evaluate(
            """() => {
            const room = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= room) return [];
            return [...document.body.querySelectorAll('*')]
              .filter(e => e.getBoundingClientRect().right > room + 1)
              .map(e => e.tagName + '#' + e.id + '.' + e.className).slice(0, 8);
            }"""
        )
    )


FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']"


def unreachable(page: Page, limit: int = 600) -> list[str]:
    """Walk through the page with Tab; return what can be clicked and was not reached.

    Also returned: what was reached and does not show it.
    """
    page.evaluate(
        """(which) => {
        document.activeElement?.blur();
        let n = 0;
        window.__all = new Map();
        for (const e of document.querySelectorAll(which)) {
          if (e.disabled || e.tabIndex < 0 || !e.checkVisibility({visibilityProperty: true})) continue;
          if (e.type === 'radio') continue;
          window.__all.set(e, e.tagName + '#' + e.id + ' ' + (e.textContent || e.name || '').trim().slice(0, 30));
        }
        window.__dim = [];
        }""",
        FOCUSABLE,
    )
    for _ in range(limit):
        page.keyboard.press("Tab")
        left = page.evaluate(
            """() => {
            const e = document.activeElement;
            if (!e || e === document.body) return -1;
            if (window.__all.has(e)) {
              const s = getComputedStyle(e);
              if (s.outlineStyle === 'none' && s.boxShadow === 'none')
                window.__dim.push('no visible focus: ' + window.__all.get(e));
              window.__all.delete(e);
            }
            return window.__all.size;
            }"""
        )
        if left <= 0:
            break
    return list(page.evaluate("() => [...window.__all.values(), ...window.__dim]"))
