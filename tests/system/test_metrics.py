"""Figures while a federation runs: true, and nobody who asks for them, or kills them, disturbs it."""

import os
import select
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from threading import Event

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fcil_protocol.errors import LinkError
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import CountSource, UpdateStatus
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def figures(url: str) -> dict[tuple[str, ...], float]:
    status, text = get(url)
    assert status == 200, text
    return {
        (s.name, *sorted(f"{k}={v}" for k, v in s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def metrics(federation: LocalFederation) -> tuple[str, int]:
    told = federation.status()["federation"]["metrics"]
    return told["address"], told["pid"]


def ends(pid: int, timeout_s: float = 30) -> bool:
    """Wait until a process has ended, whoever's child it is."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


@pytest.mark.full
def test_figures_are_those_of_the_ledger_whatever_happens_to_who_serves_them(tmp_path):
    stop = Event()
    seen: list[dict[tuple[str, ...], float]] = []

    def watch(url: str) -> None:
        while not stop.wait(0.05):
            with suppress(
                OSError, HTTPException
            ):  # the answer that was under way when its process was killed
                seen.append(figures(url))

    with LocalFederation(tmp_path) as federation, ThreadPoolExecutor() as threads:
        page = ("--page", "127.0.0.1:0", "-c", "federation.page_metrics=true")
        federation.serve("--metrics", "127.0.0.1:0", *page, *settings())
        url, first = metrics(federation)
        assert get(url.replace("/metrics", "/healthz"))[1].startswith("ok: ")
        watcher = threads.submit(watch, url)
        try:
            for name, offset in (("a", 0), ("b", 12)):
                folder = write_client(tmp_path / name, range(4), offset=offset)
                federation.join(name, folder)
            federation.until("update")
            os.kill(first, signal.SIGKILL)
            federation.until("metrics", text="signal 9")
            federation.until("run_done")
            last = figures(url)
            url_now, second = metrics(federation)
            assert (url_now, ends(first)) == (url, True)
            assert second != first
        finally:
            stop.set()
        watcher.result(60)
        _grows(seen)
        _is_the_ledgers(federation, last)
        page = federation.status()["federation"]["page"]
        _is_the_ledgers(federation, figures(f"{page['address']}/metrics"))
        assert get(f"{page['address']}/healthz")[1].startswith("ok: ")

        os.kill(federation.server.pid, signal.SIGSTOP)
        try:
            _, before = get(url)  # made within the last second, perhaps
            status, reason = _health_when_stopped(url)
            assert (status, reason.partition(":")[0]) == (503, "timeout"), before
            assert figures(url)["fcil_up",] == 0
        finally:
            os.kill(federation.server.pid, signal.SIGCONT)
        federation.kill_server()
        assert ends(second)
        assert ends(page["pid"])
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), 5)


def _health_when_stopped(url: str) -> tuple[int, str]:
    """Ask until what was known from before is too old to be told."""
    while True:
        status, reason = get(url.replace("/metrics", "/healthz"))
        if status != 200:
            return status, reason


def _grows(seen: list[dict[tuple[str, ...], float]]) -> None:
    assert len(seen) > 3
    process = "fcil_process_"  # another process, another count
    for earlier, later in zip(seen, seen[1:], strict=False):
        for key, value in earlier.items():
            if key[0].endswith("_total") and not key[0].startswith(process):
                assert later[key] >= value, key
    # Alerts count its changes: it is the same while the server runs.
    assert len({one.get(("fcil_server_start_time_seconds",)) for one in seen} - {None}) == 1
    phases = {k[1] for one in seen for k, v in one.items() if k[0] == "fcil_round_phase" and v}
    assert len(phases) > 1


def _is_the_ledgers(federation: LocalFederation, found: dict[tuple[str, ...], float]) -> None:
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        rounds = ledger.rounds.all(run.run_id)
        flows = [*ledger.bytes.all(run.run_id), *ledger.bytes.all(None)]
        updates = [u for r in rounds for u in ledger.updates.of_round(r.key)]
    counted = sum(u.status is UpdateStatus.COUNTED for u in updates)
    kinds = ("train", "evaluate")
    assert sum(found["fcil_updates_counted_total", f"kind={k}"] for k in kinds) == counted == 8
    assert sum(found["fcil_rounds_total", f"kind={k}", "outcome=done"] for k in kinds) == 4
    for name in ("tensor", "sealed"):  # nothing more of these comes when the run is done
        shown = sum(v for k, v in found.items() if k[0] == f"fcil_{name}_bytes_total")
        assert shown == sum(getattr(f, name) for f in flows) > 0
    if any(f.source is CountSource.KERNEL for f in flows):
        assert found["fcil_wire_source_info", "source=kernel"] == 1
        assert found["fcil_kernel_wire_bytes_total", "direction=up"] > 0


def test_an_address_in_use_or_without_a_certificate_ends_the_start_in_a_sentence(tmp_path):
    with LocalFederation(tmp_path) as federation, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LinkError, match=f"code 2.*cannot listen on {address}"):
            federation.serve("--metrics", address, *settings())
        with pytest.raises(LinkError, match=r"code 4.*0\.0\.0\.0:1 can be reached"):
            federation.serve("--metrics", "0.0.0.0:1", *settings())
