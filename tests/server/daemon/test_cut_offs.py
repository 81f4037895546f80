"""A member that goes on after hundreds of refusals is not heard for a while, and is one all along."""

import asyncio
from types import SimpleNamespace

import pytest

from fcil_protocol.errors import CutOff, FcilError
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.daemon.cut_offs import CutOffs
from fcil_server.federation.allow_list import AllowList
from fcil_server.federation.roster import Roster
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.sessions.conduct import MOST, PAUSE_S, Conduct
from fcil_server.sessions.peers import GOODBYE_S


class Loop:
    """Keeps what is to be done later; `now` is the clock of everybody."""

    def __init__(self, loop, monkeypatch):
        self.now, self.due = 0.0, []
        monkeypatch.setattr(loop, "call_later", lambda s, f, *a: self.due.append((s, f, a)))

    def run(self, seconds):
        """Do what is due after so many seconds."""
        self.now += seconds
        ready = [d for d in self.due if d[0] <= seconds]
        self.due = [d for d in self.due if d[0] > seconds]
        for _, function, arguments in ready:
            function(*arguments)


class Desk:
    """As much of a server as is needed: a real roster and ledger, and recorders."""

    def __init__(self, ledger, loop):
        self.said, self.sent, self.dismissed, self.cut, self.silenced = [], [], [], [], []
        self.ledger = ledger
        federation = SimpleNamespace(ledger=ledger, keys=PrivateKeys.generate())
        federation.id = RootKey.generate().federation
        self.roster = Roster(federation, AllowList(lambda: loop.now))
        self.keys = PrivateKeys.generate().public
        self.client = self.roster.enrol_local("camera", self.keys, "uid 0")
        self.peer = SimpleNamespace(client=self.client, conn=7)
        self.peers = SimpleNamespace(refused={}, by_client=lambda _: self.peer)
        speaker = SimpleNamespace(
            send=lambda _, message: self.sent.append(message), cut=self.cut.append
        )
        self.cut_offs = CutOffs(
            self.roster,
            self.peers,
            notify=lambda *note: self.said.append(note),
            speaker=lambda: speaker,
            dismiss=self.dismissed.append,
            silence=self.silenced.append,
            conduct=Conduct(lambda: loop.now),
        )

    def flood(self):
        for _ in range(MOST + 1):
            self.cut_offs.count_needless(self.client)

    @property
    def is_member(self):
        return self.roster.allow_list.is_member(self.keys.curve)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run ``story(desk, loop)``."""

    async def main(story):
        with Ledger(tmp_path / LEDGER_NAME) as ledger:
            loop = Loop(asyncio.get_running_loop(), monkeypatch)
            story(Desk(ledger, loop), loop)

    return lambda story: asyncio.run(main(story))


def test_it_hears_why_is_cut_and_is_a_guest_for_a_minute(play):
    def story(desk, loop):
        desk.cut_offs.refuse(desk.client)  # nothing is against it yet
        desk.flood()
        (nack,) = desk.sent
        assert nack.code == "cut_off"
        assert desk.dismissed == [7], "what it has sent already is not read any more"
        assert not desk.is_member
        assert desk.roster.allow_list(desk.keys.curve), "it may come and hear why"
        with pytest.raises(CutOff, match="in 60 s"):
            desk.cut_offs.refuse(desk.client)
        loop.run(GOODBYE_S)
        assert desk.cut == [desk.peer]
        loop.run(PAUSE_S)
        assert desk.is_member
        desk.cut_offs.refuse(desk.client)

    play(story)


def test_it_is_said_once_in_notes_audit_and_status(play):
    def story(desk, loop):
        desk.flood()
        desk.flood()
        assert [note[:2] for note in desk.said] == [("warning", "cut_off")]
        (entry,) = [a for a in desk.ledger.audit.newest() if a.action == "cut_off"]
        assert entry.detail == (
            "camera is cut off for 60 s: too many of its messages were refused or unnecessary "
            "(600 at once, then 10 a second)"
        )
        assert desk.peers.refused[desk.client].startswith("cut off for 60 s")
        assert desk.silenced == [desk.client], "and if it is a relay, its lanes too"
        loop.run(PAUSE_S)
        assert not desk.peers.refused

    play(story)


def test_who_was_revoked_meanwhile_is_no_member_after_the_pause(play):
    def story(desk, loop):
        desk.flood()
        desk.roster.revoke(desk.ledger.clients.get(desk.client), "stolen", "uid 0")
        loop.run(PAUSE_S)
        assert not desk.is_member

    play(story)


def test_a_full_disk_spares_nobody(play, monkeypatch):
    def story(desk, loop):
        def full(*_):
            raise FcilError("no space is left")

        monkeypatch.setattr(desk.ledger.audit, "add", full)
        desk.flood()
        assert not desk.is_member
        loop.run(PAUSE_S)
        assert desk.is_member

    play(story)
