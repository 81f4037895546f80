"""What clients say they fetched elsewhere is counted as far as it is possible, and no further."""

import asyncio

import pytest

from fcil_protocol.messages.messages import Fetched
from fcil_server.daemon.dispatch import MOST_ATTEMPTS, MOST_REPORTED
from fcil_server.ledger.enums import Cause
from server.daemon.test_live import noted, ready, serving


def counted(server):
    found = [c for c in server.ledger.bytes.all(server.ledger.runs.newest().run_id)
             if c.cause is Cause.OBJECT_STORE]  # fmt: skip
    return sum(c.wire for c in found)


@pytest.mark.processes
def test_a_part_is_counted_a_few_times_whatever_is_said_and_never_refused(tmp_path):
    async def story():
        async with serving(tmp_path) as server:
            await noted(server, "task_opened")
            a, b = [await ready(server, name) for name in ("a", "b")]
            order = await a.asked()
            part = next(p for p in order.parts if p.name == "current")
            meter = server._coordinator.ports.parts().context.byte_meter
            for _ in range(300):
                a.say(Fetched(digest=part.digest, size=2**53 - 1))
            a.say(Fetched(digest="a" * 64, size=5))  # of no part, or of one long ago
            b.say(Fetched(digest=part.digest, size=7))
            for n in range(MOST_REPORTED + 5):
                b.say(Fetched(digest=f"{n:064x}", size=1))
            wanted = MOST_ATTEMPTS * part.sealed_bytes + 7
            while counted(server) < wanted:
                meter.flush()
                await asyncio.sleep(0)
            assert counted(server) == wanted
            assert not server.ledger.refusals.counts()
            a.close()
            b.close()

    asyncio.run(asyncio.wait_for(story(), 60))
