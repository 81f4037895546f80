"""Output of ``fcil-client privacy``: the terms in force, the budget spent and remaining."""

from __future__ import annotations

from typing import Any

from fcil_client.state.home import Home
from fcil_client.state.privacy_budget import LIMIT_DELTA, PrivacyLedger, summary
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.process.tables import console
from fcil_protocol.process.terminal import count_of, printable


def one_privacy(home: Home, status: dict[str, Any]) -> dict[str, Any]:
    """Return one client's terms and budget as plain data.

    Args:
        home: its directory.
        status: what its daemon says; without one the terms in force are not known.

    Raises:
        CorruptFile, ConfigError: the ledger cannot be read, or not be summed up.
    """
    terms = status.get("privacy")
    spent = summary(PrivacyLedger(home.directory), terms["delta"] if terms else LIMIT_DELTA)
    return {
        "client": status["client"],
        "name": status["name"],
        "data": status["data"],
        "run": status.get("run"),
        "terms": terms,
        **spent,
        "remains": _remains(terms, status.get("run"), spent),
    }


def _remains(terms: dict[str, Any] | None, run: str | None, spent: dict[str, Any]) -> float | None:
    """Return the epsilon that is left in the current run; None: no limit, or not known."""
    if terms is None:
        return None
    in_run = next((r["epsilon"] for r in spent["runs"] if r["run"] == run), 0.0)
    total = spent["all"]["epsilon"] if spent["all"] else 0.0
    limits = [(terms["max_epsilon"], in_run), (terms["own"]["max_epsilon"], total)]
    left = [max(limit - used, 0.0) for limit, used in limits if limit]
    return round(min(left), 6) if left else None


def describe_limits(own: dict[str, Any]) -> str:
    """Return a client's own limits in one line; "" if it has none."""
    parts = []
    if own["min_count"] > 1:
        parts.append(f"at least {own['min_count']} images")
    if own["min_noise"]:
        parts.append(f"noise at least {own['min_noise']:g}")
    if own["max_epsilon"]:
        parts.append(f"epsilon at most {own['max_epsilon']:g}")
    if own.get("min_masked"):
        parts.append(f"masked sums of at least {own['min_masked']} clients")
    return ", ".join(parts)


def show_privacy(rows: list[dict[str, Any]]) -> None:
    """Print the budgets of some clients."""
    out = console()
    if not rows:
        out.print("No folder of this user is enrolled: no privacy was spent.")
    for row in rows:
        out.print(f"{printable(row['name'])}  ({printable(row['data'])})", style="bold")
        if row["terms"] is None:
            out.print("  terms    not known: the client is not running, or has no run yet")
        else:
            out.print(f"  terms    {PrivacyTerms.model_validate(row['terms']).describe()}")
            own = describe_limits(row["terms"]["own"])
            if own:
                out.print(f"  own      {own}")
        for one in row["runs"]:
            out.print(f"  {one['run']}  {_spent(one)}")
        if not row["runs"]:
            out.print("  spent    nothing: no noised statistic has left this device")
        elif len(row["runs"]) > 1 or row["runs"][0]["delta"] != row["all"]["delta"]:
            out.print(f"  all runs  {_spent(row['all'])}")
        if row["remains"] is not None:
            out.print(f"  remains  epsilon {row['remains']:.4g}")


def _spent(one: dict[str, Any]) -> str:
    return (
        f"epsilon {one['epsilon']:.4g} at delta {one['delta']:g}, "
        f"{count_of(one['releases'], 'statistic')} in {count_of(one['rounds'], 'round')}"
    )
