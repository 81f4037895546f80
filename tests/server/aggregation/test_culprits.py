"""Which updates are to blame if combining them fails, in how few tries, and when none is."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil_server.aggregation.culprits import ALL_FAIL, TOGETHER, Found, find


def look(count, fails):
    """Search among updates of which a set fails as `fails` says; return what is found, and tries."""
    search, tries = find(count), []
    wanted = next(search)
    while True:
        assert list(wanted) == sorted(set(wanted))
        assert wanted
        tries.append(wanted)
        try:
            wanted = search.send(not fails(set(wanted)))
        except StopIteration as end:
            return end.value, tries


def any_of(*culprits):
    return lambda chosen: not chosen.isdisjoint(culprits)


def without(count, *left_out):
    return tuple(n for n in range(count) if n not in left_out)


@pytest.mark.parametrize("count", [2, 3, 7, 8, 100])
def test_one_culprit_is_found_wherever_it_is(count):
    for culprit in range(count):
        found, tries = look(count, any_of(culprit))
        assert found == Found(without(count, culprit), alone=[culprit])
        assert len(tries) <= 2 * math.ceil(math.log2(count)) + 2


def test_one_among_a_thousand_takes_some_twenty_tries():
    numbers = [len(look(1000, any_of(culprit))[1]) for culprit in range(0, 1000, 37)]
    assert max(numbers) <= 22


@given(st.integers(2, 60), st.sets(st.integers(0, 59), min_size=1, max_size=ALL_FAIL - 1))
def test_several_are_found_and_everybody_else_counts(count, culprits):
    culprits = {c for c in culprits if c < count} or {count - 1}
    if len(culprits) == count:
        culprits.pop()
    found, tries = look(count, any_of(*culprits))
    assert found == Found(without(count, *culprits), alone=sorted(culprits))
    assert len(tries) <= 2 * (len(culprits) + 1) * (math.ceil(math.log2(count)) + 2)


@pytest.mark.parametrize("pair", [(0, 1), (0, 9), (4, 5), (8, 9)])
def test_of_two_that_fail_only_with_each_other_one_is_left_out(pair):
    found, _ = look(10, lambda chosen: set(pair) <= chosen)
    assert not found.nobody
    assert (found.alone, len(found.together)) == ([], 1)
    assert found.together[0] in pair
    assert found.good == without(10, *found.together)


def test_of_two_alone_that_fail_only_with_each_other_neither_is_to_blame():
    assert look(2, lambda chosen: len(chosen) == 2)[0].nobody


@pytest.mark.parametrize("liar", range(5))
def test_one_that_fails_with_anybody_and_works_alone_is_not_taken_for_the_good_one(liar):
    found, _ = look(5, lambda chosen: liar in chosen and len(chosen) > 1)
    assert found == Found(without(5, liar), together=[liar])


@pytest.mark.parametrize("count", [1, 2, 9, 1000])
def test_where_everything_fails_nobody_is_to_blame_and_few_tries_show_it(count):
    found, tries = look(count, lambda _: True)
    assert found.nobody
    assert len(tries) <= 2 * math.ceil(math.log2(count + 1)) + 2 * ALL_FAIL + 2


@pytest.mark.parametrize("most", [1, 3, 500, 900])
def test_where_too_many_fail_nobody_is_to_blame(most):
    """As for lack of memory: whichever is left out, so many do not fit."""
    found, tries = look(1000, lambda chosen: len(chosen) > most)
    assert found.nobody
    assert len(found.together) == TOGETHER + 1
    assert len(tries) < 100


def test_nobody_is_blamed_where_it_fails_no_more():
    """What failed before was killed from outside."""
    for count in (1, 2, 5, 64):
        found, tries = look(count, lambda _: False)
        assert found == Found(tuple(range(count)))
        assert len(tries) <= math.ceil(math.log2(count)) + 1 if count > 1 else 1
