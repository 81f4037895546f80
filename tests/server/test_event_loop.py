"""How late the loop is, and that long work lets others have it."""

import asyncio

import pytest

from fcil_server import event_loop
from fcil_server.event_loop import TICK_S, Lag, LagMeter, Yielder


def meter(*moments):
    """Return a meter whose first tick is due at 0, asked at these moments."""
    made = LagMeter()
    for now in moments:
        made.count(now)
    return made


def test_a_loop_that_is_in_time_has_no_lag():
    assert meter(*(n * TICK_S + 1e-9 for n in range(200))).lag.max_s < 1e-6


def test_one_late_tick_of_a_thousand_is_the_most_and_not_the_p99():
    lag = meter(*(n * TICK_S + 1e-9 for n in range(1000)), 1000 * TICK_S + 0.015).lag
    assert lag.max_s == pytest.approx(0.015)
    assert lag.p99_s <= 0.001


def test_all_that_was_due_while_the_loop_was_kept_counts_as_late():
    # 998 in time, then a second with nothing: 50 ticks of which most waited for long.
    lag = meter(*(n * TICK_S + 1e-9 for n in range(998)), 997 * TICK_S + 1.0).lag
    assert lag.max_s == pytest.approx(1.0, abs=TICK_S)
    assert lag.p99_s > 0.7


def test_an_hour_that_the_process_was_stopped_is_counted_in_bounded_steps(monkeypatch):
    monkeypatch.setattr(event_loop, "_MOST_TICKS", 10)
    made = meter(0.0, 3600.0)
    assert sum(made._counts) <= 12
    assert made.lag.max_s == pytest.approx(3600 - TICK_S)


def test_taking_begins_anew():
    made = meter(0.5)
    assert made.take().max_s == pytest.approx(0.5)
    assert made.lag == Lag()


def test_it_is_told_in_seconds_under_the_names_that_reports_know():
    assert Lag(0.25, 0.0123456).to_fields() == {"loop_lag_max_s": 0.25, "loop_lag_p99_s": 0.0123}


def test_the_meter_sees_a_loop_that_is_kept():
    async def story():
        made, loop = LagMeter(), asyncio.get_running_loop()
        made.start()
        began = loop.time()
        while loop.time() - began < 5 * TICK_S:
            pass  # kept
        await asyncio.sleep(0)  # the timer's turn
        await asyncio.sleep(0)
        made.stop()
        return made.lag.max_s

    assert asyncio.run(story()) >= 3 * TICK_S


@pytest.mark.parametrize(("step_s", "turns_of_others"), [(0.0, 0), (2 * event_loop.TURN_S, 10)])
def test_others_have_a_turn_when_the_work_has_taken_long_and_not_before(
    monkeypatch, step_s, turns_of_others
):
    now, seen = [0.0], []
    monkeypatch.setattr(event_loop.time, "monotonic", lambda: now[0])

    async def other():
        while True:
            seen.append(len(seen))
            await asyncio.sleep(0)

    async def story():
        task = asyncio.create_task(other())
        mine = Yielder()
        for _ in range(10):
            now[0] += step_s
            await mine.yield_if_long()
        task.cancel()

    asyncio.run(story())
    assert len(seen) >= turns_of_others
    assert bool(seen) is bool(turns_of_others)
