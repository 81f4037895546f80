"""The client's daemon against a server in memory: what goes wrong is said, and it goes on."""

import asyncio
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from watchfiles import Change

from client.daemon_kit import DIGEST, HPARAMS, RUN, RUN2, order
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.daemon import jobs
from fcil_client.data.inventory import Inventory
from fcil_client.link import handshake
from fcil_client.membership import enrol
from fcil_client.session import machine as session
from fcil_client.state.home import state_home
from fcil_protocol.errors import (
    BackboneMismatch,
    ConfigError,
    DataError,
    DiskFull,
    InternalError,
    MethodMismatch,
    StorageError,
    TrustError,
    WorkerDied,
)
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.messages.messages import (
    Ack,
    Bye,
    Decline,
    Hello,
    Nack,
    PartRef,
    Progress,
    RoundClosed,
    Want,
)
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.trust.keys import PrivateKeys


def tangled(data):
    """Make twelve folders of which each links to all others."""
    for i in range(12):
        (data / str(i)).mkdir(parents=True)
    for i, j in itertools.permutations(range(12), 2):
        (data / str(i) / f"to{j}").symlink_to(data / str(j))
    return data


def test_a_round_goes_from_the_order_to_the_ack(play):
    async def scenario(server, running):
        await server.take_in()
        server.say(order())
        digest, payload = await server.envelope()
        assert payload.meta["names"] == ["made"]
        assert running.home.outbox() == [digest], "until the Ack"
        server.say(Ack(digest=digest))
        await running.until(lambda: not running.home.outbox())

    play(scenario)


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (DataError("class 'secret' has no image in its folder."), "data_invalid"),
            (DiskFull("no room for secret.png."), "disk_full"),
            (WorkerDied("killed at secret."), "worker_died"),
            (ValueError("secret"), "internal"),
            (KeyError("secret"), "internal"),
        ],
        ids=["data", "disk", "worker", "value", "key"],
    )
    def test_a_round_that_fails_is_declined_with_a_code_and_the_sentence_stays(
        self, play, error, code
    ):
        async def scenario(server, running):
            running.work.rounds = [error]
            await server.take_in()
            server.say(order())
            assert (await server.hear(Decline)).reason == code
            assert running.said("secret"), "who sits at the client reads all of it"
            server.say(order(1))
            await server.envelope()

        play(scenario)

    def test_an_unexpected_failure_ends_the_daemon_with_an_internal_error_and_a_traceback(
        self, play, caplog
    ):
        """A task that dies silently would leave a client that never answers."""

        async def scenario(server, running):
            await server.take_in()
            running.client._session.handle = lambda _event: 1 / 0
            server.say(order())
            error = await running.end()
            assert isinstance(error, InternalError)
            assert "ZeroDivisionError" in error.message

        play(scenario)
        assert "Traceback" in caplog.text

    def test_so_does_one_after_a_pause(self, play, caplog):
        async def scenario(server, running):
            await server.take_in()
            running.client._session.handle = lambda _event: 1 / 0
            running.client._later(session.FolderChanged(), 0.0)
            assert isinstance(await running.end(), InternalError)

        play(scenario)
        assert "Traceback" in caplog.text

    def test_a_folder_that_cannot_be_watched_is_said_once_and_all_goes_on(self, play, monkeypatch):
        async def too_many(*_args, **_options):
            raise OSError(28, "inotify watch limit reached")
            yield

        monkeypatch.setattr(jobs, "awatch", too_many)

        async def scenario(server, running):
            await server.take_in()
            server.say(order())
            await server.envelope()
            assert len(running.said("cannot be watched")) == 1

        play(scenario)

    def test_a_file_whose_name_is_no_text_ends_nothing(self, play, monkeypatch):
        begun = []

        async def watch(*_args, **_options):
            begun.append(1)
            if len(begun) == 1:  # as watchfiles ends then
                error = RuntimeError('Unable to decode path "/x/\\xFF.png" to string')
                raise ExceptionGroup("unhandled errors in a TaskGroup", [error])
            await asyncio.Event().wait()
            yield

        monkeypatch.setattr(jobs, "awatch", watch)

        async def scenario(server, running):
            await server.take_in()
            server.say(order())
            await server.envelope()
            assert len(begun) == 2

        play(scenario)

    def test_each_folder_is_named_to_the_watcher_and_anew_when_one_came(
        self, tmp_path, monkeypatch
    ):
        """By itself it would follow links to a million paths, on the daemon's loop."""
        data, given, anew = tangled(tmp_path / "data"), [], asyncio.Event()

        async def watch(*places, recursive=True, **_options):
            given.append((places, recursive))
            if len(given) == 1:
                yield {(Change.modified, str(data / "5" / "1.png"))}
                (data / "new").mkdir()
                yield {(Change.added, str(data / "new"))}
            anew.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(jobs, "awatch", watch)

        async def go():
            heard = jobs.changes(data, lambda *said: pytest.fail(str(said)))
            told = [await anext(heard) for _ in range(3)]
            again = asyncio.create_task(anext(heard))
            await asyncio.wait_for(anew.wait(), 60)
            again.cancel()
            return told

        assert asyncio.run(go()) == [{str(data / "5" / "1.png")}, {str(data / "new")}, set()]
        (first, one), (second, other) = given
        assert (one, other) == (False, False)
        assert len(first) == 1 + 12 + 12 * 11
        assert {*second} - {*first} == {str(data / "new")}

    def test_changes_are_seen_below_a_folder_of_any_name(self, tmp_path):
        data = tmp_path / "node_modules" / ".venv"
        (data / "cat").mkdir(parents=True)

        async def go():
            heard = jobs.changes(data, lambda *said: pytest.fail(str(said)))
            first = asyncio.create_task(anext(heard))
            while not first.done():  # the watch begins in a thread
                (data / "cat" / "1.png").write_bytes(b"1")
                await asyncio.wait({first}, timeout=0.1)
            await heard.aclose()
            return first.result()

        paths = asyncio.run(asyncio.wait_for(go(), 60))
        assert paths == {str(data / "cat" / "1.png")}

    def test_a_scan_of_a_folder_whose_name_is_no_text_asks_for_no_other_scan(
        self, tmp_path, monkeypatch
    ):
        """Its opening ends the events, as a change below it does, which is still seen."""
        monkeypatch.setattr(jobs, "QUIET_S", 0.1)
        odd = tmp_path / os.fsdecode(b"l\xe4t")
        for folder in (odd, tmp_path / "cat"):
            folder.mkdir()
            (folder / "1.png").write_bytes(b"1")
        watched, state, opened, compared = jobs._watch, jobs._state, [], []
        monkeypatch.setattr(jobs, "_watch", lambda places: opened.append(places) or watched(places))
        monkeypatch.setattr(jobs, "_state", lambda places: compared.append(1) or state(places))

        async def go():
            heard = jobs.changes(tmp_path, lambda *said: pytest.fail(str(said)))

            async def scanned():
                """Open the folder until the events end; return the change when it was compared."""
                coming, ended, looked = (
                    asyncio.create_task(anext(heard)),
                    len(opened),
                    len(compared),
                )
                while len(opened) <= max(ended, 1):
                    os.listdir(odd)  # again and again: the watch begins in a thread
                    await asyncio.wait({coming}, timeout=0.1)
                while len(compared) == looked:
                    await asyncio.wait({coming}, timeout=0.1)
                return coming

            assert await (await scanned()) == set()  # the state was not known before
            quiet = await scanned()
            (tmp_path / "dog").mkdir()
            assert not quiet.done()
            odd.rename(tmp_path / "l\xe4t")
            while await quiet:  # changes with names; then all is looked through
                quiet = asyncio.create_task(anext(heard))
            await heard.aclose()

        asyncio.run(asyncio.wait_for(go(), 60))
        assert {str(tmp_path / "dog"), str(tmp_path / "l\xe4t")} <= {*opened[-1]}

    def test_events_that_are_lost_without_a_pause_hide_no_change(self, tmp_path, monkeypatch):
        """A file whose name is no text may be written all the time."""

        async def watch(_places):
            error = RuntimeError('Unable to decode path "/x/\\xFF.png" to string')
            raise ExceptionGroup("", [error])
            yield

        monkeypatch.setattr(jobs, "QUIET_S", 0.0)
        monkeypatch.setattr(jobs, "_watch", watch)
        heard = jobs.changes(tmp_path, lambda *said: pytest.fail(str(said)))

        async def go():
            assert await anext(heard) == set()
            (tmp_path / "cat").mkdir()
            assert await anext(heard) == set()

        asyncio.run(asyncio.wait_for(go(), 60))

    def test_the_shards_of_a_pattern_are_watched_one_by_one(self, tmp_path, monkeypatch):
        given = []

        async def watch(*places, **_options):
            given.append(places)
            yield {(Change.modified, places[0])}

        monkeypatch.setattr(jobs, "awatch", watch)
        for number in (0, 2):
            (tmp_path / f"s-{number}.tar").touch()
        heard = jobs.changes(tmp_path / "s-{0..2}.tar", lambda *said: pytest.fail(str(said)))
        assert asyncio.run(anext(heard)) == {str(tmp_path / "s-0.tar")}
        assert given == [(str(tmp_path / "s-0.tar"), str(tmp_path / "s-2.tar"))]

    def test_the_current_folder_is_watched(self, tmp_path, monkeypatch):
        (tmp_path / "cat").mkdir()
        monkeypatch.chdir(tmp_path)
        assert jobs._folders(Path()) == [".", "cat"]

    @pytest.mark.full
    def test_folders_that_link_to_each_other_are_watched_and_a_new_one_too(self, tmp_path):
        data = tangled(tmp_path / "data")

        async def go():
            heard = jobs.changes(data, lambda *said: pytest.fail(str(said)))

            async def until(wanted, stir=lambda: None):
                asked = asyncio.create_task(anext(heard))
                while True:
                    stir()  # again and again: it is not known when the system watches
                    await asyncio.wait({asked}, timeout=0.2)
                    if asked.done():
                        if wanted({Path(path).name for path in await asked}):
                            return
                        asked = asyncio.create_task(anext(heard))

            await until({"1.png"}.issubset, (data / "5" / "1.png").touch)
            (data / "new").mkdir()
            await until(lambda names: not names)  # all is looked through anew
            await until({"2.png"}.issubset, (data / "new" / "2.png").touch)
            (data / "new").rename(tmp_path / "old")
            (data / "new").mkdir()  # another folder of the same name
            await until(lambda names: not names)
            await until({"3.png"}.issubset, (data / "new" / "3.png").touch)
            await heard.aclose()

        asyncio.run(asyncio.wait_for(go(), 100))

    def test_a_folder_that_goes_before_it_is_watched_is_no_fault(self, tmp_path, monkeypatch):
        (tmp_path / "a").mkdir()
        given = []

        async def watch(*places, **_options):
            given.append(places)
            if len(given) == 1:
                (tmp_path / "a").rmdir()
                raise FileNotFoundError(2, "No such file or directory")
            await asyncio.Event().wait()
            yield

        monkeypatch.setattr(jobs, "awatch", watch)
        heard = jobs.changes(tmp_path, lambda *said: pytest.fail(str(said)))
        assert asyncio.run(anext(heard)) == set()
        assert given == [(str(tmp_path), str(tmp_path / "a"))]

    def test_a_round_that_trains_is_declined_without_torch_before_anything_is_fetched(self, play):
        """Other rounds of its method are not."""

        async def scenario(server, running):
            await server.take_in()
            talk, running.work._engine = running.client._talk, "onnx"
            for trains in (True, False):
                declared = METHOD.exchanges(HPARAMS, NO_BACKBONE)
                mixed = replace(
                    METHOD,
                    needs_backbone=True,
                    exchanges=lambda *_, t=trains, d=declared: tuple(
                        replace(e, trains=t) for e in d
                    ),
                )
                talk.terms = replace(talk.terms, method=mixed)
                server.say(order(parts=[PartRef(name="current", digest="1" * 64, sealed_bytes=9)]))
                if trains:
                    assert (await server.hear(Decline)).reason == "method_mismatch"
                    assert running.said("trains with gradients, which needs torch")
                else:
                    await server.hear(Want)

        play(scenario)

    def test_a_disk_that_is_full_of_parts_declines_the_round(self, play, monkeypatch):
        async def scenario(server, running):
            await server.take_in()

            def full(_keep):
                raise DiskFull("no room.")

            running.home.prune_parts = full
            server.say(order(parts=[PartRef(name="current", digest="1" * 64, sealed_bytes=9)]))
            await server.hear(Want)  # old parts are removed while it is on its way
            assert (await server.hear(Decline)).reason == "disk_full"

        play(scenario)

    def test_a_part_that_the_server_does_not_have_declines_the_round(self, play):
        """The client fetches then: it must not wait for the part for ever."""

        async def scenario(server, running):
            await server.take_in()
            server.say(order(parts=[PartRef(name="current", digest="1" * 64, sealed_bytes=9)]))
            want = await server.hear(Want)
            server.say(Nack(code="storage_failed", text="it is gone", digest=want.digest))
            assert (await server.hear(Decline)).reason == "storage_failed"

        play(scenario)

    def test_a_file_that_cannot_be_removed_is_said_and_all_goes_on(self, play):
        async def scenario(server, running):
            await server.take_in()
            server.say(order())
            digest, _ = await server.envelope()

            def stuck(_digest):
                raise StorageError("cannot remove it.")

            running.home.drop_outgoing = stuck
            server.say(Ack(digest=digest))
            server.say(order(1))
            await server.envelope()
            assert running.said("cannot remove it")

        play(scenario)


