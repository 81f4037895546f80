"""A daemon on a device that may not work now, against a server that is told what to say."""

from dataclasses import replace

import pytest

from client.daemon_kit import order
from fcil_client.cli.show_status import show_status
from fcil_client.policy import watch
from fcil_client.policy.policy import Facts, Heat, PolicyRules
from fcil_client.session.events import Work
from fcil_protocol.messages.messages import Ack, Decline, Progress, Update

BATTERY, MAINS = Facts(on_mains=False, charge=80.0), Facts(on_mains=True, charge=80.0)
ON_MAINS = PolicyRules(only_on_mains=True)


def hot(now):
    return Facts(heat=(Heat("cpu", now, 100.0),))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch, "READ_S", 0.005)


async def begin(server, client):
    """Let a round begin whose work waits for the test."""
    await server.take_in()
    client.work.gate.clear()
    server.say(order())
    await client.until(lambda: client.client._session.work is Work.WORKING)


async def update(server):
    """Acknowledge an update, and let pass what was said of its progress."""
    while True:
        message, blobs = await server.receive()
        if isinstance(message, Update):
            server.say(Ack(digest=message.digest))
            return message.digest, blobs
        assert isinstance(message, Progress), message


def test_on_battery_a_round_is_declined_and_on_mains_the_client_asks_in_again(play):
    async def story(server, client):
        await server.take_in()
        server.say(order())
        declined = await server.hear(Decline)
        assert declined.reason == "not_now", "and not why: that is the owner's affair"
        assert client.said("declined task 0 train round 0: on battery.")
        said = client.client.status()["manners"]
        assert (said["share"], said["why"], said["on_mains"]) == (0.0, "on battery", False)
        client.sensors.facts = MAINS
        server.say(Ack(digest=await server.inventory(names=["cat"])))
        server.say(order())
        digest, _ = await update(server)
        assert digest
        assert client.client.status()["manners"]["rules"] == ["only on mains"]
        assert len(client.said("paused: on battery")) == len(client.said("works again")) == 1

    play(story, manners=ON_MAINS, facts=BATTERY)


def test_work_stands_still_while_the_mains_are_away_and_goes_on_after(play):
    async def story(server, client):
        await begin(server, client)
        client.client._trained(1, 4)
        assert (await server.hear(Progress)).paused is False
        client.sensors.facts = BATTERY
        told = await server.hear(Progress)
        assert (told.paused, told.done, told.total) == (True, 1, 4)
        assert not client.work._host.rest.allowed.is_set()
        client.sensors.facts = MAINS
        assert (await server.hear(Progress)).paused is False
        assert client.work._host.rest.allowed.is_set()
        client.work.gate.set()
        await update(server)
        assert client.work.cancelled == 0

    play(story, manners=ON_MAINS, facts=MAINS)


def test_when_patience_is_over_the_round_goes_on_without_it(play):
    async def story(server, client):
        await begin(server, client)
        client.sensors.facts = BATTERY
        message = (await server.receive())[0]
        while isinstance(message, Progress):
            message = (await server.receive())[0]
        assert isinstance(message, Decline)
        assert message.reason == "not_now"
        await client.until(lambda: client.work.cancelled == 1)
        client.sensors.facts = MAINS
        await server.inventory(names=["cat"])

    play(story, facts=MAINS, manners=replace(ON_MAINS, patience_s=0.05))


def test_heat_slows_the_work_down_and_the_worker_rests_a_part_of_the_time(play, monkeypatch):
    monkeypatch.setattr(watch, "PERIOD_S", 0.01)

    async def story(server, client):
        rest = client.work._host.rest
        await server.take_in()
        client.sensors.next = [hot(96.0), hot(93.0)]
        await client.until(lambda: client.said("works 50 % of the time"))
        for allowed in (False, True, False, True):
            await client.until(lambda allowed=allowed: rest.allowed.is_set() is allowed)
        assert client.client._session.pause_reason == "", "it may work, only less"
        client.sensors.next = [hot(60.0)]  # also if a reading of before is still to come
        await client.until(lambda: client.said("works again without pauses"))
        await client.until(rest.allowed.is_set)

    play(story, facts=hot(60.0))


def test_sensors_that_matter_to_nobody_are_read_once(play):
    async def story(server, client):
        await server.take_in()
        server.say(order())
        await update(server)
        assert client.sensors.reads == 1

    play(story, facts=BATTERY)


def test_an_update_that_is_ready_is_sent_on_battery(play):
    async def story(server, client):
        await begin(server, client)
        client.sensors.facts = BATTERY
        await client.until(lambda: client.client._session.pause_reason)
        client.work.gate.set()
        await update(server)

    play(story, manners=ON_MAINS, facts=MAINS)


def test_the_status_says_rules_reasons_and_sensors(play, capsys):
    facts = Facts(on_mains=False, charge=80.0, heat=(Heat("cpu", 50.0, 95.0), Heat("nvme", 40.0)))

    async def story(server, client):
        await server.take_in()
        show_status([{**client.client.status(), "answers": True, "damaged": "", "model": None}])

    play(story, manners=ON_MAINS, facts=facts)
    shown = capsys.readouterr().out
    assert "idle, paused" in shown
    assert "manners  only on mains; now on battery" in shown
    assert "on battery (80 %), cpu 50 °C of 95 °C" in shown
    assert "nice 10" in shown


def test_a_machine_that_tells_nothing_is_said_to(play, capsys):
    async def story(server, client):
        await server.take_in()
        show_status([{**client.client.status(), "answers": True, "damaged": "", "model": None}])

    play(story)
    shown = capsys.readouterr().out
    assert "battery: not reported, temperature: not reported" in shown
    assert "manners" not in shown


def test_a_daemon_that_an_earlier_version_started_is_shown_too(play, capsys):
    async def story(server, client):
        await server.take_in()
        said = {**client.client.status(), "answers": True, "damaged": "", "model": None}
        show_status([{k: v for k, v in said.items() if k not in ("manners", "resources")}])

    play(story)
    assert "work     idle\n" in capsys.readouterr().out
