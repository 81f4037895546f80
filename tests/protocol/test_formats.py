"""Numbers as people read them."""

from __future__ import annotations

import pytest

from fcil_protocol.formats import duration


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (102.9, "1 min 43 s"),
        (186.0, "3 min 6 s"),
        (3599.6, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
        (360_000.0, "100 h 0 min"),
    ],
)
def test_a_duration_has_one_notation_on_each_side_of_a_minute(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
