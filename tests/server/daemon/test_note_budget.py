"""What one origin may have written down: some notes in full, the rest as a count."""

from hypothesis import given
from hypothesis import strategies as st

from fcil_server.daemon.note_budget import BURST, EVERY_S, MINUTE_S, NoteBudget


def flood(budget, count, now, origin="a", key="declined"):
    return sum(budget.take(origin, key, f"{origin}: {n}", now) for n in range(count))


def test_the_first_are_written_and_the_others_counted():
    budget = NoteBudget()
    assert flood(budget, 4000, 0.0) == BURST
    assert budget.due(0.5) == []
    (held,) = budget.due(EVERY_S + 0.1)  # the flood is over: there is room for a line
    assert held.summary_line == f"a: 3999 (and {4000 - BURST - 1:,} more like it)"
    assert not budget.holds


def test_while_more_is_coming_it_is_said_once_a_minute():
    budget, now, said = NoteBudget(), 0.0, []
    while now < 10 * MINUTE_S:
        flood(budget, 5, now)
        said += budget.due(now)
        now += 0.5
    assert 8 <= len(said) <= 10


def test_one_alone_that_was_held_back_is_said_as_it_was():
    budget = NoteBudget()
    flood(budget, BURST + 1, 0.0)
    assert [h.summary_line for h in budget.due(0.0, everything=True)] == [f"a: {BURST}"]


def test_nobodys_flood_is_at_the_cost_of_others():
    budget = NoteBudget()
    flood(budget, 10_000, 0.0)
    assert flood(budget, BURST, 0.0, origin="b") == BURST


def test_who_was_quiet_for_long_is_forgotten():
    budget = NoteBudget()
    for number in range(1000):
        flood(budget, 1, 0.0, origin=str(number))
    budget.due(BURST * EVERY_S)
    assert not budget._buckets


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["declined", "malformed"]),
            st.integers(0, 300),
            st.floats(0, 40),
        ),
        max_size=40,
    )
)
def test_nothing_is_left_uncounted_and_no_minute_has_more_than_its_lines(floods):
    budget, now = NoteBudget(), 0.0
    sent = written = 0
    lines = []
    for origin, key, count, pause in floods:
        now += pause
        taken = flood(budget, count, now, origin, key)
        sent, written = sent + count, written + taken
        lines += [now] * taken
        for held in budget.due(now):
            written += held.count
            lines.append(now)
    written += sum(held.count for held in budget.due(now, everything=True))
    assert written == sent
    for at in lines:
        within = sum(at <= other < at + MINUTE_S for other in lines)
        # For each of three origins: what was saved up, what comes in a minute, a line for each kind.
        assert within <= 3 * (BURST + MINUTE_S / EVERY_S + 2 * 2 + 1)
