"""Masked rounds on numbers alone: drop-outs, and what a server may not get."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest

from adapters.kit import Federation, client_id, make_tasks, toy_images
from adapters.masks.mask_kit import ABOUT, RUN, USUAL, MaskedRounds
from fcil_adapters.contract import Update
from fcil_adapters.contract.averaging import SumSpec
from fcil_adapters.masks import graph
from fcil_adapters.masks.exchanges import SHARES, UNMASK, VOTES
from fcil_adapters.masks.member import Bounds, Member, keys_upload
from fcil_adapters.masks.record import (
    Letters,
    MaskList,
    MaskRecord,
    as_rows,
    context_of,
    hiding,
    names_part,
    statement,
    tied,
)
from fcil_adapters.masks.shares import (
    RoundSecrets,
    add_stream,
    join,
    seal,
    split,
    stream_of_self,
)
from fcil_adapters.numerics.fixed_point import from_fixed_point, to_fixed_point
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import DataError, InternalError, TrustError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.trust.keys import SEALING_BYTES, PrivateKeys, PublicKeys, fingerprint_of

(TASK,) = make_tasks([0, 1])


def begun(n):
    """Return the masked rounds of n clients, with one class mean each, the task open."""
    toy = Federation.of("running_mean", [toy_images({0: k + 1, 1: 2}, k) for k in range(n)])
    toy.open(TASK)
    return MaskedRounds(toy)


def demanding(least, share=0.6):
    terms = PrivacyTerms(secure="masks", secure_min_clients=least, secure_threshold=share)
    return Bounds(terms)


def plain_state(n, who):
    toy = Federation.of("running_mean", [toy_images({0: k + 1, 1: 2}, k) for k in range(n)])
    toy.open(TASK)
    toy.asleep = set(range(n)) - set(who)
    toy.round("train")
    return toy.state


# --- ring, shares, graph ------------------------------------------------------------------------

SPEC = SumSpec("x", (2,), 30, 2.0**32)


def test_the_sum_of_rings_is_the_sum_of_numbers_whatever_the_order():
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1e3, (30, 2))
    rings = [to_fixed_point(v, SPEC, 30) for v in values]
    assert (sum(rings) == sum(reversed(rings))).all()
    assert np.allclose(from_fixed_point(sum(rings), SPEC), values.sum(0), rtol=0, atol=30 * 2**-31)


@pytest.mark.parametrize("value", [2.0**32 / 3 * 1.001, -(2.0**32), np.nan, np.inf])
def test_a_number_that_could_overflow_is_refused(value):
    with pytest.raises(DataError, match="its part of the bound"):
        to_fixed_point(np.array([value, 0]), SPEC, 3)


def test_a_sum_beyond_its_bound_is_no_result():
    with pytest.raises(InternalError, match="a client or a relay has sent numbers"):
        from_fixed_point(np.array([2**62 + 2**40, 0]), SPEC)


def test_a_stream_is_aes_in_counter_mode_and_cancels():
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    seed = bytes(range(32))
    vector = {"b": np.zeros((2, 2), np.int64), "a": np.array([5], np.int64)}
    add_stream(vector, seed, 1)
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(40))
    numbers = np.frombuffer(stream, "<i8")
    assert vector["a"][0] == numbers[0] + 5
    assert vector["b"].ravel().tolist() == numbers[1:].tolist()
    add_stream(vector, seed, -1)
    assert vector["a"].tolist() == [5]
    assert not vector["b"].any()


def test_any_shares_of_the_threshold_give_the_secret_and_fewer_do_not():
    secret = bytes(range(32))
    shares = split(secret, 3, 5)
    for some in combinations(range(5), 3):
        assert join([(i, shares[i]) for i in some]) == secret
    assert join([(i, shares[i]) for i in (0, 1)]) != secret


@pytest.mark.parametrize("n", [3, 4, 7, 30, 31, 60, 100, 300])
def test_neighbours_are_mutual_and_many(n):
    clients = tuple(ClientId(f"{'a' * 22}{i:04d}".translate(str.maketrans("0189", "wxyz")))
                    for i in range(n))  # fmt: skip
    clients = tuple(sorted(clients))
    around = graph.circle(clients, b"digest")
    assert {len(some) for some in around} == {graph.degree(n)}
    assert all(i in around[j] for i in range(n) for j in around[i])
    assert all(i not in around[i] for i in range(n))
    assert graph.is_connected(around, range(n))
    k, t = graph.degree(n), graph.threshold(graph.degree(n))
    if n >= 7:  # a third of the neighbours cannot have both secrets of a client
        assert 2 * t > k + k // 3


@pytest.mark.parametrize("n", [3, 4, 5, 10, 31, 100])
def test_two_sets_cannot_both_have_enough_votes_of_clients_of_which_a_third_lies(n):
    honest = n - n // 3
    assert 2 * graph.votes_needed(n) > honest + 2 * (n // 3)


# --- drop-outs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gone",
    [(), (2, 3), *(pytest.param(g, marks=pytest.mark.full) for g in ((0,), (3,), (6,), (0, 6)))],
)
def test_the_sum_is_of_those_that_sent_one_whichever_others_open_it(gone):
    """Seven clients: some send no sum but vote, and all or all but one vote and give shares."""
    n = 7
    rest = [k for k in range(n) if k not in gone]
    wanted = plain_state(n, rest)
    rounds = begun(n)
    rounds.give_keys(range(n))
    rounds.give_shares(range(n))
    rounds.give_sums(rest)
    summed = rounds.toy.state
    for late in (None, *range(n)):
        rounds.toy.state = summed
        holders = [k for k in range(n) if k != late]
        rounds.give_votes(holders)
        state = rounds.give_unmasked(holders)
        assert np.allclose(state.tensors["task.0.mean"], wanted.tensors["task.0.mean"],
                           rtol=1e-6, atol=1e-7)  # fmt: skip
        assert (state.tensors["task.0.count"] == wanted.tensors["task.0.count"]).all()


def test_clients_that_gave_keys_and_no_shares_are_left_out():
    rounds = begun(7)
    state = rounds.all("train", range(7), shared=range(6))
    assert np.allclose(
        state.tensors["task.0.mean"], plain_state(7, range(6)).tensors["task.0.mean"]
    )


def test_a_sum_can_be_opened_if_five_of_each_clients_six_neighbours_are_there():
    rounds = upto(begun(7), 7, VOTES)
    record = MaskRecord.read(rounds.toy.state)
    digest = record.members.digest(RUN, 0)
    for there in chain.from_iterable(combinations(range(7), size) for size in range(8)):
        wanted = all(sum(k != owner for k in there) >= 5 for owner in range(7))
        assert record.can_be_opened(digest, {client_id(k) for k in there}) == wanted


def test_too_few_holders_open_nothing():
    rounds = begun(7)
    for step in (rounds.give_keys, rounds.give_shares, rounds.give_sums, rounds.give_votes):
        step(range(7))
    record = MaskRecord.read(rounds.toy.state)
    digest = record.members.digest(RUN, 0)
    few = range(5)  # of six neighbours five must hold, and each is no holder of its own
    assert not record.can_be_opened(digest, {client_id(k) for k in few})
    before = rounds.toy.state
    with pytest.raises(InternalError, match="gave a share"):
        rounds.give_unmasked(few)
    assert rounds.toy.state is before


@pytest.mark.full
def test_a_sparse_graph_of_31_clients_gives_the_sum_with_drop_outs():
    n = 31
    rounds = begun(n)
    summed = [k for k in range(n) if k not in (3, 17)]
    state = rounds.all("train", range(n), summed=summed, last=[k for k in summed if k != 8])
    wanted = plain_state(n, summed)
    assert np.allclose(state.tensors["task.0.mean"], wanted.tensors["task.0.mean"], rtol=1e-6)


# --- what a server may not get ------------------------------------------------------------------


def upto(rounds, n, step):
    rounds.give_keys(range(n))
    rounds.give_shares(range(n))
    if step in (VOTES, UNMASK):
        rounds.give_sums(range(n))
    if step == UNMASK:
        rounds.give_votes(range(n))
    return rounds


def test_no_masked_vector_is_near_its_plain_one_and_a_resend_is_the_same():
    rounds = upto(begun(5), 5, SHARES)
    upload = rounds.toy.upload("train", 0)
    one, again = (rounds.masked_upload(0, upload, "train") for _ in range(2))
    other = rounds.masked_upload(1, upload, "train")
    assert all((one.tensors[n] == again.tensors[n]).all() for n in one.tensors)
    numbers = one.tensors["mean"].ravel()
    assert np.abs(numbers.astype(float)).mean() > 2.0**60
    assert not (numbers == other.tensors["mean"].ravel()).any()


def test_a_client_hides_among_all_neighbours_whose_shares_have_come_or_not_at_all():
    """A server that shows no letters would get an upload with the self-mask alone."""
    rounds = upto(begun(5), 5, SHARES)
    member, letters = rounds.member(0), rounds.letters(0)
    delivered, _ = rounds.sets()
    fields = ("senders", "letters", "committed", "signed", "lower", "pairs")
    none = Letters(*(getattr(letters, name)[:0] for name in fields))
    fewer = replace(letters, **{name: getattr(letters, name)[1:] for name in fields[:4]})
    for shown in (none, fewer):
        with pytest.raises(TrustError, match="letters are not those"):
            member.check_delivered(delivered, shown)
    without = delivered.copy()
    without[0] = 0
    with pytest.raises(TrustError, match="shares are not counted"):
        member.check_delivered(without, letters)
    many = delivered * 10**12
    with pytest.raises(TrustError, match="not of this list"):
        member.check_delivered(many, letters)
    with pytest.raises(TrustError, match="not of this list"):
        member.check_delivered(delivered[:-1], letters)


def lists(rounds, **change):
    record = MaskRecord.read(rounds.toy.state)
    return replace(record.members, **change)


def seen_by(rounds, k, members, bounds=USUAL):
    return Member.of(rounds.secrets[k], members, RUN, 0, client_id(k), bounds)


def test_a_list_with_other_keys_or_without_this_client_is_refused():
    rounds = begun(4)
    rounds.give_keys(range(4))
    members = lists(rounds)
    keys = members.keys.copy()
    keys[0] = keys[1]
    with pytest.raises(TrustError, match="other keys of this client"):
        seen_by(rounds, 0, replace(members, keys=keys))
    with pytest.raises(TrustError, match="same key"):
        seen_by(rounds, 2, replace(members, keys=keys))
    keys = members.keys.copy()
    keys[1, 0] ^= 1
    with pytest.raises(TrustError, match="not signed by it"):
        seen_by(rounds, 0, replace(members, keys=keys))
    with pytest.raises(TrustError, match="not signed by it"):  # replayed from another round
        seen_by(rounds, 0, replace(members, cycle=7))
    some = MaskList(0, members.clients[1:], *(a[1:] for a in (members.keys, members.signing,
                                                              members.signatures)))  # fmt: skip
    with pytest.raises(TrustError, match="not in the list"):
        seen_by(rounds, 0, some)
    with pytest.raises(TrustError, match="has 4 clients, expected 5"):
        seen_by(rounds, 0, members, demanding(5))


def invented(members, names, run=RUN):
    """Return the list with clients that a server made up in place of some."""
    keys, signing, signatures = (a.copy() for a in (members.keys, members.signing,
                                                    members.signatures))  # fmt: skip
    for name in names:
        i = members.clients.index(name)
        secrets, own = RoundSecrets.draw(), PrivateKeys.generate()
        sent = keys_upload(secrets, own, run, 0, members.cycle, name)
        for rows, tensor in ((keys, "keys"), (signing, "signing"), (signatures, "signature")):
            rows[i] = sent.tensors[tensor][0]
    return replace(members, keys=keys, signing=signing, signatures=signatures)


def test_pins_refuse_made_up_clients_and_made_up_keys_of_known_ones():
    rounds = begun(7)
    rounds.give_keys(range(7))
    members = lists(rounds)
    prints = [fingerprint_of(row.tobytes()) for row in members.signing]
    pinned = prints[1:5]
    known = dict(zip(members.clients[1:5], pinned, strict=True))
    bounds = Bounds(USUAL.terms, pinned, known)
    seen_by(rounds, 0, members, bounds)  # two strangers of six neighbours are a third
    seen_by(rounds, 0, invented(members, members.clients[5:]), bounds)
    with pytest.raises(TrustError, match="pinned with another key"):
        seen_by(rounds, 0, invented(members, members.clients[1:2]), bounds)
    fewer = Bounds(USUAL.terms, pinned[:3])
    with pytest.raises(TrustError, match="3 of this client's 6 neighbours are not among"):
        seen_by(rounds, 0, members, fewer)


def test_one_client_under_many_names_is_refused():
    rounds = begun(4)
    rounds.give_keys(range(4))
    members = lists(rounds)
    signing = members.signing.copy()
    signing[2] = signing[3]
    with pytest.raises(TrustError, match="same key"):
        seen_by(rounds, 0, replace(members, signing=signing))


def test_a_sum_of_too_few_is_not_signed():
    rounds = upto(begun(10), 10, VOTES)
    delivered, survivors = rounds.sets()
    hidden = rounds.hidden()
    member = rounds.member(0)
    for count in (2, 5):
        few = survivors.copy()
        few[count:] = 0
        with pytest.raises(TrustError, match=f"of {count} clients"):
            member.check_survivors(delivered, few, hidden, ABOUT)
    strangers = survivors.copy()
    gone = delivered.copy()
    gone[9] = 0
    with pytest.raises(TrustError, match="has sent no shares"):
        member.check_survivors(gone, strangers, hidden, ABOUT)
    strict = rounds.member(0, demanding(9))
    eight = survivors.copy()
    eight[8:] = 0
    with pytest.raises(TrustError, match="9 are the least"):
        strict.check_survivors(delivered, eight, hidden, ABOUT)


def test_survivors_that_fall_into_two_groups_are_not_signed():
    n = 60
    rounds = begun(n)
    rounds.give_keys(range(n))
    member = rounds.member(0, demanding(3, 0.5))
    around = member.members.around(member.digest)
    ring = [0]
    while len(ring) < n:  # along the circle: the next one shares most neighbours
        ring.append(max(set(range(n)) - set(ring),
                        key=lambda i: (len(set(around[i]) & set(around[ring[-1]])),
                                       len(set(around[i]) & set(ring[-8:])))))  # fmt: skip
    half = graph.degree(n) // 2
    cut = set(ring[10 : 10 + half]) | set(ring[40 : 40 + half])
    flags = np.array([int(i not in cut) for i in range(n)])
    left = np.flatnonzero(flags)
    assert not graph.is_connected(around, left)
    with pytest.raises(TrustError, match="one group|half of a client"):
        member.check_survivors(np.ones(n, np.int64), flags, np.zeros((0, 64), np.uint8), ABOUT)


def test_a_seed_or_letter_that_the_server_wrote_is_not_taken_for_a_neighbours():
    """Sealing needs public keys alone: without signatures the server would know all the masks."""
    rounds = upto(begun(5), 5, SHARES)
    victim = 4
    member, letters = rounds.member(victim), rounds.letters(victim)
    delivered, _ = rounds.sets()
    member.check_delivered(delivered, letters)
    pairs = letters.pairs.copy()
    public = PublicKeys.for_sealing(member.members.mask_public(victim))
    forged = seal(public, bytes(32), tied(member.digest, int(letters.lower[0]), victim))
    pairs[0] = np.frombuffer(forged, np.uint8)
    with pytest.raises(TrustError, match="letter of client .* is not signed by it"):
        member.check_delivered(delivered, replace(letters, pairs=pairs))
    both = letters.committed.copy()
    both[1, 0] ^= 1
    with pytest.raises(TrustError, match="letter of client .* is not signed by it"):
        member.check_delivered(delivered, replace(letters, committed=both))


def test_a_client_that_hides_among_others_than_the_rest_is_in_no_sum():
    """A server that shows some clients fewer neighbours would open the sum of these alone."""
    rounds = upto(begun(6), 6, VOTES)
    delivered, survivors = rounds.sets()
    member, hidden = rounds.member(0), rounds.hidden()
    member.check_survivors(delivered, survivors, hidden, ABOUT)
    fewer = delivered.copy()
    fewer[5] = 0
    said = hiding(member.digest, fewer, ABOUT)
    other = np.frombuffer(rounds.keys[3].sign("mask_sums", said), np.uint8)
    shown = hidden.copy()
    shown[3] = other
    with pytest.raises(TrustError, match="set of clients of client d+ is not signed"):
        member.check_survivors(delivered, survivors, shown, ABOUT)
    with pytest.raises(TrustError, match="set of clients of client a+ is not signed"):
        member.check_survivors(delivered, survivors, hidden, b"another model".ljust(32))
    with pytest.raises(TrustError, match="has not signed whom it hides among"):
        member.check_survivors(delivered, survivors, hidden[:5], ABOUT)


def test_a_class_has_the_same_id_for_all_clients():
    """A server that gave one client ids of its own would find its rows in the total."""
    rounds = begun(3)
    rounds.give_keys(range(3))
    member = rounds.member(0)
    shown = names_part(member.digest, {"cat": 7, "dog": 4, "katze": 7}, [4, 7]).payload
    names, places = shown.tensors["names"], shown.i64("places")
    assert sorted(places.tolist()) == [0, 1, 1]
    member.check_names(names, places, {"Cat": 7, "dog": 4, "emu": 2}, ["Cat", "emu"], [4, 7])
    member.check_names(names, places, {"katze": 7, "cat": 7}, ["katze", "cat"], [4, 7])
    for own in ({"cat": 4}, {"dog": 7}, {"cat": 7, "emu": 4}):
        with pytest.raises(TrustError, match="another id for this client"):
            member.check_names(names, places, own, [], [4, 7])
    for moved in (places + 1, places * 7):
        with pytest.raises(TrustError, match="no class of the task"):
            member.check_names(names, moved, {}, [], [4, 7])
    with pytest.raises(TrustError, match="the same name"):
        member.check_names(names[[0, 0]], places[[0, 1]], {}, [], [4, 7])


def test_a_client_is_told_all_its_classes_or_sends_nothing():
    """Of clients that were told one class each, every row of the total would be a single one's."""
    rounds = begun(3)
    rounds.give_keys(range(3))
    member = rounds.member(0)
    shown = names_part(member.digest, {"cat": 4, "dog": 7}, [4, 7]).payload
    names, places = shown.tensors["names"], shown.i64("places")
    member.check_names(names, places, {"cat": 4}, ["cat", "not of this task"], [4, 7])
    with pytest.raises(TrustError, match="class 'dog', of which this client has images, is left"):
        member.check_names(names, places, {"cat": 4}, ["cat", "dog"], [4, 7])