class TestFolder:
    def test_a_folder_that_never_was_one_of_images_ends_the_client(self, play):
        async def scenario(server, running):
            running.work.scans = [DataError("no class folders.")]
            await server.greet()
            assert isinstance(await running.end(), DataError)

        play(scenario)

    def test_one_that_is_gone_later_is_announced_as_empty_and_looked_at_again(self, play):
        async def scenario(server, running):
            await server.take_in()
            running.work.scans = [DataError("no class folders.")]
            running.client._feed(session.FolderChanged())
            server.say(Ack(digest=await server.inventory(names=[])))
            server.say(Ack(digest=await server.inventory(names=["cat"])))
            assert running.said("no class folders")

        play(scenario)

    @pytest.mark.parametrize("error", [WorkerDied("killed."), StorageError("no access.")])
    def test_a_scan_that_fails_otherwise_is_tried_again_also_at_the_start(self, play, error):
        async def scenario(server, running):
            running.work.scans = [error]
            await server.greet()
            server.say(Ack(digest=await server.inventory(names=[])))
            server.say(Ack(digest=await server.inventory(names=["cat"])))

        play(scenario)

    def test_a_refused_list_is_said_and_an_empty_one_takes_its_place(self, play):
        async def scenario(server, running):
            await server.greet()
            digest = await server.inventory(names=["cat"])
            server.say(Nack(code="too_large", text="too many classes", digest=digest))
            server.say(Ack(digest=await server.inventory(names=[])))
            assert running.said("too many classes")
            assert running.client.status()["link"] == "ready"

        play(scenario)

    def test_a_list_that_the_server_cannot_keep_now_is_sent_again(self, play):
        async def scenario(server, running):
            await server.greet()
            digest = await server.inventory(names=["cat"])
            server.say(Nack(code="disk_full", text="no room", digest=digest))
            server.say(Ack(digest=await server.inventory(names=["cat"])))
            await running.until(lambda: running.client.status()["link"] == "ready")
            assert running.work.scanned == 1

        play(scenario)


