"""What a wire tap and a stolen spool see: no image, no class name, no tensor."""

import socket

import numpy as np
import pytest
import safetensors.numpy

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Direction
from fcil_server.reports.results.run_data import collect
from system.bad_link import BadLink
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes

NAMES = {0: "okapi of the north", 1: "quokka of the south"}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def secrets(federation, folders):
    """Yield what must not be seen: images, class names, and every tensor of the last state."""
    for folder in folders:
        for path in folder.rglob("*.png"):
            yield path.name, path.read_bytes()[33:73]  # past the header that all PNGs share
    for name in NAMES.values():
        yield name, name.encode()
    state = next((federation.federation / "runs").glob("*/final.safetensors"))
    for name, tensor in safetensors.numpy.load(state.read_bytes()).items():
        raw = np.ascontiguousarray(tensor).tobytes()
        yield from ((f"{name}[{i}]", raw[i : i + 16]) for i in range(0, len(raw) - 16, 16))


def test_neither_the_wire_nor_the_spool_nor_the_parts_show_anything(tmp_path):
    server_port = free_port()
    with (
        BadLink(server_port, tap=True) as tap,
        LocalFederation(tmp_path, port=server_port) as federation,
    ):
        federation.serve(
            *settings(
                tasks__classes=[list(NAMES.values())],
                federation__advertise=[f"127.0.0.1:{tap.port}"],
            )
        )
        folders = []
        for k, name in enumerate("ab"):
            folder = write_client(tmp_path / name, NAMES, offset=12 * k, names=NAMES)
            folders.append(folder)
            federation.join(name, folder)
        federation.until("update")
        spool = next((federation.federation / "runs").glob("*/spool"))
        stored = b"".join(p.read_bytes() for p in spool.rglob("*") if p.is_file())
        federation.until("run_done")
        parts = (federation.federation / "runs").glob("*/parts/*.part")
        stored += b"".join(p.read_bytes() for p in parts)
        cached = (tmp_path / "state").rglob("*.part")
        stored += b"".join(p.read_bytes() for p in cached)
        wire = b"".join(tap.heard.values())
    assert len(wire) > 10_000
    assert len(stored) > 2_000
    looked = 0
    for what, secret in secrets(federation, folders):
        if len(set(secret)) < 6:
            continue  # runs of zeros are everywhere and say nothing
        looked += 1
        assert secret not in wire, f"{what} is on the wire"
        assert secret not in stored, f"{what} is at rest in clear"
    assert looked > 50


def newest(federation):
    """Return the newest run's id, digest of its last state, and bytes by direction."""
    with open_ledger(federation) as ledger:
        data = collect(ledger, ledger.runs.newest().run_id)
    last = federation.federation / "runs" / data.run.run_id / "final.safetensors"
    flows = [f for view in data.rounds for f in view.flows]
    return data.run.run_id, last.read_bytes(), {
        d: [sum(getattr(f, what) for f in flows if f.direction is d) for what in ("tensor", "sealed")]
        for d in Direction
    }  # fmt: skip


@pytest.mark.full
def test_plain_and_compact_payloads_hold_the_same(tmp_path):
    """The clients stay; the second run begins under them, and they follow it into the other form."""
    known = settings(tasks__classes=[["0", "1"]], round__settle_s=0.2)
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *known, "-c", "wire.compact=false")
        for k, name in enumerate("ab"):
            federation.join(name, write_client(tmp_path / name, (0, 1), offset=12 * k))
        assert federation.server.wait(100) == 0, federation.last_words("server")
        plain, state, before = newest(federation)
        federation.serve("--until-done", "--new-run", *known, "-c", "wire.compact=true")
        assert federation.server.wait(100) == 0, federation.last_words("server")
        federation.check_clients()
        compact, again, after = newest(federation)
    assert compact != plain
    assert again == state
    for direction in Direction:
        assert after[direction][0] == before[direction][0]
        assert after[direction][1] < before[direction][1]