def test_sums_are_about_one_model_and_one_set_of_classes():
    def part(value):
        return {"current": Payload({"w": np.array([value], np.float32)})}

    usual = context_of("train", 0, 3, 1993, "s", [0, 1], [], part(1.0))
    others = [
        context_of("train", 1, 3, 1993, "s", [0, 1], [], part(1.0)),
        context_of("train", 0, 1, 1993, "s", [0, 1], [], part(1.0)),  # a last round: no step
        context_of("train", 0, 3, 1994, "s", [0, 1], [], part(1.0)),
        context_of("train", 0, 3, 1993, "t", [0, 1], [], part(1.0)),
        context_of("train", 0, 3, 1993, "s", [1, 0], [], part(1.0)),
        context_of("train", 0, 3, 1993, "s", [0], [1], part(1.0)),
        context_of("train", 0, 3, 1993, "s", [0, 1], [], part(2.0)),
        context_of("train", 0, 3, 1993, "s", [0, 1], [], {**part(1.0), "x": Payload()}),
    ]
    assert len({usual, *others}) == 9
    assert usual == context_of("train", 0, 3, 1993, "s", [0, 1], [], part(1.0))


def test_shares_are_given_for_the_set_that_two_thirds_have_signed_and_no_other():
    rounds = upto(begun(6), 6, UNMASK)
    delivered, survivors = rounds.sets()
    votes = rounds.parts()[VOTES]
    voted, signatures = votes.i64("voted"), votes.tensors["signatures"]
    member = rounds.member(0)
    member.check_votes(delivered, survivors, voted, signatures)
    other = survivors.copy()
    other[5] = 0
    with pytest.raises(TrustError, match="vote for this set of client .* is not signed"):
        member.check_votes(delivered, other, voted, signatures)
    few = voted.copy()
    few[4:] = 0
    with pytest.raises(TrustError, match="4 clients have voted, and 5"):
        member.check_votes(delivered, survivors, few, signatures[:4])
    forged = signatures.copy()
    forged[1] = forged[0]
    with pytest.raises(TrustError, match="vote for this set of client .* is not signed"):
        member.check_votes(delivered, survivors, voted, forged)


