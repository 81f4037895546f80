"""A federation of processes at work, as an operator's browser sees it and acts on it."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import zxingcpp
from PIL import Image
from playwright.sync_api import Locator, expect

from browser import kit
from fcil_protocol.process import control_socket
from fcil_protocol.trust.ticket import Ticket
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client

pytestmark = [pytest.mark.browser, pytest.mark.processes]

# Many rounds of a moment each; classes make tasks as they come; who is gone is soon said to be.
AT_WORK = {
    "tasks__schedule": "discovered",
    "tasks__classes": [],
    "tasks__settle_s": 0.2,
    "round__rounds_per_task": 2,
    "round__min_clients": 2,
    "round__grace_s": 1.0,
}
# What a browser itself says when a server is away or a session is over.
GONE = r"Failed to load resource|net::ERR_|EventSource"


@contextmanager
def federation_at(
    chromium: kit.Chromium, folder: Path, *options: str, **extra
) -> Iterator[LocalFederation]:
    """Serve a federation with its page, until the browsers have left."""
    with LocalFederation(folder) as federation:
        federation.serve("--page", "127.0.0.1:0", *options, *settings(**(AT_WORK | extra)))
        try:
            yield federation
        finally:
            chromium.close()  # else they tell of their broken streams


def join(federation: LocalFederation, *names: str) -> None:
    """Let clients join one after the other, each with the digits 0 and 1."""
    for k, name in enumerate(names):
        folder = write_client(federation.directory / name, [0, 1], offset=12 * k)
        federation.join(name, folder)
        federation.until("announced", text=f":{name}")


def link(federation: LocalFederation) -> str:
    """Return a fresh one-time link, as ``fcil-server page --json`` gives it."""
    done = kit.command(federation, "page", "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["data"]["url"])


def come_in(chromium, federation: LocalFederation, **way) -> kit.Visit:
    url = link(federation)
    parts = urlsplit(url)
    visit = chromium.visit(f"{parts.scheme}://{parts.netloc}", **way)
    visit.page.goto(url)
    visit.ready()
    return visit


def client_row(visit: kit.Visit, name: str) -> Locator:
    return visit.section("clients").locator("tbody tr").filter(has_text=f":{name}").first


def order(visit: kit.Visit, act: str, **fields: str) -> Locator:
    """Press an act's button, fill in its fields, read what it would do and confirm.

    Returns:
        The dialog, which says what was done.
    """
    button = visit.page.locator(f"button[data-act={act}]:visible").first
    button.click()
    return fill_in(visit, **fields)


def fill_in(visit: kit.Visit, **fields: str) -> Locator:
    dialog = visit.page.get_by_role("dialog")
    steps = dialog.get_by_role("button", name=re.compile("^(Continue|Confirm)$"))
    expect(steps).to_have_count(1)
    for name, value in fields.items():
        field = dialog.locator(f"[name={name}]")
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    if steps.inner_text() == "Continue":
        steps.click()
    dialog.get_by_role("button", name="Confirm").click()
    return dialog


def close(visit: kit.Visit) -> None:
    visit.page.keyboard.press("Escape")
    expect(visit.page.get_by_role("dialog")).to_have_count(0)


def audited(federation: LocalFederation, action: str) -> list[str]:
    """Return who did something, by the audit log."""
    with open_ledger(federation) as ledger:
        return [e.actor for e in ledger.audit.newest() if e.action == action]


def test_a_federation_is_seen_at_work(chromium, tmp_path):
    with federation_at(chromium, tmp_path) as federation:
        visit = come_in(chromium, federation)
        expect(visit.section("now")).to_contain_text("client")  # for which the server waits
        visit.shot("live-waiting-light")
        join(federation, "a", "b")
        rounds = visit.section("rounds")
        expect(rounds).to_contain_text("train")
        expect(visit.section("tasks")).to_contain_text("learned")
        expect(client_row(visit, "a")).to_be_visible()
        expect(visit.section("accuracy").locator("table.heat")).to_be_visible()
        visit.shot("live-light")
        # A folder more on a running client is a class more, and that a task.
        write_client(federation.directory / "a", [7], names={7: "seven"})
        expect(visit.section("tasks")).to_contain_text("task 1")
        expect(visit.section("tasks")).to_contain_text("seven")
        federation.until("task_done", text="task 1")
        federation.kill_client("b")
        expect(client_row(visit, "b")).to_contain_text("away")
        visit.shot("live-client-killed-light")
        assert kit.axe_faults(visit.page) == []
        phone = come_in(chromium, federation, size=kit.PHONE, dark=True)
        assert kit.too_wide(phone.page) == []
        phone.shot("live-phone-dark")


def test_the_round_in_progress_shows_whom_it_waits_for(chromium, tmp_path):
    """One client stands still: its row says so until it goes on."""
    extra = {"federation__heartbeat_s": 10.0, "round__grace_s": 30.0}
    with federation_at(chromium, tmp_path, **extra) as federation:
        control_socket.ask(federation.federation, "pause")
        join(federation, "a", "b")
        visit = come_in(chromium, federation)
        expect(visit.section("head")).to_contain_text("paused")
        os.kill(federation.clients["b"].pid, signal.SIGSTOP)
        try:
            control_socket.ask(federation.federation, "resume")
            federation.until("update")
            now = visit.section("now")
            expect(now).to_contain_text("1 of 2")
            expect(now.locator("progress").first).to_be_visible()
            visit.look("live-round")
            # The operator has waited enough.
            dialog = order(visit, "close_round")
            expect(dialog).to_contain_text("close")
            close(visit)
            expect(visit.section("rounds")).to_contain_text("operator")
        finally:
            os.kill(federation.clients["b"].pid, signal.SIGCONT)
        assert audited(federation, "close_round") == [f"uid {os.getuid()}, page"]


def test_an_operator_pauses_resumes_enrols_and_revokes(chromium, tmp_path):
    with federation_at(chromium, tmp_path) as federation:
        join(federation, "a", "b")
        federation.until("task_done", text="task 0")
        visit = come_in(chromium, federation)
        visit.page.locator("button[data-act=pause]:visible").first.click()
        dialog = visit.page.get_by_role("dialog")
        expect(dialog).to_contain_text("round opens until")
        visit.look("act-confirm", whole=False)
        dialog.get_by_role("button", name="Cancel").click()
        expect(visit.page.get_by_role("dialog")).to_have_count(0)
        assert control_socket.ask(federation.federation, "gauges")["mode"] == "running"
        order(visit, "pause")
        expect(visit.section("head")).to_contain_text("paused")
        close(visit)
        order(visit, "resume")
        expect(visit.section("head")).not_to_contain_text("paused")
        close(visit)

        visit.page.locator("button[data-act=enrol]:visible").first.click()
        expect(visit.page.get_by_role("dialog").locator("[name=name]")).to_be_focused()
        visit.look("act-enrol", whole=False)
        dialog = fill_in(visit, name="kitchen", lasts="1h")
        text = dialog.locator("text=/^FCIL[A-Z0-9-]+$/i").first.inner_text().strip()
        assert Ticket.from_text(text).to_text() == text
        qr = tmp_path / "qr.png"
        dialog.locator(".qr").screenshot(path=qr, caret="initial")
        with Image.open(qr) as image:
            assert [found.text for found in zxingcpp.read_barcodes(image)] == [text]
        visit.look("act-ticket", whole=False)
        close(visit)
        assert text not in visit.page.content()

        client_row(visit, "b").locator("button[data-act=revoke]").click()
        fill_in(visit, why="sold")
        federation.until("revoked")
        close(visit)
        expect(client_row(visit, "b")).to_contain_text("revoked")
        me = [f"uid {os.getuid()}, page"]
        for action in ("pause", "resume", "enrol", "revoke"):
            assert audited(federation, action) == me, action
        assert text not in federation.log("server").read_text()


def test_a_link_lets_one_browser_in_once_and_who_signs_out_is_out(chromium, tmp_path):
    with federation_at(chromium, tmp_path) as federation:
        url = link(federation)
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        first, second = chromium.visit(origin), chromium.visit(origin)
        first.page.goto(url)
        first.ready()
        assert "#" not in first.page.url  # what lets in does not stay in the address line
        second.witness.expect(GONE)
        second.page.goto(url)
        expect(second.page.get_by_role("alert")).to_contain_text("link")
        second.look("enter-refused")
        assert "/enter#" not in federation.log("server").read_text()
        second.page.get_by_role("textbox").fill(link(federation))
        second.page.get_by_role("button", name="Open").click()
        second.ready()

        first.witness.expect(GONE)
        first.page.locator("#menu summary").click()
        first.page.locator("#leave").click()
        expect(first.page.locator("#enter-form")).to_be_visible()
        first.page.goto(origin)
        expect(first.page.locator("#enter-form")).to_be_visible()
        expect(second.section("head")).to_be_visible()

        assert kit.command(federation, "page", "--sign-out").returncode == 0
        expect(second.page.locator("#banner")).to_contain_text("no longer signed in")
        second.shot("signed-out-light")
        assert kit.axe_faults(second.page) == []
        second.page.get_by_role("link", name="Sign in again").click()
        expect(second.page.locator("#enter-form")).to_be_visible()


def certificate(folder: Path) -> tuple[str, str]:
    """Write a certificate for this machine that nobody vouches for; return its and its key's file."""
    files = str(folder / "page.pem"), str(folder / "page-key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=lab", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def test_on_any_address_the_page_is_served_with_a_certificate(chromium, tmp_path):
    chain, secret = certificate(tmp_path)
    with LocalFederation(tmp_path) as federation:
        tls = ("--page-cert", chain, "--page-key", secret)
        federation.serve("--page", "0.0.0.0:0", *tls, *settings(**AT_WORK))
        told = urlsplit(link(federation))
        assert told.scheme == "https"
        origin = f"https://127.0.0.1:{told.port}"
        visit = chromium.visit(origin, ignore_https_errors=True)
        visit.page.goto(f"{origin}/enter#{told.fragment}")
        visit.ready()
        expect(visit.section("head")).to_be_visible()
        [cookie] = visit.context.cookies()
        chromium.close()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")


def test_what_another_site_or_program_posts_does_nothing(chromium, tmp_path):
    with federation_at(chromium, tmp_path) as federation:
        visit = come_in(chromium, federation)
        stranger = chromium.visit(visit.origin)
        csrf = visit.page.locator("html").get_attribute("data-csrf")
        good = {"X-FCIL-CSRF": csrf, "Origin": visit.origin, "Content-Type": "application/json"}
        ask = {"act": "pause"}
        bad = {
            "no session": (stranger, good),
            "no CSRF word": (visit, {k: v for k, v in good.items() if k != "X-FCIL-CSRF"}),
            "a forged CSRF word": (visit, good | {"X-FCIL-CSRF": "0" * len(csrf)}),
            "another origin": (visit, good | {"Origin": "http://evil.example"}),
            "no origin": (visit, {k: v for k, v in good.items() if k != "Origin"}),
            "a form": (visit, good | {"Content-Type": "text/plain"}),
            "another site": (visit, good | {"Sec-Fetch-Site": "cross-site"}),
        }
        for what, (who, headers) in bad.items():
            for path in ("/act/prepare", "/act/carry-out"):
                told = who.post(path, json.dumps(ask), headers)
                assert 400 <= told.status < 500, (what, path, told.status)
                assert "Traceback" not in told.text()
        told = visit.post("/act/prepare", json.dumps(ask), good)
        assert told.status == 200, told.text()
        word = told.json()["confirm"]
        # Another session cannot use what this one was given; nor can it be used twice.
        other = come_in(chromium, federation)
        others = good | {"X-FCIL-CSRF": other.page.locator("html").get_attribute("data-csrf")}
        assert other.post("/act/carry-out", json.dumps({"confirm": word}), others).status >= 400
        assert control_socket.ask(federation.federation, "gauges")["mode"] == "running"
        assert audited(federation, "pause") == []


def test_a_page_to_read_only_has_no_buttons_and_no_routes(chromium, tmp_path):
    with federation_at(chromium, tmp_path, "--page-read-only") as federation:
        join(federation, "a", "b")
        federation.until("task_done", text="task 0")
        visit = come_in(chromium, federation)
        expect(visit.section("rounds")).to_contain_text("train")
        assert visit.page.locator("[data-act], template[id^=act-]").count() == 0
        visit.shot("read-only-light")
        csrf = visit.page.locator("html").get_attribute("data-csrf")
        head = {"X-FCIL-CSRF": csrf, "Origin": visit.origin, "Content-Type": "application/json"}
        for path in ("/act/prepare", "/act/carry-out"):
            assert visit.post(path, json.dumps({"act": "pause"}), head).status in {404, 405}
        visit.section("clients").locator("a[data-client]").first.click()
        dialog = visit.page.get_by_role("dialog")
        expect(dialog).to_contain_text("train")
        assert dialog.locator("[data-act]").count() == 0


def test_the_page_comes_back_by_itself_after_its_process_or_the_server_ended(chromium, tmp_path):
    with federation_at(chromium, tmp_path) as federation:
        join(federation, "a", "b")
        visit = come_in(chromium, federation)
        visit.witness.expect(GONE)
        told = kit.page_of(federation)
        os.kill(told["pid"], signal.SIGKILL)
        # What happens after it is seen by the same browser without a new link.
        write_client(federation.directory / "a", [7], names={7: "seven"})
        expect(visit.section("tasks")).to_contain_text("seven")
        assert kit.page_of(federation)["pid"] != told["pid"]

        assert federation.server is not None
        federation.server.send_signal(signal.SIGINT)
        assert federation.server.wait(60) == 0
        expect(visit.page.locator("#banner")).to_be_visible()
        visit.shot("server-stopped-light")
        assert kit.axe_faults(visit.page) == []
        write_client(federation.directory / "b", [8], offset=30, names={8: "eight"})
        federation.serve("--page", visit.origin.removeprefix("http://"), *settings(**AT_WORK))
        expect(visit.section("tasks")).to_contain_text("eight")
        expect(visit.page.locator("#banner")).to_be_hidden()
