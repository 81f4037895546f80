"""What a client spends: every release is charged before it is drawn, and a budget ends rounds."""

import asyncio
import json
import math
import stat
from dataclasses import replace

import numpy as np
import pytest

from adapters.kit import Federation, Images, make_tasks, toy_backbone
from adapters.small import SMALL
from adapters.worker_kit import Direct, png
from client.daemon_kit import HPARAMS, RUN, RUN2
from client.round_kit import ORDER, SERVER, TERMS, fit, make
from fcil_adapters.contract import Preprocessing
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.registry import method_names, schema_digest
from fcil_adapters.images.decoding import open_source
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.cli.show_privacy import one_privacy, show_privacy
from fcil_client.data.inventory import Inventory
from fcil_client.data.local_data import LocalData
from fcil_client.data.manifest import scan
from fcil_client.link import handshake
from fcil_client.membership import leave as leaving
from fcil_client.rounds.round_work import ClientOptions
from fcil_client.rounds.worker import ClientWorker
from fcil_client.state import privacy_budget
from fcil_client.state.outbox import Outbox
from fcil_client.state.privacy_budget import (
    Charge,
    PrivacyLedger,
    PrivacyLimits,
    epsilon_spent,
    gaussian_epsilon,
    summary,
)
from fcil_protocol.envelopes.envelope import open_body, parse_header, unwrap_key
from fcil_protocol.errors import (
    ConfigError,
    CorruptFile,
    MethodMismatch,
    PrivacyRefused,
    StorageError,
)
from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import Hello, PrivacyTerms
from fcil_protocol.payloads.payload import pack, unpack
from tiers import sampled

DELTA = 1e-5
NOISE = PrivacyTerms(noise_multiplier=2.0, clip=3.0)
NOISY = replace(TERMS, privacy=NOISE)
KEY = RoundKey(RUN, 0, "train", 0)
MEAN = ("class means",)


def charge(classes=("cat",), run=RUN, statistics=MEAN, z=2.0):
    return Charge("t", run, 0, "train", 0, tuple(classes), statistics, z, 3.0, DELTA)


# --- the accountant -------------------------------------------------------------------------


def renyi(z, times, delta):
    """Mironov 2017: k Gaussians have divergence a k / (2 z^2) at order a; Balle et al. 2020 and
    Canonne, Kamath, Steinke 2020, proposition 12, turn it into epsilon."""
    orders = (1 + x / 1000 for x in range(1, 200_000))
    return min(
        a * times / (2 * z**2) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders
    )


@pytest.mark.parametrize(("z", "times"), [(1.0, 1), (2.0, 5), (4.0, 30), (0.7, 3)])
def test_epsilon_is_that_of_gaussians_by_hand(z, times):
    epsilon = gaussian_epsilon([z] * times, DELTA)
    assert epsilon == pytest.approx(renyi(z, times, DELTA), rel=0.01)
    import dp_accounting  # two seconds, which every process that lists the tests would take

    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(times), DELTA)
    assert exact <= epsilon <= 1.3 * exact, "an upper bound, and not a far one"


def test_different_multipliers_add_up():
    together = gaussian_epsilon([2.0, 1.0], DELTA)
    assert together == pytest.approx(gaussian_epsilon([math.sqrt(1 / (1 / 4 + 1))], DELTA))


def test_disjoint_classes_cost_once_and_a_class_that_comes_again_costs_again():
    once = epsilon_spent([charge(["cat"])], DELTA)
    assert epsilon_spent([charge(["cat"]), charge(["dog"])], DELTA) == once
    twice = epsilon_spent([charge(["cat", "dog"]), charge(["dog"])], DELTA)
    assert twice == gaussian_epsilon([2.0, 2.0], DELTA) > once
    both = epsilon_spent([charge(["cat"], statistics=("class means", "class covariances"))], DELTA)
    assert both == twice
    assert epsilon_spent([], DELTA) == 0


def test_the_class_that_is_revealed_most_counts_not_the_one_that_came_most_often():
    many, strong = [charge(["cat"], z=4.0)] * 3, charge(["dog"], z=1.0)
    assert epsilon_spent([*many, strong], DELTA) == gaussian_epsilon([1.0], DELTA)


# --- the ledger -----------------------------------------------------------------------------