def test_all_that_a_server_stores_and_the_shares_of_too_few_liars_open_no_update():
    """All spools, the state, and t - 1 holders that give the server both of their shares."""
    n, victim = 7, 0
    rounds = upto(begun(n), n, UNMASK)
    t = graph.threshold(graph.degree(n))
    liars = {k: rounds.member(k).open_letters(rounds.letters(k))[victim] for k in range(1, t)}
    digest = rounds.member(victim).digest
    rounds.give_unmasked(range(n))
    spooled, name = rounds.sent, client_id(victim)
    # Its self-mask is what the protocol opens: every holder gave that share.
    shares = {k: spooled[UNMASK][client_id(k)] for k in range(1, n)}
    own = join([
        (k - 1, given.tensors["shares"][given.i64("owners").tolist().index(victim)].tobytes())
        for k, given in shares.items()
    ])  # fmt: skip
    assert own == rounds.secrets[victim].own
    vector = {s: spooled["train"][name].tensors[s].copy() for s in ("mean", "count", "images")}
    add_stream(vector, stream_of_self(own, digest, name), -1)
    assert abs(int(vector["images"][0])) > 2**40, "the masks with its neighbours are left"
    # Its mask key, which would remove these, is one share short.
    assert len(liars) == t - 1
    assert join([(k - 1, both[1]) for k, both in liars.items()]) != rounds.secrets[victim].mask


