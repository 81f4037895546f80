"""Webhooks: signed, in order, none lost, none in the way of a round, none for a stranger."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import page_kit
from fcil_protocol.errors import ConfigError, CorruptFile, LinkError, StorageError
from fcil_protocol.ids import RoundKey, RunId
from fcil_server.federation.directory import WEBHOOKS
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.results.news import (
    NewsKind,
    NewsPosition,
    newest_position,
    news_after,
)
from fcil_server.reports.sinks import webhook_follower
from fcil_server.reports.sinks.webhook_follower import KEPT_S, WebhookFollower
from fcil_server.reports.sinks.webhooks import (
    WebhookOptions,
    choose_webhook,
    choose_webhooks,
    send,
    sign,
)
from sample_run import RUN, Clock

SECRET = bytes(range(32))
START = NewsPosition()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "webhook.secret"
    path.write_text(f"whsec_{base64.b64encode(SECRET).decode()}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    folder = tmp_path / "federation"
    folder.mkdir()
    page_kit.small(folder / LEDGER_NAME).close()
    return folder


def options(file: Path, **given) -> dict:
    return {"url": "http://127.0.0.1:9/hook", "secret_file": str(file), **given}


class Receiver:
    """A receiver that remembers, and fails when it should."""

    def __init__(self) -> None:
        self.taken: list[dict] = []
        self.fails_after = 10**9

    def __call__(self, _options, request) -> None:
        if len(self.taken) >= self.fails_after:
            raise LinkError("hooks.example answered a webhook with the status 500.")
        self.taken.append({**json.loads(request.body), "id": request.headers["webhook-id"]})

    def kinds(self) -> list[str]:
        return [one["type"] for one in self.taken]


def follower(directory: Path, secret: Path, post, now=page_kit.NOW + 200, **given):
    webhook = choose_webhook("ops", options(secret, **given))
    return WebhookFollower(directory, webhook, "lab", post=post, clock=lambda: now)


def rewind(directory: Path) -> None:
    (directory / WEBHOOKS).mkdir(exist_ok=True)
    (directory / WEBHOOKS / "ops.json").write_text(json.dumps({"position": START.text()}))


# --- the news ---------------------------------------------------------------------------------------


def test_news_are_in_order_and_resume_at_every_position(federation: Path) -> None:
    with Ledger(federation / LEDGER_NAME, read_only=True) as ledger:
        whole = news_after(ledger, START, 1000)
        for count, item in enumerate(whole, 1):
            position = NewsPosition.parse(item.position.text())
            assert news_after(ledger, position, 1000) == whole[count:]
        in_pages, position = [], START
        while found := news_after(ledger, position, 2):
            in_pages += found
            position = found[-1].position
        assert in_pages == whole
        assert newest_position(ledger) == whole[-1].position
    kinds = [item.kind for item in whole]
    assert kinds.count(NewsKind.ROUND_CLOSED) == 12
    assert kinds.count(NewsKind.CLIENT_REFUSED) == 3


def test_rounds_that_a_fork_copied_are_no_news(federation: Path) -> None:
    with Ledger(federation / LEDGER_NAME) as ledger:
        position = newest_position(ledger)
        ledger.runs.set_status(RUN, RunStatus.STOPPED)
        state = ledger.states.all(RUN)[2].state
        fork = RunId("r20260104-000000-f0f0")
        with ledger.transaction():
            ledger.forks.begin(RUN, state, fork)
        assert ledger.rounds.all(fork)
        assert [i for i in news_after(ledger, position, 100) if i.data["run"] == fork] == []


def test_an_open_round_of_an_earlier_run_holds_nothing_back(federation: Path) -> None:
    with Ledger(federation / LEDGER_NAME) as ledger:
        rows = ledger.rounds.all(RUN)
        assert rows[-1].closed_at is None
        ledger.runs.set_status(RUN, RunStatus.STOPPED)
        fork = RunId("r20260104-000000-f0f0")
        with ledger.transaction():
            ledger.forks.begin(RUN, ledger.states.all(RUN)[2].state, fork)
        key = RoundKey(fork, ledger.tasks.all(fork)[-1].task, "train", 9)
        ledger.rounds.open(key, asked=(), base_state=0, remaining_s=None)
        ledger.rounds.close(key, "short", why="operator")
        found = news_after(ledger, START, 100)
    assert found[-1].data["run"] == fork


def test_a_learned_task_comes_with_its_number_and_accuracy(federation: Path) -> None:
    with Ledger(federation / LEDGER_NAME) as ledger:
        position = newest_position(ledger)
        ledger.events.add("info", "task_done", "task 2 is learned", run=RUN)
        ledger.events.add("warning", "task_done", "task 2 is over and nothing was learned", run=RUN)
        ledger.events.add("info", "run_done", "the run is complete", run=RUN)
        learned, not_learned, done = news_after(ledger, position, 100)
    assert (learned.kind, learned.data["task"]) == (NewsKind.TASK_LEARNED, 2)
    assert learned.data["accuracy"] == pytest.approx(0.8)
    assert (not_learned.kind, done.kind) == (NewsKind.NOTE, NewsKind.RUN_DONE)


def test_a_run_is_completed_once_and_again_after_further_rounds(federation: Path) -> None:
    clock = Clock(page_kit.NOW + 500)
    with Ledger(federation / LEDGER_NAME, clock=clock) as ledger:

        def done() -> NewsKind:
            clock.now += 1
            before = newest_position(ledger)
            ledger.events.add("info", "run_done", "the run is complete", run=RUN)
            return news_after(ledger, before, 10)[-1].kind

        assert [done(), done(), done()] == [NewsKind.RUN_DONE, NewsKind.NOTE, NewsKind.NOTE]
        clock.now += 1
        ledger.rounds.close(page_kit.OPEN_KEY, "short")
        assert [done(), done()] == [NewsKind.RUN_DONE, NewsKind.NOTE]


@pytest.mark.parametrize("text", ["", "1", "1.2.3", "1.2.r.x", "-1.0..0", "1.1.a/b.1", "9" * 40])
def test_a_position_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="is not the id of an event"):
        NewsPosition.parse(text)


# --- the follower -----------------------------------------------------------------------------------


def test_a_webhook_begins_with_the_news_from_now_on(federation: Path, secret: Path) -> None:
    receiver = Receiver()
    first = follower(federation, secret, receiver)
    first.catch_up()
    assert receiver.taken == []
    with Ledger(federation / LEDGER_NAME) as ledger:
        ledger.refusals.add(None, "bad_signature", "the signature does not match.")
    follower(federation, secret, receiver).catch_up()
    assert receiver.kinds() == ["client_refused"]
    assert receiver.taken[0]["data"]["reason"] == "the signature does not match."
    assert receiver.taken[0]["federation"] == "lab"


def test_an_item_keeps_its_id_whatever_is_read_with_it(federation: Path) -> None:
    """What came late with an earlier time stands before it at the next attempt."""
    with Ledger(federation / LEDGER_NAME, clock=Clock(page_kit.NOW + 300)) as ledger:
        before = newest_position(ledger)
        ledger.events.add("info", "run_done", "the run is complete", run=RUN)
        (item,) = news_after(ledger, before, 10)
    with Ledger(federation / LEDGER_NAME, clock=Clock(page_kit.NOW + 250)) as ledger:
        ledger.refusals.add(None, "bad_signature", "the signature does not match.")
        refused, again = news_after(ledger, before, 10)
    assert again.position != item.position
    ids = [
        sign("lab", one, 5.0, 6.0, SECRET).headers["webhook-id"] for one in (item, again, refused)
    ]
    assert ids[0] == ids[1] != ids[2]
    later = sign("lab", item, 5.5, 6.0, SECRET).headers["webhook-id"]
    assert later != ids[0], "the same number in another federation of this name"


def test_only_chosen_kinds_are_sent_each_once(federation: Path, secret: Path) -> None:
    receiver = Receiver()
    rewind(federation)
    for _ in range(2):
        follower(federation, secret, receiver, events=["round_closed"]).catch_up()
    assert receiver.kinds() == ["round_closed"] * 12
    assert [one["data"]["seq"] for one in receiver.taken] == list(range(12))
    assert len({one["id"] for one in receiver.taken}) == 12
    assert receiver.taken[0]["data"]["closed_at"].endswith("Z")


def test_a_receiver_that_fails_gets_the_rest_later_in_order(federation, secret, monkeypatch):
    monkeypatch.setattr(webhook_follower, "PAGE", 4)
    receiver = Receiver()
    receiver.fails_after = 5
    rewind(federation)
    with pytest.raises(LinkError):
        follower(federation, secret, receiver).catch_up()
    receiver.fails_after = 10**9
    follower(federation, secret, receiver).catch_up()
    assert receiver.kinds().count("round_closed") == 12
    assert len({one["id"] for one in receiver.taken}) == len(receiver.taken)


def test_news_that_could_not_be_sent_for_a_day_are_skipped(federation, secret) -> None:
    receiver = Receiver()
    rewind(federation)
    follower(federation, secret, receiver, now=page_kit.NOW + 2 * KEPT_S).catch_up()
    assert receiver.taken == []
    follower(federation, secret, receiver).catch_up()
    assert receiver.taken == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"position": "x"}', '{"position": 3}', "[" * 9000, "\xff"]
)
def test_a_damaged_position_is_an_error_and_passes_over_no_news(federation, secret, content):
    rewind(federation)
    path = federation / WEBHOOKS / "ops.json"
    path.write_text(content, "latin-1")
    with pytest.raises(CorruptFile, match="which news the webhook has sent"):
        follower(federation, secret, Receiver())
    assert path.read_text("latin-1") == content


def test_a_position_that_cannot_be_read_is_an_error(federation, secret) -> None:
    (federation / WEBHOOKS / "ops.json").mkdir(parents=True)
    with pytest.raises(StorageError, match="it is a directory"):
        follower(federation, secret, Receiver())


# --- requests ---------------------------------------------------------------------------------------


def test_the_signature_is_that_of_the_convention(federation: Path) -> None:
    with Ledger(federation / LEDGER_NAME, read_only=True) as ledger:
        item = news_after(ledger, START, 1)[0]
    request = sign("lab", item, 5.0, 1_700_000_000.9, SECRET)
    head = request.headers
    signed = f"{head['webhook-id']}.1700000000.".encode() + request.body
    mac = base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
    assert head["webhook-signature"] == f"v1,{mac}"
    assert head["webhook-timestamp"] == "1700000000"
    assert json.loads(request.body)["timestamp"] == "1970-01-01T00:00:05Z"
    again = sign("lab", item, 5.0, 1_700_000_999.0, SECRET)
    assert again.headers["webhook-id"] == head["webhook-id"]
    assert again.headers["webhook-signature"] != head["webhook-signature"]


@contextmanager
def receiving(status: int, location=""):
    got: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


@pytest.mark.parametrize("status", [200, 204, 302, 400, 404, 500])
def test_only_a_good_answer_counts_and_no_redirection_is_followed(federation, secret, status):
    with Ledger(federation / LEDGER_NAME, read_only=True) as ledger:
        item = news_after(ledger, START, 1)[0]
    request = sign("lab", item, 5.0, 6.0, SECRET)
    with receiving(status, "http://127.0.0.1:1/other" if status == 302 else "") as (url, got):
        given = WebhookOptions(**options(secret, url=f"{url}/a?b=c"))
        if status < 300:
            send(given, request)
        else:
            with pytest.raises(LinkError, match=f"status {status}"):
                send(given, request)
        assert got == [("/a?b=c", request.body)]


def test_a_receiver_that_hangs_or_is_away_is_a_failure(federation, secret) -> None:
    with Ledger(federation / LEDGER_NAME, read_only=True) as ledger:
        item = news_after(ledger, START, 1)[0]
    request = sign("lab", item, 5.0, 6.0, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LinkError, match="did not take a webhook: timed out"):
            send(WebhookOptions(**options(secret, url=url, timeout_s=0.1)), request)
    with pytest.raises(LinkError, match="did not take a webhook"):
        send(WebhookOptions(**options(secret, url=url)), request)


def test_a_receiver_whose_answer_never_ends_is_a_failure(federation, secret) -> None:
    with Ledger(federation / LEDGER_NAME, read_only=True) as ledger:
        request = sign("lab", news_after(ledger, START, 1)[0], 5.0, 6.0, SECRET)
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        with listener.accept()[0] as sock, suppress(OSError):
            while not over.wait(0.01):
                sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = threading.Thread(target=drip, args=(listener,))
        receiver.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(LinkError, match="did not take a webhook: timed out"):
            send(WebhookOptions(**options(secret, url=url, timeout_s=0.5)), request)
        over.set()
        receiver.join()


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"url": "http://hooks.example"}, "https, or http on the loopback"),
        ({"url": "ftp://127.0.0.1"}, "https, or http on the loopback"),
        ({"url": "https://u:SECRET@hooks.example"}, "an address with a password"),
        ({"url": "https://"}, "expected an address such as"),
        ({"url": "https://a b"}, "printable ASCII"),
        ({"url": "https://a:b"}, "webhooks.ops.url"),
        ({"events": []}, "webhooks.ops.events"),
        ({"events": ["all"]}, "webhooks.ops.events.0"),
        ({"timeout_s": 0}, "webhooks.ops.timeout_s"),
        ({"secret": "whsec_SECRET"}, "webhooks.ops.secret: extra inputs"),
    ],
)
def test_wrong_options_are_refused_without_their_values(secret, given, says) -> None:
    with pytest.raises(ConfigError) as told:
        choose_webhooks({"ops": options(secret, **given)})
    assert says.lower() in str(told.value).lower()
    assert "SECRET" not in str(told.value)


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", "x" * 33, "a b"])
def test_a_name_is_one_of_a_file(secret: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected a name of 1 to 32"):
        choose_webhooks({name: options(secret)})


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("whsec_" + "A" * 44, 0o644, "so others can use"),
        ("hello", 0o600, "does not hold whsec_ and base64"),
        ("whsec_???", 0o600, "does not hold whsec_ and base64"),
        ("whsec_" + base64.b64encode(b"short").decode(), 0o600, "24 to 64 bytes, got 5"),
        (None, 0o600, "does not exist"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(tmp_path, content, mode, says) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        choose_webhooks({"ops": options(path)})
