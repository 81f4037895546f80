"""The secrets of masked rounds on a client's disk: nothing is used twice in two ways."""

import threading
from pathlib import Path

import pytest

from fcil_client.state.mask_secrets import MaskFile
from fcil_client.state.peers import PeerBook
from fcil_protocol.errors import CorruptFile, TrustError, UsageError
from fcil_protocol.ids import RoundKey
from fcil_protocol.trust.keys import PrivateKeys, fingerprint_of

LOCKS = Path("/proc/locks")
RUN, OTHER = "r20261127-120000-0000", "r20261127-130000-0000"


def key(cycle=0, task=0, run=RUN):
    return RoundKey(run, task, "mask_keys", cycle)


def settled(path, *, cycle=0):
    file = MaskFile(path)
    file.begin(key(cycle))
    file.settle_members("list")
    file.settle_delivered("letters")
    file.settle_masked(b"vector", "round", ["cats", "dogs"])
    file.settle_survivors("all")
    return file


def test_secrets_are_drawn_once_for_a_masked_round_and_survive_a_restart(tmp_path):
    first = MaskFile(tmp_path).begin(key())
    again = MaskFile(tmp_path).begin(key())
    assert first == again == MaskFile(tmp_path).of(RUN, 0, 0)
    assert (tmp_path / "masks.json").stat().st_mode & 0o777 == 0o600
    assert first.mask.hex() not in repr(first)
    second = MaskFile(tmp_path).begin(key(1))
    assert second.mask != first.mask


@pytest.mark.parametrize("steps", [[key(1), key(0)], [key(0, 1), key(5, 0)]])
def test_an_earlier_masked_round_does_not_begin_again(tmp_path, steps):
    later, earlier = steps
    MaskFile(tmp_path).begin(later)
    with pytest.raises(TrustError, match="took no part in it, or it is over"):
        MaskFile(tmp_path).begin(earlier)
    with pytest.raises(TrustError):
        MaskFile(tmp_path).of(RUN, earlier.task, earlier.round)


def test_not_even_when_another_run_was_asked_for_between(tmp_path):
    file = settled(tmp_path)
    file.begin(key(run=OTHER))
    with pytest.raises(TrustError):
        file.begin(key())
    file.begin(key(1))
    with pytest.raises(TrustError, match="in a sum of this run already"):
        file.check_unused(RUN, (0, 1), ["dogs"])
    file.check_unused(OTHER, (0, 1), ["dogs"])


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("settle_members", ("another",)),
        ("settle_delivered", ("others",)),
        ("settle_masked", (b"another", "round", ["cats", "dogs"])),
        ("settle_masked", (b"vector", "another", ["cats", "dogs"])),
        ("kept", ("another",)),
        ("check_about", ("another",)),
        ("settle_survivors", ("fewer",)),
    ],
)
def test_what_was_used_once_is_not_used_otherwise(tmp_path, what, other, restart):
    file = settled(tmp_path)
    before = (tmp_path / "masks.json").read_bytes()
    if restart:
        file = MaskFile(tmp_path)
    with pytest.raises(TrustError, match="masked round: .*another"):
        getattr(file, what)(*other)
    assert (tmp_path / "masks.json").read_bytes() == before
    settled(tmp_path)  # the same again is no fault


def test_images_of_a_class_are_in_one_sum_of_a_run(tmp_path):
    """From the moment when the sum can leave: whether it was opened, the client cannot know."""
    settled(tmp_path)
    file = MaskFile(tmp_path)
    file.check_unused(RUN, (0, 0), ["cats"])  # the same masked round, after a restart
    file.begin(key(0, task=3))
    file.settle_members("list")
    for once in (["cats"], ["birds", "dogs"]):
        with pytest.raises(TrustError, match="in a sum of this run already"):
            file.check_unused(RUN, (3, 0), once)
        with pytest.raises(TrustError, match="in a sum of this run already"):
            file.settle_masked(b"other", "round", once)
    file.settle_masked(b"other", "round", ["birds"])


