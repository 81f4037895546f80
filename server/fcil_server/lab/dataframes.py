"""Records as data frames; pandas is an extra, so it is imported only for frames."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


# In all tables; the other columns are numbers.
TEXT = frozenset(
    (
        "run", "row", "partition", "method", "key", "kind", "outcome", "closed_by", "client",
        "client_name", "cause", "direction", "source", "text", "left", "right", "metric", "verdict",
        "measured",
    )
)  # fmt: skip


def need_pandas() -> None:
    """Check early that frames can be made: not after hours of work.

    Raises:
        UsageError: pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise UsageError(
            "tables as data frames need pandas, which is not installed.",
            action="Install it with: pip install 'fcil[lab]'",
        )


def frame(records: Iterable[Mapping[Any, Any]], columns: Sequence[str] | range) -> pd.DataFrame:
    """Return records as a frame, in their order; even without records it has its columns."""
    import pandas as pd

    table = pd.DataFrame.from_records(list(records), columns=list(columns))
    # pandas takes a column without values for objects, which it neither averages nor plots.
    empty = [c for c in columns if c not in TEXT and table[c].isna().all()]
    return table.astype(dict.fromkeys(empty, "float64"))


def moments(seconds: pd.Series) -> pd.Series:
    """Return seconds since 1970 as points in time, in UTC."""
    import pandas as pd

    return pd.to_datetime(seconds, unit="s", utc=True)
