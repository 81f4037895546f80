"""Bad links: what is sent arrives, once, without beginning anew, and memory stays bounded.

Behind each link one client fetches a part and sends an update of the same size. The links of
the first tests are as bad as the slow ones of the last, at a tenth of the scale.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from system.bad_link import UP, Link
from system.payload_kit import course

pytestmark = pytest.mark.processes
HOSTS = Path(__file__).parent / "hosts" / "lossy.py"


def arrived_whole(course, *, most=1.5, grown_mb=60):
    """One update, counted once; little came twice; the server's memory did not grow with it."""
    assert course.updates == 1
    assert 1 <= course.up <= most, course
    assert 1 <= course.down <= most, course
    assert course.growth_mb < grown_mb, course


@pytest.mark.full
@pytest.mark.parametrize("processes", [0, 2])
def test_cut_again_and_again_with_the_end_of_the_old_connection_after_the_new_one(
    tmp_path, processes
):
    """What was said on a connection that is over arrives when the next one has spoken."""
    link = Link(rate=400_000, cut_bytes=150_000, late=True)
    whole = course(tmp_path, 400, link, federation__intake=processes)
    assert whole.cuts >= 5, "with less, the link was not bad"
    arrived_whole(whole, most=1.7)


@pytest.mark.full
def test_far_away_with_stalls_and_a_heartbeat_of_one_second(tmp_path):
    link = Link(rate=400_000, delay_s=0.1, jitter_s=0.05, stall_bytes=150_000, stall_s=1.0)
    whole = course(tmp_path, 400, link, federation__heartbeat_s=1.0)
    assert (whole.cuts, whole.connections) == (0, 1), "no heartbeat has killed it"
    arrived_whole(whole, most=1.1)


@pytest.mark.full
def test_an_update_goes_on_after_both_were_killed_in_the_middle(tmp_path):
    def kill_both(federation, bad):
        bad.wait_for(UP, 1_200_000)
        federation.kill_client("a")
        federation.kill_server()

    killed = course(tmp_path, 2000, Link(rate=1_000_000), during=kill_both)
    arrived_whole(killed, most=1.3)


def lossy(tmp_path, kilobytes, loss, delay_s):
    """Run two hosts with a lossy line between them; return what they say."""
    command = ["unshare", "-rn", sys.executable, str(HOSTS)]
    probe = "import os; os.open('/dev/net/tun', os.O_RDWR)"
    inside = ["unshare", "-rn", sys.executable, "-c", probe]
    allowed = subprocess.run(inside, capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"no namespaces or no /dev/net/tun here: {allowed.stderr.decode()[-200:]}")
    command += [str(tmp_path), str(kilobytes), str(loss), str(delay_s)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
def test_one_packet_of_twenty_is_lost(tmp_path):
    said = lossy(tmp_path, 600, 0.05, 0.02)
    assert said["dropped"] > 20, "the line was not bad"
    assert (said["code"], said["updates"], said["connections"]) == (0, 1, 1)
    assert said["up"] < 1.1 * 600_000


# --- in real time: minutes ------------------------------------------------------------------

SLOW = 20_000  # bytes per second
SLOW_LINKS = {
    "slow": (300, Link(SLOW), {}),
    "slow, cut every 10 s": (300, Link(SLOW, cut_s=10), {}),
    "slow, cut every 30 s": (600, Link(SLOW, cut_s=30), {}),
    "slow, far and late": (300, Link(SLOW, delay_s=0.5, cut_s=15, late=True), {}),
    "two seconds away": (600, Link(delay_s=2.0, jitter_s=0.2), {}),
    "silent for 20 s": (300, Link(100_000, stall_bytes=250_000, stall_s=20), {}),
    "silent until it is given up": (300, Link(100_000, stall_bytes=250_000, stall_s=50), {}),
}


@pytest.mark.full
@pytest.mark.parametrize("words", SLOW_LINKS)
def test_links_as_slow_as_they_are(tmp_path, words):
    kilobytes, link, extra = SLOW_LINKS[words]
    whole = course(tmp_path, kilobytes, link, **extra)
    given_up = "given up" in words
    assert (whole.cuts > 0) == bool(link.cut_s)
    assert (whole.connections > 1) == (bool(link.cut_s) or given_up), "no heartbeat has killed it"
    arrived_whole(whole, most=1.7 if link.late else 1.5)


@pytest.mark.full
def test_a_line_far_away_that_loses_one_packet_of_ten(tmp_path):
    said = lossy(tmp_path, 300, 0.1, 0.25)
    assert (said["code"], said["updates"]) == (0, 1)
