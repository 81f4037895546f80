"""``predict --watch``: each image once, when it is whole; folders and models that come and go."""

import asyncio
import itertools
import json
import os
import shutil
from dataclasses import replace

import pytest
from watchfiles import Change

from client.model_kit import give_model, keep, means, order_of, picture, put_part
from fcil_client.predict import folder_watch
from fcil_client.predict.folder_watch import REST_S, SLOW_WRITER_S, Settling
from fcil_client.predict.live import LivePredictions
from fcil_client.predict.predict import Current, Means, PredictionRequest
from fcil_protocol.errors import DataError

A, B = "a.png", "b.png"
PATIENCE = 20


# --- which files, and when (no IO) ----------------------------------------------------------


def test_a_file_is_ripe_when_it_has_been_at_rest():
    files = Settling()
    files.changed(A, (10, 1), 0.0)
    files.changed(A, (20, 2), REST_S)  # it is written to
    assert files.settled_files(REST_S * 1.9) == []
    assert files.wait_s(REST_S * 1.5) == pytest.approx(REST_S / 2)
    assert files.settled_files(REST_S * 2) == [A]


def test_an_event_without_a_change_does_not_make_it_wait_again():
    files = Settling()
    files.changed(A, (10, 1), 0.0)
    files.changed(A, (10, 1), REST_S / 2)
    assert files.settled_files(REST_S) == [A]


def test_it_is_done_once_and_again_when_it_is_another():
    files = Settling()
    files.changed(A, (10, 1), 0.0)
    files.done(A)
    files.changed(A, (10, 1), 5.0)
    assert files.settled_files(9.0) == []
    assert files.wait_s(9.0) is None
    files.changed(A, (10, 2), 10.0)
    assert files.settled_files(11.0) == [A]


def test_a_file_that_is_gone_is_forgotten_and_new_when_it_comes_back():
    files = Settling()
    files.changed(A, (10, 1), 0.0)
    files.changed(A, None, 0.1)
    assert files.settled_files(9.0) == []
    files.changed(B, (10, 1), 0.0)
    files.done(B)
    files.changed(B, None, 1.0)
    files.changed(B, (10, 1), 2.0)
    assert files.settled_files(9.0) == [B]


def test_an_empty_file_waits_for_its_first_byte_as_long_as_for_a_slow_writer():
    files = Settling()
    files.changed(A, (0, 1), 0.0)
    assert files.settled_files(SLOW_WRITER_S - 0.1) == []
    assert files.wait_s(1.0) == SLOW_WRITER_S - 1.0
    assert files.settled_files(SLOW_WRITER_S) == [A]
    assert files.last_try(A, SLOW_WRITER_S)
    files.done(A)
    files.changed(A, (10, 2), 6.0)  # its writer has begun
    assert files.settled_files(6.0 + REST_S) == [A]


def test_what_cannot_be_decoded_is_given_up_after_a_while():
    files = Settling()
    files.changed(A, (10, 1), 0.0)
    assert not files.last_try(A, SLOW_WRITER_S / 2)
    assert files.last_try(A, SLOW_WRITER_S)


# --- a folder of the real file system -------------------------------------------------------


@pytest.fixture
def client(home, enrolment, tmp_path):
    home.save_enrolment(replace(enrolment, data=str(tmp_path / "images")))
    give_model(home)
    return home


class Scene:
    """A watch that runs, its lines and its words as they come."""

    def __init__(self, home, folder):
        self.folder = folder
        self.rows, self.said = asyncio.Queue(), asyncio.Queue()
        current = Current(home, Means(calibrate=False), lambda *_: None)
        self.live = LivePredictions(
            folder, current.open(), current, Means(), PredictionRequest(), self.said.put_nowait
        )

    async def word(self, part):
        while part not in (text := await self.said.get()):
            pass
        return text

    async def row(self):
        row = await self.rows.get()
        name = row["image"].removeprefix(str(self.folder) + "/")
        return name, row["top"][0]["class"] if "top" in row else row["error"]


