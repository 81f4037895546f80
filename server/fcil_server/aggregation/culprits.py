"""Which updates of a round cannot be combined: group testing, as pure decisions.

`find` names sets of updates to try and is told of each whether it worked. First it looks for a
block without which all the others work, halving it as long as there is one: a single culprit
among K costs about 2 log2 K tries. Then it lets as much of the block join the others as works
with them. So the set in hand always works, and is as large as it gets.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

Numbers = tuple[int, ...]

# So many fail by themselves before any has worked: what fails is not the updates.
ALL_FAIL = 8
# More than so many fail with others only: their number is too much, not one of them.
TOGETHER = 2


@dataclass
class Found:
    """What the tries have shown.

    Attributes:
        good: work together; sorted.
        alone: fail also by themselves.
        together: work by themselves and fail with those that are good.
        nobody: no update is to blame; nothing else holds then.
    """

    good: Numbers = ()
    alone: list[int] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    nobody: bool = False


Search = Generator[Numbers, bool, Found]


def find(count: int) -> Search:
    """Find the updates on which combining all of them fails.

    Yields the sorted numbers to try, is sent whether that worked, and returns what it has found.
    Nothing depends on anything but the answers.
    """
    found = Found()
    suspects = yield from _narrow(found, tuple(range(count)))
    yield from _join(found, suspects, fails=True)
    # Two halves that fail with each other only: neither can be told from the other.
    unclear = found.together and 2 * len(found.good) <= count
    found.nobody |= not found.good or bool(unclear)
    return found


def _narrow(found: Found, everybody: Numbers) -> Generator[Numbers, bool, Numbers]:
    """Return the smallest block found without which the others work; those are the good ones."""
    suspects = everybody
    while len(suspects) > 1:
        for block in _halves(suspects):
            rest = tuple(n for n in everybody if n not in set(block))
            if (yield rest):
                suspects, found.good = block, rest
                break
        else:
            break  # several culprits, or everything fails
    return suspects


def _join(found: Found, block: Numbers, *, fails: bool) -> Generator[Numbers, bool, bool]:
    """Let as much of a block join the good ones as works with them; say whether all of it did.

    Args:
        found: changed on the way.
        block: updates that were not decided about before.
        fails: that it does not join as a whole is known already.
    """
    if found.nobody:
        return False
    # Blame of one is never inferred: a worker may have been killed from outside before.
    if not (fails and len(block) > 1):
        grown = tuple(sorted({*found.good, *block}))
        if (yield grown):
            found.good = grown
            return True
    if len(block) > 1:
        first, second = _halves(block)
        joined = yield from _join(found, first, fails=False)
        # Where the first half works and the whole does not, the second does not either.
        return (yield from _join(found, second, fails=joined)) and joined
    if found.good and (yield block):
        found.together += block
    else:
        found.alone += block
    many = len(found.alone) >= ALL_FAIL and not found.good
    found.nobody = many or len(found.together) > TOGETHER
    return False


def _halves(block: Numbers) -> tuple[Numbers, Numbers]:
    half = len(block) // 2
    return block[:half], block[half:]
