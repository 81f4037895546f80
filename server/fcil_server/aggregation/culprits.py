"""Search for the updates of a round that cannot be combined: group testing, as pure decisions.

`find` names sets of updates to try and receives True for each set that worked. First it looks for a
block without which all the others work, halving it as long as there is one: a single culprit among
K costs about 2 log2 K tries. Then it adds as much of the block to the others as works with them. So
the set in hand always works, and is as large as possible.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

Numbers = tuple[int, ...]

# This many fail alone before any has worked: the updates are not at fault.
ALL_FAIL = 8
# More than this many fail only with others: their number is too large, none is at fault.
TOGETHER = 2


@dataclass
class Found:
    """Result of the tries.

    Attributes:
        good: work together; sorted.
        alone: fail even alone.
        together: work alone and fail with the good ones.
    """

    good: Numbers = ()
    alone: list[int] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    nobody: bool = False  # no update is to blame; the other fields are then void


Search = Generator[Numbers, bool, Found]


def find(count: int) -> Search:
    """Find the updates on which combining all of them fails.

    Yields the sorted numbers to try, receives True if they worked, and returns the result. The
    search depends only on the answers.
    """
    found = Found()
    suspects = yield from _narrow(found, tuple(range(count)))
    yield from _join(found, suspects, fails=True)
    # Two halves that fail only with each other: neither can be told from the other.
    unclear = found.together and 2 * len(found.good) <= count
    found.nobody |= not found.good or bool(unclear)
    return found


def _narrow(found: Found, everybody: Numbers) -> Generator[Numbers, bool, Numbers]:
    """Return the smallest block found without which the others, then the good ones, work."""
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
    """Add as much of a block to the good ones as works; return True if all of it did.

    Args:
        found: changed on the way.
        block: updates that were not decided before.
        fails: True if the complete block is known to fail with the good ones.
    """
    if found.nobody:
        return False
    # One update's fault is never inferred: the worker may have been killed from outside before.
    if not (fails and len(block) > 1):
        grown = tuple(sorted({*found.good, *block}))
        if (yield grown):
            found.good = grown
            return True
    if len(block) > 1:
        first, second = _halves(block)
        joined = yield from _join(found, first, fails=False)
        # If the first half works and the complete block does not, the second does not either.
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