def test_wrong_uploads_are_refused_at_the_door():
    rounds = begun(4)
    rounds.give_keys(range(4))
    stranger = PrivateKeys.generate()
    forged = keys_upload(RoundSecrets.draw(), stranger, RUN, 0, 0, client_id(0))
    assert "'signing' is not the key" in rounds.faults("mask_keys", 0, forged)[0]
    replayed = keys_upload(RoundSecrets.draw(), rounds.keys[0], RUN, 0, 5, client_id(0))
    assert "signature" in rounds.faults("mask_keys", 0, replayed)[0]
    shares = rounds.member(0).shares_upload(rounds.keys[0])
    short = Payload({**shares.tensors, "letters": shares.tensors["letters"][1:]})
    assert "expected 3 rows" in rounds.faults(SHARES, 0, short)[0]
    upto(rounds, 4, UNMASK)
    vote = rounds.vote_upload(0)
    assert rounds.faults("mask_vote", 1, vote) != []
    assert rounds.faults("mask_vote", 0, vote) == []
    given = rounds.unmask_upload(0)
    wrong = given.tensors["shares"].copy()
    wrong[1, 5] ^= 1
    bad = Payload({**given.tensors, "shares": wrong})
    assert "is another one" in rounds.faults(UNMASK, 0, bad)[0]
    fewer = Payload({**given.tensors, "shares": wrong[:2], "owners": given.tensors["owners"][:2]})
    assert "expected shares of its 3 neighbours" in rounds.faults(UNMASK, 0, fewer)[0]