class TestBackbone:
    @pytest.mark.parametrize("error", [WorkerDied("killed."), StorageError("no access.")])
    def test_one_that_cannot_be_loaded_any_more_is_tried_again(self, play, error):
        async def scenario(server, running):
            await server.take_in()
            running.work.loads = [error]
            running.dealer.reconnect()
            await server.hear(Hello)
            server.welcome(run=RUN2, ready=False)
            assert (await server.hear(Hello)).run == RUN2
            assert running.work.loaded == [RUN, RUN2, RUN2]

        play(scenario)

    @pytest.mark.parametrize(
        "error",
        [BackboneMismatch("other weights."), ConfigError("no device cuda:9."), StorageError("no")],
    )
    def test_one_that_never_could_be_loaded_ends_the_client(self, play, error):
        async def scenario(server, running):
            running.work.loads = [error]
            await server.hear(Hello)
            server.welcome(ready=False)
            assert await running.end() is error

        play(scenario)

    def test_options_that_the_method_does_not_take_end_it_with_a_sentence(self, play):
        async def scenario(server, running):
            await server.hear(Hello)
            server.welcome(ready=False, hparams='{"no_such_option": 1}')
            error = await running.end()
            assert isinstance(error, MethodMismatch)
            assert "no_such_option" in error.message

        play(scenario)

    def test_the_server_hears_that_the_schemas_differ(self, play):
        async def scenario(server, running):
            await server.hear(Hello)
            server.welcome(ready=False, schema_digest="5" * 64, method_package="pack 7")
            bye = await server.hear(Bye)
            assert bye.code == MethodMismatch.code
            assert DIGEST[:12] in bye.reason
            assert "5" * 12 in bye.reason
            error = await running.end()
            assert bye.reason == error.message
            assert "Install the server's pack 7 on the client" in error.action

        play(scenario)

    def test_of_another_failure_the_server_hears_the_code_and_the_sentence_stays(self, play):
        async def scenario(server, running):
            running.work.loads = [StorageError("no room for secret.png.")]
            await server.hear(Hello)
            server.welcome(ready=False)
            bye = await server.hear(Bye)
            assert (bye.code, bye.reason) == (StorageError.code, "")
            assert "secret" in (await running.end()).message

        play(scenario)

    def test_a_welcome_that_the_server_did_not_sign_has_no_effect(self, play):
        async def scenario(server, running):
            await server.hear(Hello)
            server.keys = PrivateKeys.generate()
            peer_nonce = server.channel.peer_nonce
            server.channel = Channel(server.keys, server.client)
            server.channel.peer_nonce = peer_nonce
            server.welcome(ready=False, schema_digest="5" * 64)
            await running.until(lambda: running.said("a message was refused"))
            assert running.client.status()["run"] is None

        play(scenario)


