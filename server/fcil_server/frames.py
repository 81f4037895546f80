"""Records as data frames; pandas is an extra, so it is imported where a frame is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


def need() -> None:
    """See to it early that frames can be made: not after hours of work.

    Raises:
        UsageError: pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise UsageError(
            "tables as data frames need pandas, which is not installed.",
            action="Install it with: pip install 'fcil[lab]'",
        )


def frame(records: Iterable[Mapping[Any, Any]], columns: Sequence[str] | range) -> pd.DataFrame:
    """Return records as a frame, in their order; it has its columns without any record too.

    Raises:
        UsageError: pandas is not installed.
    """
    need()
    import pandas as pd

    return pd.DataFrame.from_records(list(records), columns=list(columns))


def moments(seconds: pd.Series) -> pd.Series:
    """Return seconds since 1970 as points in time, in UTC."""
    import pandas as pd

    return pd.to_datetime(seconds.astype("float64"), unit="s", utc=True)