@pytest.mark.parametrize("at", [0, SEALING_BYTES])
@pytest.mark.parametrize(
    ("start", "key", "words"),
    [
        (0, b"\xff" * (SEALING_BYTES - 32), "not an X-Wing key"),
        (SEALING_BYTES - 32, bytes(32), "low order"),
    ],
    ids=["ML-KEM", "X25519"],
)
def test_keys_that_no_neighbour_could_seal_for_are_refused_at_the_door(at, start, key, words):
    """In the list, they would end the round of all its neighbours."""
    rounds, secrets = begun(3), RoundSecrets.draw()
    rounds.give_keys(range(3))
    usual = secrets.public()
    public = usual[: at + start] + key + usual[at + start + len(key) :]
    said = statement(RUN, 0, 0, client_id(0), public)
    own = rounds.keys[0]
    sent = keys_upload(secrets, own, RUN, 0, 0, client_id(0))
    assert rounds.faults("mask_keys", 0, sent) == []
    changed = {"keys": as_rows([public]), "signature": as_rows([own.sign("mask_keys", said)])}
    faults = rounds.faults("mask_keys", 0, Payload({**sent.tensors, **changed}))
    assert len(faults) == 1
    assert words in faults[0]


# --- forks and twins ------------------------------------------------------------------------