def play(home, folder, scenario):
    """Run ``async scenario(scene)`` beside a watch; then nothing more may be said of an image."""

    async def main():
        scene = Scene(home, folder)
        async with asyncio.timeout(PATIENCE):
            running = asyncio.ensure_future(scene.live.run(scene.rows.put_nowait))
            try:
                await scene.word("watching")
                await scenario(scene)
            finally:
                running.cancel()
                await asyncio.wait({running})
        assert scene.rows.empty()

    asyncio.run(main())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "camera"
    folder.mkdir()
    (folder / "old.png").write_bytes(picture(0))
    return folder


def test_new_images_are_named_once_each_and_those_that_were_there_are_not(client, folder):
    async def scenario(scene):
        (folder / "new.png").write_bytes(picture(4))
        assert await scene.row() == ("new.png", 4)
        (folder / "old.png").chmod(0o600)  # no other image for that
        (folder / "notes.txt").write_text("no image")
        (folder / ".hidden.png").write_bytes(picture(1))
        (folder / "next.png").write_bytes(picture(1))
        assert await scene.row() == ("next.png", 1)
        (folder / "new.png").write_bytes(picture(3))  # another picture under the same name
        assert await scene.row() == ("new.png", 3)

    play(client, folder, scenario)


def test_a_file_that_is_written_slowly_is_named_when_it_is_whole(client, folder):
    data = picture(4)

    async def scenario(scene):
        with (folder / "slow.png").open("wb") as file:
            for end in (10, len(data) // 2):
                file.write(data[file.tell() : end])
                file.flush()
                (folder / f"beside-{end}.png").write_bytes(picture(1))
                # Named after the half file has been looked at, or at least seen.
                assert await scene.row() == (f"beside-{end}.png", 1)
            file.write(data[file.tell() :])
        assert await scene.row() == ("slow.png", 4)

    play(client, folder, scenario)


def test_an_image_that_stays_broken_is_told_once(client, folder, monkeypatch):
    monkeypatch.setattr(folder_watch, "SLOW_WRITER_S", 0.5)

    async def scenario(scene):
        (folder / "broken.png").write_bytes(picture(4)[:300])
        name, error = await scene.row()
        assert name == "broken.png"
        assert "decoded" in error

    play(client, folder, scenario)


def test_folders_that_are_moved_in_whole_and_files_that_are_renamed_are_seen(
    client, folder, tmp_path
):
    (tmp_path / "day" / "hour").mkdir(parents=True)
    (tmp_path / "day" / "hour" / "x.png").write_bytes(picture(1))

    async def scenario(scene):
        (tmp_path / "day").rename(folder / "day")
        assert await scene.row() == ("day/hour/x.png", 1)
        (folder / "upload.part").write_bytes(picture(4))
        (folder / "upload.part").rename(folder / "upload.png")
        assert await scene.row() == ("upload.png", 4)
        (folder / "made").mkdir()
        (folder / "made" / "y.png").write_bytes(picture(0))
        assert await scene.row() == ("made/y.png", 0)

    play(client, folder, scenario)


def test_hidden_folders_and_links_to_folders_are_not_entered(client, folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0.png").write_bytes(picture(1))

    async def scenario(scene):
        (folder / "link").symlink_to(tmp_path / "other")
        (folder / ".hidden").mkdir()
        (folder / ".hidden" / "a.png").write_bytes(picture(1))
        (folder / ".hidden" / "a.png").rename(folder / "a.png")
        assert await scene.row() == ("a.png", 1)
        (folder / "b.png").write_bytes(picture(4))
        assert await scene.row() == ("b.png", 4)

    play(client, folder, scenario)


def test_deleted_images_are_no_trouble_and_a_deleted_folder_is_waited_for(client, folder):
    async def scenario(scene):
        (folder / "gone.png").write_bytes(picture(4))
        (folder / "gone.png").unlink()
        (folder / "stays.png").write_bytes(picture(1))
        assert await scene.row() == ("stays.png", 1)
        shutil.rmtree(folder)
        await scene.word("is gone; waiting for it")
        folder.mkdir()
        (folder / "back.png").write_bytes(picture(0))
        assert await scene.row() == ("back.png", 0)

    play(client, folder, scenario)


def test_a_newer_model_is_taken_and_told(client, folder):
    async def scenario(scene):
        part = put_part(client, "current", means((7, 8)), state=9)
        await asyncio.to_thread(keep, client, order_of([part], state=9))
        assert "newer model" in await scene.word("newer")
        (folder / "new.png").write_bytes(picture(8))
        assert await scene.row() == ("new.png", 8)

    play(client, folder, scenario)


def test_a_newer_model_that_cannot_be_used_leaves_the_one_before(client, folder):
    async def scenario(scene):
        part = put_part(client, "current", means(()), state=9)
        await asyncio.to_thread(keep, client, order_of([part], state=9))
        await scene.word("the previous one stays")
        (folder / "new.png").write_bytes(picture(4))
        assert await scene.row() == ("new.png", 4)

    play(client, folder, scenario)


def test_a_folder_that_the_system_cannot_watch_ends_it_with_a_sentence(client, folder, monkeypatch):
    async def refused(*_args, **_options):
        raise OSError(28, "inotify watch limit reached")
        yield set()

    monkeypatch.setattr(folder_watch, "awatch", refused)

    async def main():
        scene = Scene(client, folder)
        with pytest.raises(DataError, match="max_user_watches"):
            await scene.live.run(scene.rows.put_nowait)

    asyncio.run(main())


def test_folders_that_link_to_each_other_are_not_walked_by_the_watcher(tmp_path, monkeypatch):
    """By itself it would follow links to a million paths, on the command's loop."""
    names = [str(i) for i in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
    for one, other in itertools.permutations(names, 2):
        (tmp_path / one / f"to{other}").symlink_to(tmp_path / other)
    given = []

    async def watch(*places, recursive=True, **_options):
        given.append((places, recursive))
        if len(given) == 1:
            (tmp_path / "new").mkdir()
            yield {(Change.added, str(tmp_path / "new"))}
        if len(given) == 2:
            raise FileNotFoundError(2, "No such file or directory")
        await asyncio.Event().wait()

    monkeypatch.setattr(folder_watch, "awatch", watch)

    async def main():
        async with folder_watch.FolderEvents.on(tmp_path) as ears:
            assert await ears.wait(None) == {tmp_path / "new"}
            assert await ears.wait(None) == {tmp_path}, "one went before it was watched"

    asyncio.run(main())
    folders = (tmp_path, *sorted(tmp_path / name for name in names))
    more = (*folders, tmp_path / "new")
    assert given == [(folders, False), (more, False), (more, False)]


def test_a_name_that_is_no_text_ends_nothing(client, folder):
    async def scenario(scene):
        (folder / os.fsdecode(b"no-text-\xff.png")).write_bytes(picture(4))
        assert await scene.row() == ("no-text-\udcff.png", 4)
        (folder / "next.png").write_bytes(picture(1))
        assert await scene.row() == ("next.png", 1)

    play(client, folder, scenario)


def test_many_at_once_are_shown_batch_by_batch(client, folder, monkeypatch):
    sizes, rows = [], LivePredictions._rows

    def recorded(self, paths):
        sizes.append(len(paths))
        return rows(self, paths)

    async def scenario(scene):
        scene.live._means = Means(batch=2)
        for i in range(5):
            (folder.parent / f"{i}.png").write_bytes(picture(i))
            (folder.parent / f"{i}.png").rename(folder / f"{i}.png")
        assert {(await scene.row())[0] for _ in range(5)} == {f"{i}.png" for i in range(5)}
        assert max(sizes) <= 2

    monkeypatch.setattr(LivePredictions, "_rows", recorded)
    play(client, folder, scenario)


def test_an_image_whose_event_is_lost_is_found(client, folder, monkeypatch):
    """Systems drop events when too many come at once."""
    monkeypatch.setattr(folder_watch, "SWEEP_S", 0.1)

    async def deaf(*_args, **_options):
        await asyncio.Event().wait()
        yield set()

    monkeypatch.setattr(folder_watch, "awatch", deaf)

    async def scenario(scene):
        (folder / "new.png").write_bytes(picture(4))
        assert await scene.row() == ("new.png", 4)
        (folder / "next.png").write_bytes(picture(1))
        assert await scene.row() == ("next.png", 1)

    play(client, folder, scenario)


def test_rows_are_data(client, folder):
    async def scenario(scene):
        (folder / "new.png").write_bytes(picture(4))
        json.dumps(await scene.rows.get())

    play(client, folder, scenario)
