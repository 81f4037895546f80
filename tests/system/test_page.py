"""The page while a federation runs: however many look, or are rude, rounds go on; kills change nothing."""

import json
import os
import signal
import socket
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome, UpdateStatus
from fcil_server.web.event_stream import MAX_STREAMS
from system.kit import open_ledger, settings, write_client

pytestmark = [pytest.mark.processes, pytest.mark.full]

ROUNDS = 4


def host_of(federation: LocalFederation) -> str:
    return federation.status()["federation"]["page"]["address"].removeprefix("http://")


def enter(federation: LocalFederation) -> str:
    """Let a browser in by a link; return its cookie."""
    token = control_socket.ask(federation.federation, "page_link")["url"].partition("#")[2]
    host = host_of(federation)
    browser = HTTPConnection(host, timeout=60)
    headers = {"Content-Type": "application/json", "Origin": f"http://{host}"}
    told = []
    for _ in range(2):
        browser.request("POST", "/enter", json.dumps({"token": token}), headers)
        answer = browser.getresponse()
        answer.read()
        told.append((answer.status, answer.getheader("set-cookie", "").partition(";")[0]))
    browser.close()
    assert told[1] == (403, "")  # a link lets one browser in, once
    return told[0][1]


def see(federation: LocalFederation, cookie: str, path: str = "/") -> str:
    browser = HTTPConnection(host_of(federation), timeout=60)
    browser.request("GET", path, headers={"Cookie": cookie})
    answer = browser.getresponse()
    text = answer.read().decode()
    browser.close()
    assert answer.status == 200, text
    return text


def open_pages(stack: ExitStack, host: str, cookie: str, count: int) -> list[str]:
    """Ask for streams that nobody reads; return how each answer begins."""
    name, _, port = host.rpartition(":")
    opened = []
    for _ in range(count):
        rude = stack.enter_context(socket.socket())
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        rude.settimeout(60)
        rude.connect((name, int(port)))
        rude.sendall(f"GET /stream HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n".encode())
        opened.append(rude)
    return [rude.recv(12).decode() for rude in opened]


def test_rounds_go_on_with_too_many_pages_and_kills_and_sessions_outlive_both_processes(tmp_path):
    arguments = ["--page", "127.0.0.1:0", *settings(round__rounds_per_task=ROUNDS)]
    with LocalFederation(tmp_path) as federation, ExitStack() as stack:
        federation.serve(*arguments)
        cookie = enter(federation)
        host, first = host_of(federation), federation.status()["federation"]["page"]["pid"]
        answers = open_pages(stack, host, cookie, MAX_STREAMS + 20)
        assert answers.count("HTTP/1.1 200") == MAX_STREAMS
        assert answers.count("HTTP/1.1 503") == 20
        for name, offset in (("a", 0), ("b", 12)):
            federation.join(name, write_client(tmp_path / name, range(4), offset=offset))
        federation.until("update")
        os.kill(first, signal.SIGKILL)
        federation.until("page", text="signal 9")
        open_pages(
            stack, host, cookie, MAX_STREAMS
        )  # they come again, and read no more than before
        federation.until("run_done")

        with open_ledger(federation) as ledger:
            run = ledger.runs.newest()
            rounds = ledger.rounds.all(run.run_id)
            updates = [u.status for r in rounds for u in ledger.updates.of_round(r.key)]
        assert {r.outcome for r in rounds} == {Outcome.DONE}
        assert set(updates) == {UpdateStatus.COUNTED}
        shown = see(federation, cookie)
        assert run.run_id in shown

        federation.kill_server()
        federation.serve(*arguments)
        assert run.run_id in see(federation, cookie)