def test_a_fork_shows_nothing_of_the_masked_round_that_its_parent_was_in():
    """Above 30 clients the list's digest, with the run in it, decides who writes to whom."""
    rounds = begun(31)
    rounds.give_keys(range(31))
    rounds.give_shares(range(30))
    ctx = rounds.toy.context("train")
    fork = replace(rounds.server, run="r20261128-120000-0000")
    names = {part.name for part in fork.broadcast(ctx, rounds.toy.state)}
    assert names == {part.name for part in begun(31).server.broadcast(ctx, begun(31).toy.state)}


@pytest.mark.parametrize("same", ["secrets", "signing"])
def test_clients_that_send_one_key_are_named_and_the_rest_is_listed(same):
    keys = {k: PrivateKeys.generate() for k in range(5)}
    secrets = {k: RoundSecrets.draw() for k in range(5)}
    if same == "secrets":
        secrets[4] = secrets[3]
    else:
        keys[4] = keys[3]
    sent = [
        Update(client_id(k), keys_upload(secrets[k], keys[k], RUN, 0, 0, client_id(k)))
        for k in keys
    ]
    rounds = begun(5)
    ctx = rounds.toy.context("mask_keys", 0)
    found = rounds.server.twins(ctx, UpdateList.of(sent))
    assert found.keys() == {client_id(3), client_id(4)}
    assert all(client_id(3) in why and client_id(4) in why for why in found.values())
    assert rounds.server.twins(ctx, UpdateList.of(sent[:3])) == {}
    assert rounds.server.twins(ctx, UpdateList.of(sent[3:])) == {}, "a list needs somebody"
