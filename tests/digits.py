"""scikit-learn's scanned digits, read as the file that its package brings.

Importing the package takes seconds of every test process, of which the tests need nothing else.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Digits(NamedTuple):
    """1,797 digits: ``images`` of (1797, 8, 8) from 0 to 16, and ``target``, the digit shown."""

    images: np.ndarray
    target: np.ndarray


@cache
def load_digits() -> Digits:
    """Return the digits in the package's own order."""
    found = find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(path, delimiter=",")
    return Digits(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(int))
