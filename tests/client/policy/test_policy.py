"""When a device may work: every rule alone and together, and what a system does not tell."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil_client.policy import sensors
from fcil_client.policy.policy import (
    INPUT_S,
    QUIET_S,
    Facts,
    Heat,
    Judgement,
    Policy,
    PolicyRules,
    read_hours,
    show_hours,
    within,
)
from fcil_client.policy.sensors import System, Times, hot_threshold, others_share, read_zones
from fcil_protocol.errors import UsageError

FREE = Judgement(1.0, "")


def judged(rules, *facts, step=5.0):
    """Judge these facts one after the other, so many seconds apart."""
    manners = Policy(rules)
    return [manners.permitted_share(one, number * step) for number, one in enumerate(facts)]


def shares(rules, *facts, step=5.0):
    return [one.share for one in judged(rules, *facts, step=step)]


class TestPower:
    @pytest.mark.parametrize("on_mains", [True, None])
    def test_on_mains_and_without_a_battery_it_works(self, on_mains):
        rules = PolicyRules(only_on_mains=True, min_battery=40)
        assert judged(rules, Facts(on_mains=on_mains, charge=5.0)) == [FREE]

    def test_on_battery_it_rests_if_the_owner_says_so_and_only_then(self):
        facts = Facts(on_mains=False, charge=90.0)
        assert judged(PolicyRules(only_on_mains=True), facts) == [Judgement(0.0, "on battery")]
        assert judged(PolicyRules(), facts) == [FREE]

    def test_a_battery_below_the_least_must_be_well_above_it_before_work_goes_on(self):
        charges = [41, 40, 39, 40, 44, 45, 41]
        facts = [Facts(on_mains=False, charge=float(c)) for c in charges]
        assert shares(PolicyRules(min_battery=40), *facts) == [1, 1, 0, 0, 0, 1, 1]

    def test_mains_end_the_rest_at_any_charge(self):
        low, plugged = Facts(on_mains=False, charge=10.0), Facts(on_mains=True, charge=10.0)
        assert shares(PolicyRules(min_battery=40), low, plugged) == [0, 1]

    def test_a_charge_that_is_not_told_forbids_nothing(self):
        assert judged(PolicyRules(min_battery=40), Facts(on_mains=False)) == [FREE]


class TestUse:
    RULES = PolicyRules(only_when_idle=True)

    def test_it_rests_until_the_device_was_quiet_for_a_while(self):
        quiet = Facts(others=0.01)
        needed = int(QUIET_S // 5)
        got = judged(self.RULES, Facts(), *[quiet] * needed)
        assert [one.share for one in got] == [0] * needed + [1]
        assert got[0].why == "in use"

    def test_a_moment_of_work_begins_the_wait_anew(self):
        manners = Policy(self.RULES)
        assert manners.permitted_share(Facts(others=0.0), 0.0).share == 0
        assert manners.permitted_share(Facts(others=0.5), QUIET_S - 1).share == 0
        assert manners.permitted_share(Facts(others=0.0), QUIET_S + 1).share == 0
        assert manners.permitted_share(Facts(others=0.0), 2 * QUIET_S + 1).share == 1

    def test_a_little_load_does_not_end_idleness_but_keeps_it_from_beginning(self):
        between = Facts(others=0.15)
        assert shares(self.RULES, *[between] * 100)[-1] == 0
        idle = [Facts(others=0.0)] * 20
        assert shares(self.RULES, *idle, between, Facts(others=0.25))[-2:] == [1, 0]

    def test_a_key_in_a_terminal_is_use(self):
        idle = [Facts(others=0.0)] * 20
        touched = Facts(others=0.0, input_s=1.0)
        long_ago = Facts(others=0.0, input_s=INPUT_S)
        assert shares(self.RULES, *idle, touched)[-1] == 0
        assert shares(self.RULES, *[long_ago] * 20)[-1] == 1

    def test_without_the_rule_nobody_is_looked_at(self):
        assert judged(PolicyRules(), Facts(others=1.0, input_s=0.0)) == [FREE]


class TestHours:
    @pytest.mark.parametrize(
        ("text", "hours"),
        [
            ("22-6", (1320, 360)), ("6-22", (360, 1320)), ("12:30-14:05", (750, 845)),
            ("0-24", None), ("18-24", (1080, 0)), ("24-6", (0, 360)), ("6-6", None),
            ("25-3", None), ("1:60-2", None), ("", None), ("a-b", None), ("1-2-3", None),
            ("24:30-3", None),
        ],
    )  # fmt: skip
    def test_hours_are_read_or_refused_in_a_sentence(self, text, hours):
        if hours is None:
            with pytest.raises(UsageError, match="expected hours such as 22-6"):
                read_hours(text)
        else:
            assert read_hours(text) == hours

    def test_they_may_go_over_midnight(self):
        night = read_hours("22-6")
        inside = [m for m in range(24 * 60) if within(night, m)]
        assert inside == [*range(360), *range(1320, 1440)]
        assert show_hours(night) == "22:00-06:00"

    def test_outside_them_it_rests(self):
        rules = PolicyRules(hours=(540, 600))
        assert shares(rules, *(Facts(minute=m) for m in (539, 540, 599, 600))) == [0, 1, 1, 0]
        assert judged(rules, Facts(minute=0))[0].why == "outside 09:00-10:00"


def hot(now, mark=100.0, name="cpu"):
    return Facts(heat=(Heat(name, now, mark),))


class TestHeat:
    def test_near_the_mark_it_works_less_and_less_and_then_not_at_all(self):
        assert shares(PolicyRules(), *map(hot, [80, 96, 97, 96, 98])) == [1, 0.5, 0.25, 0, 0]

    def test_at_the_mark_it_stops_at_once(self):
        assert judged(PolicyRules(), hot(100.0)) == [Judgement(0.0, "hot: cpu 100 °C of 100 °C")]

    def test_it_speeds_up_again_only_when_it_is_well_below(self):
        assert shares(PolicyRules(), *map(hot, [100, 94, 91, 90, 89, 88, 92])) == [
            0, 0, 0, 0.25, 0.5, 1, 1,
        ]  # fmt: skip

    def test_part_of_the_time_is_said(self):
        assert judged(PolicyRules(), hot(96.0))[0].why.endswith("works 50 % of the time")

    def test_a_system_that_names_no_mark_forbids_nothing(self):
        assert judged(PolicyRules(), hot(300.0, None), Facts()) == [FREE, FREE]

    def test_the_owner_can_name_a_lower_mark_for_all(self):
        rules = PolicyRules(max_temperature=70.0)
        assert judged(rules, hot(71.0, None))[0].share == 0
        assert judged(rules, hot(71.0, 100.0))[0].share == 0
        assert judged(rules, hot(66.0, 60.0))[0].share == 0, "the system's own is lower"

    def test_the_sensor_nearest_to_its_mark_counts(self):
        facts = Facts(heat=(Heat("a", 90.0, 120.0), Heat("b", 70.0, 70.0), Heat("c", 99.0)))
        assert judged(PolicyRules(), facts)[0].why.startswith("hot: b 70")


AGAINST = {
    "power": (PolicyRules(only_on_mains=True), {"on_mains": False}, "on battery"),
    "use": (PolicyRules(only_when_idle=True), {"others": 0.9}, "in use"),
    "hours": (PolicyRules(hours=(60, 120)), {"minute": 0}, "outside 01:00-02:00"),
    "heat": (PolicyRules(), {"heat": (Heat("x", 90.0, 90.0),)}, "hot: x 90 °C of 90 °C"),
}


@pytest.mark.parametrize("names", [
    names for n in range(1, 5) for names in itertools.combinations(AGAINST, n)
], ids="+".join)  # fmt: skip
def test_every_reason_is_enough_and_all_are_said(names):
    rules = PolicyRules(only_on_mains=True, only_when_idle="use" in names, hours=(60, 120))
    facts = {"minute": 60} | {k: v for name in names for k, v in AGAINST[name][1].items()}
    assert judged(rules, Facts(**facts)) == [
        Judgement(0.0, "; ".join(AGAINST[name][2] for name in names))
    ]


maybe = st.none() | st.floats(0, 100)
told = st.builds(
    Facts,
    minute=st.integers(0, 1439),
    on_mains=st.none() | st.booleans(),
    charge=maybe,
    others=st.none() | st.floats(0, 1),
    input_s=maybe,
    heat=st.lists(st.builds(Heat, st.just("x"), st.floats(0, 120), maybe), max_size=2).map(tuple),
)
any_rules = st.builds(
    PolicyRules,
    only_on_mains=st.booleans(),
    min_battery=st.integers(0, 100),
    only_when_idle=st.booleans(),
    hours=st.none() | st.tuples(st.integers(0, 700), st.integers(701, 1439)),
    max_temperature=st.none() | st.floats(40, 90),
)


@given(any_rules, st.lists(told, max_size=8))
def test_fuzz_whatever_comes_it_works_without_a_word_or_says_why_not(rules, readings):
    for one in judged(rules, *readings):
        assert (one.share == 1.0) == (one.why == "")


@given(any_rules, st.lists(told, max_size=5))
def test_fuzz_after_good_news_for_long_enough_it_always_works(rules, readings):
    good = Facts(minute=700, on_mains=True, others=0.0)
    manners = Policy(rules)
    for number, one in enumerate([*readings, *[good] * 20]):
        last = manners.permitted_share(one, 5.0 * number)
    assert last == FREE


class TestFacts:
    def test_others_are_all_but_this_client_and_those_that_give_way(self):
        before = Times(busy=100.0, own={7: 10.0}, total=1000.0)
        after = Times(busy=110.0, own={7: 12.0, 8: 3.0}, total=1020.0)
        assert others_share(before, after) == pytest.approx(0.25)

    def test_a_worker_that_ended_is_not_counted_against_the_others(self):
        before = Times(busy=100.0, own={7: 90.0}, total=1000.0)
        assert others_share(before, Times(busy=101.0, own={}, total=1020.0)) == pytest.approx(0.05)

    def test_two_readings_at_once_say_nothing(self):
        now = Times(1.0, {}, 5.0)
        assert others_share(now, now) is None

    @pytest.mark.parametrize(
        ("high", "critical", "mark"),
        [
            (80.0, 100.0, 80.0), (None, 100.0, 95.0), (100.0, 100.0, 95.0), (None, None, None),
            (0.0, 0.0, None), (65261.85, None, None), (45.0, None, None), (-273.0, 105.0, 100.0),
        ],
    )  # fmt: skip
    def test_a_mark_is_the_lowest_that_makes_sense(self, high, critical, mark):
        assert hot_threshold(high, critical) == mark

    def test_zones_of_a_board_are_read_with_their_trips(self, tmp_path):
        def zone(number, **files):
            folder = tmp_path / f"thermal_zone{number}"
            folder.mkdir()
            for name, text in files.items():
                (folder / name).write_text(f"{text}\n")

        zone(
            0, type="CPU-therm", temp=51500, trip_point_0_type="active", trip_point_0_temp=40000,
            trip_point_1_type="passive", trip_point_1_temp=97000, trip_point_2_type="critical",
            trip_point_2_temp=101000,
        )  # fmt: skip
        zone(1, type="GPU-therm", temp=60000, trip_point_0_type="critical", trip_point_0_temp=99000)
        zone(2, type="fan", temp=30000, trip_point_0_type="active", trip_point_0_temp=50000)
        zone(3, type="gone", temp="")
        zone(4, temp=20000)
        assert read_zones(tmp_path) == [
            Heat("CPU-therm", 51.5, 96.0), Heat("GPU-therm", 60.0, 94.0), Heat("fan", 30.0),
            Heat("thermal_zone4", 20.0),
        ]  # fmt: skip

    def made_up(self, monkeypatch, **answers):
        for name, answer in answers.items():
            monkeypatch.setattr(sensors.psutil, name, answer, raising=False)

    def test_psutil_is_asked_for_power_and_heat(self, monkeypatch, tmp_path):
        def warm(label, now, high):
            return SimpleNamespace(label=label, current=now, high=high, critical=None)

        self.made_up(
            monkeypatch,
            sensors_battery=lambda: SimpleNamespace(percent=71, power_plugged=False),
            sensors_temperatures=lambda: {
                "coretemp": [warm("Core 0", 50.0, 90.0), warm("", float("nan"), 90.0)],
                "acpitz": [warm("", 40.0, None)],
            },
        )
        facts = System(use=False, zones=tmp_path).read()
        assert (facts.on_mains, facts.charge, facts.others) == (False, 71.0, None)
        assert facts.heat == (Heat("coretemp Core 0", 50.0, 90.0), Heat("acpitz", 40.0))

    def test_a_system_that_tells_nothing_or_nonsense_forbids_nothing(self, monkeypatch, tmp_path):
        def nonsense():
            raise KeyError("a driver's defect")

        self.made_up(monkeypatch, sensors_battery=lambda: None, sensors_temperatures=nonsense)
        facts = System(use=False, zones=tmp_path / "none").read()
        assert (facts.on_mains, facts.charge, facts.heat) == (None, None, ())
        monkeypatch.delattr(sensors.psutil, "sensors_battery")
        assert System(use=False, zones=tmp_path).read().on_mains is None

    def test_use_is_measured_between_two_readings(self, monkeypatch, tmp_path):
        times = iter([Times(0.0, {}, 0.0), Times(3.0, {}, 10.0)])
        monkeypatch.setattr(sensors, "_times", lambda: next(times))
        self.made_up(monkeypatch, users=list)
        system = System(zones=tmp_path)
        assert [system.read().others, system.read().others] == [None, 0.3]