def test_a_charge_is_on_disk_for_this_user_alone(tmp_path):
    ledger = PrivacyLedger(tmp_path)
    ledger.charge(NOISE, PrivacyLimits(), KEY, ["cat", "ant"], MEAN)
    ledger.charge(NOISE, PrivacyLimits(), KEY, ["cat"], MEAN)
    path = tmp_path / privacy_budget.NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, second = PrivacyLedger(tmp_path).read()
    assert (first.classes, first.statistics, first.sampling_rate) == (("ant", "cat"), MEAN, 1.0)
    assert (first.run, first.task, first.kind, first.round) == (RUN, 0, "train", 0)
    assert (first.noise_multiplier, first.clip, first.delta) == (2.0, 3.0, DELTA)
    assert first.epsilon == pytest.approx(gaussian_epsilon([2.0], DELTA), abs=1e-5)
    assert second.epsilon == pytest.approx(gaussian_epsilon([2.0, 2.0], DELTA), abs=1e-5)


def test_half_a_line_of_a_crash_was_no_charge_and_does_not_stay(tmp_path):
    ledger = PrivacyLedger(tmp_path)
    ledger.append(charge())
    with (tmp_path / privacy_budget.NAME).open("ab") as file:
        file.write(b'{"time":"t","run":')
    assert len(ledger.read()) == 1
    ledger.append(charge(["dog"]))
    assert [c.classes for c in ledger.read()] == [("cat",), ("dog",)]