def test_the_very_bytes_that_masks_hide_are_kept(tmp_path):
    assert settled(tmp_path).kept("round") == b"vector"
    assert MaskFile(tmp_path).kept("round") == b"vector"
    assert (tmp_path / "masked.safetensors").stat().st_mode & 0o777 == 0o600
    (tmp_path / "masked.safetensors").write_bytes(b"other")
    with pytest.raises(CorruptFile, match="its masks can hide nothing else"):
        MaskFile(tmp_path).kept("round")
    fresh = MaskFile(tmp_path)
    fresh.begin(key(1))
    assert fresh.kept("round") is None


def test_sums_are_not_sent_after_votes_or_shares(tmp_path):
    file = MaskFile(tmp_path)
    file.begin(key())
    file.settle_delivered("letters")
    file.settle_survivors("all")
    with pytest.raises(TrustError, match="before this client was asked for its sums"):
        file.settle_masked(b"vector", "round", ["cats"])


def test_erased_secrets_are_gone_and_the_record_stays(tmp_path):
    file = settled(tmp_path)
    secrets = file.of(RUN, 0, 0)
    file.erase()
    text = (tmp_path / "masks.json").read_text()
    assert not any(seed.hex() in text for seed in (secrets.mask, secrets.own, secrets.letters))
    with pytest.raises(TrustError):
        MaskFile(tmp_path).of(RUN, 0, 0)
    with pytest.raises(TrustError):
        MaskFile(tmp_path).begin(key())
    with pytest.raises(TrustError):
        MaskFile(tmp_path).check_unused(RUN, (1, 0), ["cats"])


def test_what_the_secrets_hide_goes_too_even_if_the_first_try_was_killed_between(tmp_path):
    file = settled(tmp_path)
    hidden = tmp_path / "masked.safetensors"
    upload = hidden.read_bytes()
    file.erase()
    assert not hidden.exists()
    hidden.write_bytes(upload)  # as a kill just before would have left it
    MaskFile(tmp_path).erase()
    assert not hidden.exists()


