"""One-time links: good once, for a day, few at a time, and not to be guessed."""

import pytest

from fcil_protocol.errors import TrustError
from fcil_server.web.page.access.links import LIFE_S, MAX_OPEN, PageLinks


@pytest.fixture
def links() -> PageLinks:
    return PageLinks()


def let_in(links: PageLinks, token: str, now: float) -> None:
    links.check(token, now)
    links.remove(token)


def no_good(links: PageLinks, token: str, now: float = 0.0) -> str:
    with pytest.raises(TrustError) as told:
        let_in(links, token, now)
    return str(told.value)


def test_a_link_lets_in_once(links: PageLinks) -> None:
    token = links.make(0.0)
    let_in(links, token, 1.0)
    assert "was used" in no_good(links, token, 2.0)


def test_a_link_that_was_only_looked_at_still_lets_in(links: PageLinks) -> None:
    token = links.make(0.0)
    links.check(token, 1.0)
    let_in(links, token, 2.0)


@pytest.mark.parametrize("change", ["", "x", "A" * 43, "\udcff", "é" * 1000])
def test_what_is_no_link_lets_nobody_in_and_burns_none(links: PageLinks, change: str) -> None:
    token = links.make(0.0)
    no_good(links, change)
    no_good(links, token[:-1])
    no_good(links, token.swapcase())
    let_in(links, token, 1.0)


def test_a_link_is_good_for_a_day(links: PageLinks) -> None:
    early, late = links.make(0.0), links.make(1.0)
    no_good(links, early, LIFE_S)
    let_in(links, late, LIFE_S)


def test_of_many_links_the_newest_are_good(links: PageLinks) -> None:
    tokens = [links.make(0.0) for _ in range(MAX_OPEN + 1)]
    assert len(set(tokens)) == MAX_OPEN + 1
    no_good(links, tokens[0])
    for token in tokens[1:]:
        let_in(links, token, 1.0)


def test_wrong_links_of_others_keep_no_right_one_out(links: PageLinks) -> None:
    token = links.make(0.0)  # all who come to a loopback address have the same one
    for n in range(100):
        no_good(links, f"guess {n}")
    let_in(links, token, 0.0)


def test_signing_out_voids_the_open_links(links: PageLinks) -> None:
    token = links.make(0.0)
    links.void()
    no_good(links, token)


def test_nothing_that_is_kept_opens_anything(links: PageLinks) -> None:
    token = links.make(0.0)
    assert token not in repr(vars(links))
    (kept,) = links._open
    assert token.encode() not in kept
    assert len(token) == 43