@pytest.mark.parametrize(
    "line",
    [
        b"{}", b"[]", b"nonsense", b'{"classes":1,"statistics":[]}',
        json.dumps({**vars(Charge("t", "r", 0, "train", 0, (), (), 2.0, 3.0, 0.0))}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_ledger_stops_releases(tmp_path, line):
    (tmp_path / privacy_budget.NAME).write_bytes(line + b"\n")
    with pytest.raises(CorruptFile, match="not known"):
        PrivacyLedger(tmp_path).charge(NOISE, PrivacyLimits(), KEY, ["cat"], MEAN)


def test_a_charge_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(StorageError):
        PrivacyLedger(tmp_path / "gone").charge(NOISE, PrivacyLimits(), KEY, ["cat"], MEAN)


def test_the_ledger_outlives_the_membership(home):
    PrivacyLedger(home.directory).append(charge())
    leaving.clear(home)
    assert len(PrivacyLedger(home.directory).read()) == 1


# --- limits ---------------------------------------------------------------------------------


def test_the_budget_of_the_terms_is_the_runs_and_the_clients_own_is_over_all_runs(tmp_path):
    two = gaussian_epsilon([2.0, 2.0], DELTA)
    ledger = PrivacyLedger(tmp_path)
    terms = NOISE.model_copy(update={"max_epsilon": two + 0.01})
    for _ in range(2):
        ledger.charge(terms, PrivacyLimits(), KEY, ["cat"], MEAN)
    with pytest.raises(PrivacyRefused, match=f"run {RUN}"):
        ledger.charge(terms, PrivacyLimits(), KEY, ["cat"], MEAN)
    ledger.charge(terms, PrivacyLimits(), KEY, ["dog"], MEAN)  # its images have their own budget
    other = RoundKey(RUN2, 0, "train", 0)
    with pytest.raises(PrivacyRefused, match="all runs"):
        ledger.charge(terms, PrivacyLimits(max_epsilon=two + 0.01), other, ["cat"], MEAN)
    ledger.charge(terms, PrivacyLimits(), other, ["cat"], MEAN)
    assert len(ledger.read()) == 4, "what was refused was not charged"


def test_the_clients_own_limit_holds_at_a_delta_that_no_server_can_raise(tmp_path):
    """At a delta of 0.9 any noise has an epsilon of 0."""
    ledger = PrivacyLedger(tmp_path)
    lax = NOISE.model_copy(update={"delta": 0.9})
    once, twice = (gaussian_epsilon([2.0] * n, DELTA) for n in (1, 2))
    limits = PrivacyLimits(max_epsilon=(once + twice) / 2)
    ledger.charge(lax, limits, KEY, ["cat"], MEAN)
    with pytest.raises(PrivacyRefused, match="all runs of this client"):
        ledger.charge(lax, limits, KEY, ["cat"], MEAN)
    with pytest.raises(PrivacyRefused, match="all runs"):  # nor can another run's
        ledger.charge(lax, limits, RoundKey(RUN2, 0, "train", 0), ["cat"], MEAN)
    strict = NOISE.model_copy(update={"delta": 1e-9})
    between = PrivacyLimits(max_epsilon=gaussian_epsilon([2.0, 2.0], 1e-7))
    with pytest.raises(PrivacyRefused, match="all runs"):  # a smaller one counts
        ledger.charge(strict, between, KEY, ["cat"], MEAN)
    told = summary(ledger)
    assert (told["runs"][0]["delta"], told["all"]["delta"]) == (0.9, DELTA)
    assert told["runs"][0]["epsilon"] < 0.1 < told["all"]["epsilon"]
    assert told["all"]["epsilon"] == pytest.approx(once, abs=1e-5)
    # In a run of such terms, what is shown is what counts.
    assert summary(ledger, 1e-9)["all"]["epsilon"] > told["all"]["epsilon"]


def test_weaker_terms_than_the_client_asks_for_are_refused(tmp_path):
    ledger = PrivacyLedger(tmp_path)
    for terms, limits, words in (
        (PrivacyTerms(), PrivacyLimits(min_noise=1), "asks for at least 1"),
        (PrivacyTerms(), PrivacyLimits(min_masked=3), "no masks"),
        (PrivacyTerms(secure="masks"), PrivacyLimits(min_masked=4), "have sums of 3"),
        (NOISE, PrivacyLimits(min_noise=2.5), "noise multiplier 2"),
        (NOISE.model_copy(update={"clip": 0.0}), PrivacyLimits(), "2 and no clip"),
        (NOISE.model_copy(update={"partial": True}), PrivacyLimits(min_noise=1), "statistics only"),
    ):
        with pytest.raises(PrivacyRefused, match=words):
            ledger.charge(terms, limits, KEY, ["cat"], ())
    partial = NOISE.model_copy(update={"partial": True})
    ledger.charge(partial, PrivacyLimits(min_noise=2, partial=True), KEY, ["cat"], MEAN)
    ledger.charge(partial, PrivacyLimits(), KEY, ["cat"], ())
    ledger.charge(PrivacyTerms(), PrivacyLimits(), KEY, ["cat"], MEAN)
    assert len(ledger.read()) == 1, "without noise or without statistics nothing is charged"


def test_without_the_accountant_noise_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(privacy_budget, "find_spec", lambda _: None)
    privacy_budget.check_installed(PrivacyTerms())
    with pytest.raises(ConfigError, match=r"not installed.*fcil\[privacy\]"):
        privacy_budget.check_installed(NOISE)


# --- a round --------------------------------------------------------------------------------


class Inside:
    """The worker's operations in this process, in the place of the host of one."""

    def __init__(self, before=lambda: None):
        self.worker, self.calls, self._before = Direct(ClientWorker()), [], before

    async def call(self, op, fields, payloads=(), *, on_progress=None):
        self._before()
        self.calls.append(op)
        reply, out = self.worker(op, fields, payloads)
        return reply, [pack(p) for p in out]


@pytest.fixture
def folder(tmp_path):
    for number, (cls, count) in enumerate((("cat", 9), ("dog", 9), ("rare", 2))):
        for i in range(count):
            path = tmp_path / "images" / "train" / cls / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(1000 * number + i, 60 + 60 * number))
    return tmp_path / "images"


@pytest.fixture
def work(home, enrolment, folder, monkeypatch):
    fit(monkeypatch)
    made = make(home, enrolment, folder)
    made._options = ClientOptions(folder, limits=PrivacyLimits())
    path = home.directory / privacy_budget.NAME
    made.lengths = []
    made._host = Inside(lambda: made.lengths.append(path.exists() and path.stat().st_size))
    return made


def go(work, terms=NOISY, asked=ORDER):
    return asyncio.run(work.run(asked, terms, SERVER.public, lambda *_: None))


def opened(work, digest):
    """Return what the server would read in an outbox entry."""
    sent = []
    work.outbox.offer(digest, lambda *frames: sent.append(frames), again=False)
    (_, header, _, wrap), *chunks = sent
    parsed = parse_header(header, max_plain_bytes=1 << 20)
    key = unwrap_key(wrap, header, SERVER)
    return unpack(open_body(parsed, key, [data for _, data in chunks]))


def test_every_computation_is_charged_before_its_noise_is_drawn_and_draws_anew(work, home):
    first, second = go(work), go(work)
    assert work.lengths[0] > 0
    assert work.lengths[1] > work.lengths[0]
    rows = PrivacyLedger(home.directory).read()
    assert [(c.round, c.classes, c.statistics) for c in rows] == [(0, ("cat", "dog"), MEAN)] * 2
    assert rows[1].epsilon > rows[0].epsilon
    sent = [opened(work, digest) for digest in (first, second)]
    assert (sent[0].f32("mean") != sent[1].f32("mean")).any(), "the seeds were the same"
    assert sent[0].i64("count").tolist() == sent[1].i64("count").tolist()


def test_a_failed_computation_stays_charged(work, home):
    def fail():
        raise StorageError("no room")

    work._host = Inside(fail)
    with pytest.raises(StorageError):
        go(work)
    assert len(PrivacyLedger(home.directory).read()) == 1


def test_what_is_offered_again_is_the_same_bytes_and_costs_nothing(work, home):
    digest = go(work)
    offers = []
    for box in (work.outbox, work.outbox, Outbox(home)):  # the last one after a restart
        sent = []
        box.offer(digest, lambda _, *blobs, sent=sent: sent.append(blobs), again=False)
        offers.append(sent)
    assert len(offers[0]) > 1
    assert offers[0] == offers[1] == offers[2]
    assert len(PrivacyLedger(home.directory).read()) == 1


def test_a_spent_budget_declines_the_round_before_anything_is_computed(work, home):
    terms = replace(NOISY, privacy=NOISE.model_copy(update={"max_epsilon": 0.1}))
    with pytest.raises(PrivacyRefused, match="limit is 0.1") as caught:
        go(work, terms)
    assert caught.value.code == "privacy_refused"
    assert work._host.calls == []
    assert PrivacyLedger(home.directory).read() == []


def test_terms_without_noise_charge_nothing_and_change_nothing(work, home):
    plain = [opened(work, go(work, TERMS)).f32("mean") for _ in range(2)]
    np.testing.assert_array_equal(*plain)
    assert not (home.directory / privacy_budget.NAME).exists()


# --- too few images -------------------------------------------------------------------------


def test_the_larger_least_number_holds(work):
    terms = replace(TERMS, privacy=PrivacyTerms(min_count=5))
    work._options = replace(work._options, limits=PrivacyLimits(min_count=4))
    assert work.least(terms) == 5
    assert work.least(TERMS) == 4


def test_a_class_of_too_few_images_is_not_announced():
    inventory = Inventory({"cat": 5, "rare": 2, "seen": 2}, {"cat": 2, "rare": 1, "seen": 9})
    assert inventory.announceable(3).counts() == {
        "cat": {"train": 5, "test": 0},
        "seen": {"train": 0, "test": 9},
    }
    assert inventory.announceable(1).counts() == inventory.counts()


def test_the_announcement_that_is_sealed_leaves_it_out(work):
    terms = replace(TERMS, privacy=PrivacyTerms(min_count=3))
    inventory = Inventory({"cat": 5, "rare": 2}, {"rare": 1})
    envelope, digest = work.seal_inventory(terms, SERVER.public, inventory)
    work.outbox.keep_for_session(digest, envelope)
    assert opened(work, digest).meta["names"] == ["cat"]


IDS = {"cat": 0, "dog": 1, "rare": 2}


def through_the_door(folder, least, names=IDS):
    backbone = toy_backbone()
    source = open_source(folder)
    manifest = scan(source, None, b"salt", threads=1)
    size = Preprocessing(backbone.info.preprocessing.size, (0.5,) * 3, (0.5,) * 3)
    data = LocalData(source, manifest, size, memory_bytes=1 << 20, threads=1)
    door = data.learner_images({n: IDS[n] for n in names}, least)
    images = Images(door.take(np.arange(len(door))), np.asarray(door.labels))
    data.close()
    return images


def test_all_methods_are_tried():
    assert set(SMALL) == set(method_names())


@pytest.mark.parametrize("name", sampled(SMALL))
def test_no_method_sends_anything_of_a_class_with_too_few_images(name, folder):
    """What is sent is, byte for byte, what a client without the class would send."""

    def sent(images):
        fed = Federation.of(name, [images], toy_backbone(), **SMALL[name])
        fed.open(make_tasks((0, 1, 2))[0])
        return [fed.upload(e.kind, 0) for e in fed.exchanges]

    all_, enough = through_the_door(folder, 1), through_the_door(folder, 3)
    without = through_the_door(folder, 1, ("cat", "dog"))
    assert 0 < (all_.labels == 2).sum() < 3
    assert [pack(p) for p in sent(enough)] == [pack(p) for p in sent(without)]
    assert [pack(p) for p in sent(enough)] != [pack(p) for p in sent(all_)]
    assert all(p.i64("count")[2] == 0 for p in sent(enough) if "count" in p.tensors)


# --- what is shown --------------------------------------------------------------------------


def test_the_command_shows_what_was_spent_by_run_and_what_remains(home, capsys):
    ledger = PrivacyLedger(home.directory)
    for run in (RUN, RUN, RUN2):
        ledger.append(charge(run=run))
    terms = {**NOISE.model_dump(), "max_epsilon": 9.0, "own": vars(PrivacyLimits(max_epsilon=5))}
    status = {"client": "c", "name": "pi", "data": "/d", "run": RUN, "privacy": terms}
    row = one_privacy(home, status)
    two, three = (gaussian_epsilon([2.0] * n, DELTA) for n in (2, 3))
    assert [r["epsilon"] for r in row["runs"]][0] == pytest.approx(two, abs=1e-5)
    assert row["all"]["epsilon"] == pytest.approx(three, abs=1e-5)
    assert row["remains"] == pytest.approx(min(9 - two, 5 - three), abs=1e-4)
    show_privacy([row])
    text = capsys.readouterr().out
    for words in (
        "noise 2 x clip 3",
        "epsilon at most 5",
        f"{RUN}  epsilon",
        "all runs",
        "remains",
    ):
        assert words in text
    assert json.dumps(row)


def test_a_client_that_never_released_anything_says_so(home, capsys):
    row = one_privacy(home, {"client": "c", "name": "pi", "data": "/d"})
    assert (row["runs"], row["all"], row["remains"]) == ([], None, None)
    show_privacy([row])
    assert "nothing" in capsys.readouterr().out
    assert summary(PrivacyLedger(home.directory))["runs"] == []


def test_a_running_client_takes_the_terms_of_a_signed_welcome_and_shows_them(play):
    digest = schema_digest(METHOD, HPARAMS, NO_BACKBONE, NOISE)

    async def scenario(server, running):
        await server.hear(Hello)
        server.welcome(ready=False, privacy=NOISE, schema_digest=digest)
        hello = await server.hear(Hello)
        assert hello.schema_digest == digest
        shown = running.client.status()["privacy"]
        assert shown == {**NOISE.model_dump(), "own": vars(PrivacyLimits())}

    play(scenario)


def test_terms_that_the_digest_does_not_name_are_not_those_of_the_run(play):
    async def scenario(server, running):
        await server.hear(Hello)
        server.welcome(ready=False, privacy=NOISE)
        assert isinstance(await running.end(), MethodMismatch)

    play(scenario)


def test_a_client_without_the_accountant_ends_with_a_sentence(play, monkeypatch):
    monkeypatch.setattr(privacy_budget, "find_spec", lambda _: None)
    digest = schema_digest(METHOD, HPARAMS, NO_BACKBONE, NOISE)

    async def scenario(server, running):
        await server.hear(Hello)
        server.welcome(ready=False, privacy=NOISE, schema_digest=digest)
        assert "fcil[privacy]" in str(await running.end())

    play(scenario)


def test_a_client_refuses_a_method_that_noise_does_not_cover(play):
    open_method = replace(METHOD, statistics=lambda *_: ())

    async def scenario(server, running):
        await server.hear(Hello)
        digest = schema_digest(METHOD, HPARAMS, NO_BACKBONE, NOISE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handshake.registry, "load_method", lambda _: open_method)
            server.welcome(ready=False, privacy=NOISE, schema_digest=digest)
            assert isinstance(await running.end(), ConfigError)

    play(scenario)