class TestSessions:
    def test_a_client_that_learns_is_back_at_once_after_a_reconnect(self, play):
        """It announces what it knows; the worker is busy and is not asked."""

        async def scenario(server, running):
            await server.take_in()
            running.work.gate.clear()
            server.say(order())
            await running.until(lambda: running.client.status()["work"] == "working")
            running.client._feed(session.FolderChanged())
            running.dealer.reconnect()
            assert (await server.hear(Hello)).run == RUN
            server.welcome()
            server.say(Ack(digest=await server.inventory(names=["cat"])))
            assert running.work.scanned == 1
            running.work.gate.set()
            await server.envelope()

        play(scenario)

    @pytest.mark.parametrize("work", ["working", "sending"])
    def test_another_run_ends_the_work_and_forgets_the_state(self, play, work):
        async def scenario(server, running):
            await server.take_in()
            running.home.save_provisional("1" * 64, Payload())
            running.home.settle_provisional("1" * 64, counted=True)
            if work == "working":
                running.work.gate.clear()
            server.say(order())
            if work == "sending":
                await server.envelope()
            await running.until(lambda: running.client.status()["work"] == work)
            running.dealer.reconnect()
            hello = await server.hear(Hello)
            assert (hello.run, hello.schema_digest != "") == (RUN, True)
            server.welcome(run=RUN2, ready=False)
            again = await server.hear(Hello)
            assert (again.run, again.schema_digest != "") == (RUN2, True)
            assert running.work.cancelled == (work == "working")
            assert running.home.outbox() == []
            assert not (running.home.directory / "state.safetensors").exists()
            server.welcome(run=RUN2)
            server.say(Ack(digest=await server.inventory(names=["cat"])))
            running.work.gate.set()
            server.say(order(run=RUN2))
            await server.envelope()

        play(scenario)

    @pytest.mark.parametrize("code", ["bad_signature", "cannot_open", "internal"])
    def test_a_hello_refused_for_now_is_said_again(self, play, code):
        async def scenario(server, running):
            await server.hear(Hello)
            server.say(Nack(code=code, text="not now"))
            await server.hear(Hello)
            server.welcome(ready=False)
            await server.hear(Hello)

        play(scenario)

    @pytest.mark.parametrize("code", sorted(handshake.FATAL))
    def test_a_refusal_that_trying_again_cannot_mend_ends_the_client(self, play, code):
        async def scenario(server, running):
            await server.hear(Hello)
            server.say(Nack(code=code, text="no"))
            assert (await running.end()).code == code

        play(scenario)

    def test_a_round_that_ends_between_hello_and_welcome_is_declined_after_it(self, play):
        """Before the Welcome it could not be signed for this session."""

        async def scenario(server, running):
            await server.take_in()
            running.work.gate.clear()
            running.work.rounds = [DataError("x")]
            server.say(order())
            await running.until(lambda: running.client.status()["work"] == "working")
            running.dealer.reconnect()
            await server.hear(Hello)
            running.work.gate.set()
            await running.until(lambda: running.client.status()["work"] == "idle")
            server.welcome()
            assert (await server.hear(Decline)).reason == "data_invalid"
            await server.inventory(names=["cat"])

        play(scenario)

    def test_nothing_is_taken_before_the_welcome(self, play):
        async def scenario(server, running):
            await server.hear(Hello)
            server.say(order())
            server.say(RoundClosed(run=RUN, task=0, kind="train", round=0, outcome="done"))
            server.welcome(ready=False)
            await server.hear(Hello)
            assert len(running.said("before the Welcome")) == 2
            assert running.client.status()["work"] == "idle"

        play(scenario)

    def test_a_second_connection_with_its_key_ends_the_client(self, play):
        """Would it connect again, the two would cut each other off for ever."""

        async def scenario(server, running):
            await server.take_in()
            server.say(Bye(reason="connected twice", code="two_links"))
            error = await running.end()
            assert type(error) is TrustError
            assert "another connection" in error.message

        play(scenario)

    def test_any_other_goodbye_does_not(self, play):
        async def scenario(server, running):
            await server.take_in()
            server.say(Bye(reason="the server stops"))
            running.dealer.reconnect()
            while not isinstance((await server.receive())[0], Hello):
                pass

        play(scenario)

    def test_where_nobody_answers_the_next_address_is_tried(self, play):
        async def scenario(server, running):
            await server.hear(Hello)
            for _ in range(2):
                running.dealer.disconnect()
                running.dealer._queue.put_nowait(LinkNews("down", "unreachable"))
                await server.hear(Hello)
            assert running.tried == ["a:1", "b:2", "a:1"]

        play(scenario, addresses=("a:1", "b:2"))

    def test_a_server_that_sends_more_than_was_asked_for_is_named(self, play):
        async def scenario(server, running):
            await server.take_in()
            assert running.dealer.allowed == 8  # what the Welcome says of credit
            for _ in range(2):
                running.dealer._queue.put_nowait(LinkNews("flooded"))
                running.dealer.reconnect()
                await server.hear(Hello)
            assert {n.level for n in running.said("more than was asked for")} == {"warning"}

        play(scenario)

    def test_a_server_of_this_machine_that_has_moved_is_followed_at_the_next_try(
        self, play, monkeypatch
    ):
        monkeypatch.setattr(enrol, "_answers", lambda *_, **__: True)

        async def scenario(server, running):
            await server.hear(Hello)
            folder = state_home() / "servers"
            folder.mkdir()
            for federation, addresses in (
                ("0" * 32, ["x:9"]), (server.root.federation, ["c:3", "d:4"]),
            ):  # fmt: skip
                fields = {"name": "f", "directory": "/", "federation": federation}
                text = json.dumps({**fields, "addresses": addresses})
                (folder / f"{federation}.json").write_text(text)
            for _ in range(2):
                running.dealer.disconnect()
                running.dealer._queue.put_nowait(LinkNews("down", "unreachable"))
                await server.hear(Hello)
            assert running.tried == ["a:1", "c:3", "d:4"]
            assert running.home.enrolment().addresses == ("c:3", "d:4")
            assert running.client.enrolment.addresses == ("c:3", "d:4")
            assert running.said("the server is at c:3, d:4 now")

        play(scenario)

    @pytest.mark.parametrize("step", ["load", "offer"])  # before its first chunk, and with it
    def test_an_update_that_cannot_be_read_for_a_moment_is_offered_again(
        self, play, monkeypatch, step
    ):
        async def scenario(server, running):
            await server.take_in()
            outbox, faults = running.client._transfers._outbox, [1, 2]
            work = getattr(outbox, step)

            def refuse(*args, **options):
                if faults:
                    faults.pop()
                    raise StorageError("cannot read it: too many open files.")
                work(*args, **options)

            monkeypatch.setattr(outbox, step, refuse)
            server.say(order())
            digest, _ = await server.envelope()  # and no Decline before it
            assert (faults, running.home.outbox()) == ([], [digest])
            assert running.said("too many open files")

        play(scenario)

    def test_a_late_answer_to_an_older_list_of_classes_is_not_taken_for_an_update(self, play):
        async def scenario(server, running):
            await server.greet()
            old = await server.inventory(names=["cat"])
            running.client._jobs.inventory = Inventory({"cat": 4}, {"cat": 1})
            running.client._feed(session.Scanned())
            new = await server.inventory(names=["cat"])
            server.say(Nack(code="malformed", text="late", digest=old))
            server.say(Ack(digest=old))
            server.say(Ack(digest=new))
            await running.until(lambda: running.client.status()["link"] == "ready")
            assert not running.said("the server has the update")
            assert not running.said("refused")

        play(scenario)


def test_progress_is_told_while_the_link_is_ready_only(play):
    async def scenario(server, running):
        await server.take_in()
        running.work.gate.clear()
        server.say(order())
        await running.until(lambda: running.client.status()["work"] == "working")
        running.client._trained(1, 2)
        assert (await server.hear(Progress)).done == 1

    play(scenario)
