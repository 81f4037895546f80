"""Which cases of a parametrised test run at each change, and which only in `scripts/test --full`.

A contributor's run takes one case of each kind: a method, a setting or a moment whose way through
the code no other case takes. The long run takes them all.
"""

from collections.abc import Callable, Collection, Iterable

import pytest

# One method of each kind: pixels alone, frozen statistics, LoRA with prototypes, residuals, prompts.
OF_EACH_KIND = ("running_mean", "analytic", "pilora", "fed_talora", "hgp")


def sampled(
    cases: Iterable[object],
    quick: Collection[object] | Callable[..., bool] = OF_EACH_KIND,
) -> list[object]:
    """Return the cases as parameters; those that are not `quick` are marked ``full``.

    Args:
        cases: single values, or tuples of several.
        quick: the values (the first of a tuple) that run at each change, or whether one does.
    """
    return [c if _is_quick(c, quick) else _full(c) for c in cases]


def _is_quick(case: object, quick: Collection[object] | Callable[..., bool]) -> bool:
    values = case if isinstance(case, tuple) else (case,)
    return quick(*values) if callable(quick) else values[0] in quick


def _full(case: object) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
