"""A connection that is reset while much of it lies unread costs its own messages and nothing else.

libzmq 4.3.5 ended the whole process then: "Assertion failed: !_io_error". So the server is a
process of its own here, and so is the client that is killed.
"""

import subprocess
import sys

import pytest

from fcil_protocol.trust.keys import PrivateKeys

SERVER, CLIENT = (
    PrivateKeys(curve=bytes([n]) * 32, signing=bytes([n]) * 32, sealing=bytes([n]) * 32)
    for n in (1, 2)
)
BEAT_S = 0.5  # the connection is given up after three
UNREAD = 3000  # messages, more than ever lay in one queue

# It hears one message, says so, and then reads nothing until it is told to: as in long work.
SERVES = f"""
import asyncio, sys
from fcil_protocol.link.zmq_link import Router

async def serve():
    router = Router(
        curve_secret=bytes.fromhex("{SERVER.curve_secret.hex()}"),
        curve_public=bytes.fromhex("{SERVER.public.curve.hex()}"),
        admit=lambda key: True, heartbeat_s={BEAT_S},
    )
    print(router.bind("127.0.0.1", 0), flush=True)
    await router.recv()
    print("heard", flush=True)
    sys.stdin.readline()
    heard = 0
    while (await router.recv()).frames:  # the last has none: the connection is gone
        heard += 1
    print("lives", heard, flush=True)
    router.close()

asyncio.run(serve())
"""
FLOODS = f"""
import sys, time, zmq
link = zmq.Context().socket(zmq.DEALER)
link.setsockopt(zmq.SNDHWM, 0)
link.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex("{SERVER.public.curve.hex()}"))
link.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex("{CLIENT.curve_secret.hex()}"))
link.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex("{CLIENT.public.curve.hex()}"))
link.connect("tcp://127.0.0.1:" + sys.argv[1])
link.send(b"first")
sys.stdin.readline()
for _ in range({UNREAD}):
    link.send(bytes(900))
sys.stdin.readline()
"""


def python(text, *words):
    return subprocess.Popen(
        [sys.executable, "-P", "-c", text, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.full
def test_the_server_lives_and_hears_that_it_is_gone():
    with python(SERVES) as server:
        port = server.stdout.readline().strip()
        with python(FLOODS, port) as flood:
            assert server.stdout.readline() == "heard\n"
            flood.stdin.write("go\n")
            flood.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                flood.wait(BEAT_S / 2)  # meanwhile all of it is under way
            flood.kill()
        # The next heartbeat meets a peer that is gone, whose kernel resets the connection; with
        # the one after it the server ended.
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(5 * BEAT_S)
        told, complaint = server.communicate("go on\n", timeout=60)
    assert told.startswith("lives"), complaint
    assert server.returncode == 0