def test_of_two_threads_one_settles_its_set(tmp_path):
    file = MaskFile(tmp_path)
    file.begin(key())
    ready, refused = threading.Barrier(2), []

    def settle(survivors):
        ready.wait()
        try:
            file.settle_survivors(survivors)
        except TrustError:
            refused.append(survivors)

    threads = [threading.Thread(target=settle, args=(s,)) for s in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1


def test_a_damaged_file_is_not_to_be_restored(tmp_path):
    (tmp_path / "masks.json").write_text("{}")
    with pytest.raises(CorruptFile, match=r"masks\.json is damaged") as caught:
        MaskFile(tmp_path).begin(key())
    assert "Do not restore it" in str(caught.value.action)


def test_peers_are_pinned_by_their_fingerprints_and_stay_so(tmp_path):
    book = PeerBook(tmp_path)
    with pytest.raises(UsageError, match="0 peers"):
        book.pin("0123456789abcdef", pinned=True)
    members = listed({"a" * 26: b"1" * 32, "b" * 26: b"2" * 32, "c" * 26: b"3" * 32})
    book.meet(members, "a" * 26)
    one, two = book.peers()
    assert (one.client, two.client) == ("b" * 26, "c" * 26)
    with pytest.raises(UsageError):
        book.pin(one.fingerprint[:15], pinned=True)
    book.pin(one.fingerprint[:16].upper(), pinned=True)
    book.meet(listed({"b" * 26: b"9" * 32, "c" * 26: b"8" * 32}), "a" * 26)
    kept, changed = PeerBook(tmp_path).peers()
    assert (kept.fingerprint, kept.pinned) == (one.fingerprint, True)
    assert changed.fingerprint != two.fingerprint
    assert PeerBook(tmp_path).known() == {one.client: one.fingerprint}
    book.pin(one.fingerprint, pinned=False)
    assert PeerBook(tmp_path).pinned() == frozenset()
    assert (tmp_path / "peers.json").stat().st_mode & 0o777 == 0o600


def test_a_peer_is_pinned_before_it_is_met(tmp_path):
    fingerprint = fingerprint_of(b"2" * 32)
    book = PeerBook(tmp_path)
    book.pin(fingerprint, pinned=True)
    assert book.pinned() == {fingerprint}
    assert book.known() == {}
    book.meet(listed({"a" * 26: b"1" * 32, "b" * 26: b"2" * 32}), "a" * 26)
    assert book.known() == {"b" * 26: fingerprint}
    assert len(book.peers()) == 1
    other = fingerprint_of(b"7" * 32)
    book.pin(other, pinned=True)
    book.pin(other, pinned=False)
    assert len(book.peers()) == 1


@pytest.mark.skipif(not LOCKS.exists(), reason="only Linux lists who waits for a lock")
def test_a_pin_is_not_undone_by_a_meeting_that_began_before_it(tmp_path, monkeypatch):
    book, listing = PeerBook(tmp_path), listed({"a" * 26: b"1" * 32, "b" * 26: b"2" * 32})
    book.meet(listing, "a" * 26)
    fingerprint = fingerprint_of(b"2" * 32)
    pinning = threading.Thread(
        target=PeerBook(tmp_path).pin, args=[fingerprint], kwargs={"pinned": True}
    )
    read = book.peers

    def while_the_owner_pins():
        found = read()
        monkeypatch.undo()
        pinning.start()
        while not is_waiting(tmp_path / "peers.lock"):
            assert pinning.is_alive()
        return found

    monkeypatch.setattr(book, "peers", while_the_owner_pins)
    book.meet(listed({"b" * 26: b"2" * 32, "c" * 26: b"3" * 32}), "a" * 26)
    pinning.join()
    assert PeerBook(tmp_path).pinned() == {fingerprint}
    assert len(book.peers()) == 2


def is_waiting(path):
    """Return True if somebody waits for a lock on a file (proc(5), /proc/locks)."""
    number = f":{path.stat().st_ino} "
    return any("->" in line and number in line for line in LOCKS.read_text().splitlines())


def test_a_damaged_list_of_peers_says_so(tmp_path):
    (tmp_path / "peers.json").write_text('[{"client": "x", "fingerprint": "1", "pinned": true}]')
    with pytest.raises(CorruptFile, match=r"peers\.json is damaged"):
        PeerBook(tmp_path).pinned()


def listed(keys):
    import numpy as np

    from fcil_adapters.masks.record import MaskList, as_rows

    names = tuple(sorted(keys))
    empty = np.zeros((len(names), 1), np.uint8)
    return MaskList(0, names, empty, as_rows([keys[n] for n in names]), empty)


def test_the_terms_of_a_masked_round_stay_what_they_were(tmp_path):
    file = MaskFile(tmp_path)
    file.begin(key())
    file.settle_terms("ab" * 32)
    MaskFile(tmp_path).settle_terms("ab" * 32)
    with pytest.raises(TrustError, match="other terms when this masked round began"):
        MaskFile(tmp_path).settle_terms("cd" * 32)
    file.begin(key(1))
    file.settle_terms("cd" * 32)


def test_replaced_keys_sign_to_the_end_of_their_masked_round(tmp_path):
    old, new, newest = (PrivateKeys.generate() for _ in range(3))
    file = MaskFile(tmp_path)
    file.keep_signer(old)
    assert list(tmp_path.iterdir()) == [], "no masked round is under way"
    file.begin(key())
    file.keep_signer(old)
    file.keep_signer(new)  # replaced again
    listed = old.public.signing
    assert MaskFile(tmp_path).signer(listed, newest).public == old.public
    assert file.signer(newest.public.signing, newest) is newest
    file.begin(key())
    assert file.signer(listed, newest).public == old.public
    file.begin(key(1))
    assert file.signer(listed, newest) is newest
    file.keep_signer(old)
    (tmp_path / "masks.json").rename(tmp_path / "masks")
    (tmp_path / "masks.json").write_text("{")
    MaskFile(tmp_path).keep_signer(new)  # a damaged file is told in the next masked round
    (tmp_path / "masks").rename(tmp_path / "masks.json")
    file.erase()
    assert file.signer(listed, newest) is newest
