"""The worker's jobs beside the loop: what is said while one takes long, and of the images."""

import asyncio
import gc
import warnings
from dataclasses import replace
from types import SimpleNamespace

from client.round_kit import TERMS
from fcil_client.daemon import jobs as module
from fcil_client.daemon.jobs import Jobs
from fcil_client.data.inventory import Inventory
from fcil_client.notes import Notes
from fcil_client.session import events


def test_a_backbone_that_takes_long_is_said_to_be_loading_until_it_is_there(monkeypatch):
    monkeypatch.setattr(module, "STILL_S", 0.001)
    said, fed = [], []

    async def work():
        heard_twice, ready = asyncio.Event(), asyncio.Event()

        def notify(note):
            said.append(note.text)
            if sum("still loading" in text for text in said) == 2:
                heard_twice.set()

        async def load(_):
            await heard_twice.wait()

        async def close():
            pass

        def feed(event):
            fed.append(event)
            ready.set()

        jobs = Jobs(
            SimpleNamespace(load=load, close=close, device="cpu"), Notes(notify),
            feed=feed, fail=said.append, progress=lambda *_: None,
        )  # fmt: skip
        jobs.load(TERMS)
        await ready.wait()
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        await asyncio.wait(others)  # what would say more is among them
        await jobs.stop()

    asyncio.run(work())
    assert fed == [events.BackboneReady(TERMS.run)]
    assert "still loading" in said[-2]
    assert said[-1] == "ready on cpu"


def test_a_load_under_way_is_kept_when_its_run_is_met_again():
    said, fed, loads = [], [], []

    async def work():
        gate, ready = asyncio.Event(), asyncio.Event()

        async def load(terms):
            loads.append(terms.run)
            await gate.wait()

        async def close():
            pass

        def feed(event):
            fed.append(event)
            ready.set()

        jobs = Jobs(
            SimpleNamespace(load=load, close=close, device="cpu"), Notes(lambda n: said.append(n.text)),
            feed=feed, fail=said.append, progress=lambda *_: None,
        )  # fmt: skip
        jobs.load(TERMS)
        await asyncio.sleep(0)
        jobs.load(replace(TERMS))  # over a new connection
        await asyncio.sleep(0)
        assert loads == [TERMS.run]
        gate.set()
        await ready.wait()
        await asyncio.sleep(0)
        assert (fed, said) == ([events.BackboneReady(TERMS.run)], ["ready on cpu"])
        jobs.load(TERMS)  # the one before has ended
        jobs.load(replace(TERMS, run="another"))  # is of another run, and not waited for
        await asyncio.sleep(0)
        assert loads == [TERMS.run, TERMS.run, "another"]
        await jobs.stop()

    asyncio.run(work())


def test_a_load_that_was_stopped_before_it_began_leaves_no_warning():
    """A client that cannot enter its run ends at once; Python warned of its load at the end."""
    fed = []

    async def work():
        async def close():
            pass

        jobs = Jobs(
            SimpleNamespace(close=close), Notes(fed.append),
            feed=fed.append, fail=fed.append, progress=lambda *_: None,
        )  # fmt: skip
        jobs.load(TERMS)
        await jobs.stop()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(work())
        gc.collect()
    assert (fed, warned) == ([], [])


def test_a_fault_of_the_images_is_said_when_it_is_new_and_again_when_it_came_back():
    said, fed = [], asyncio.Queue()
    scans = [["a"], ["a", "b"], ["b"], ["a", "b"]]

    async def scan():
        return Inventory({"cat": 1}, faults=scans.pop(0))

    async def close():
        pass

    async def work():
        jobs = Jobs(
            SimpleNamespace(scan=scan, close=close), Notes(lambda note: said.append(note.text)),
            feed=fed.put_nowait, fail=said.append, progress=lambda *_: None,
        )  # fmt: skip
        while scans:
            jobs.scan()
            assert await fed.get() == events.Scanned()
            said.append("|")
        await jobs.stop()

    asyncio.run(work())
    assert said == ["a", "|", "b", "|", "|", "a", "|"]
