"""Which methods can have asynchronous rounds: those that declare it, and those that the page names."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fcil_adapters.contract import Exchange, PayloadSchema
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.registry import (
    check_asynchronous,
    load_method,
    make_hparams,
    method_names,
)
from fcil_protocol.errors import ConfigError

BACKBONE = replace(NO_BACKBONE, dim=8, depth=12, heads=2, mlp_dim=16)
PAGE = Path(__file__).parents[3] / "docs" / "asynchronous-rounds.md"


def averaged(name, **options):
    """Return the kinds of a method's rounds that may be asynchronous."""
    method = load_method(name)
    found = method.exchanges(make_hparams(method, options), BACKBONE)
    return [e.kind for e in found if e.averaged]


def test_the_page_names_exactly_the_methods_that_declare_it():
    table = PAGE.read_text().partition("## Methods")[2].splitlines()
    rows = [line.split(" | ") for line in table if line.startswith("| `")]
    said = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    own = {name for name in method_names() if load_method(name).learner.startswith("fcil_")}
    assert set(said) == own
    assert {n for n in own if averaged(n)} == {n for n in own if said[n].startswith("yes")}


def test_only_training_is_averaged_and_not_where_factors_take_turns():
    assert averaged("ewc") == ["train"]
    assert averaged("adapt_once") == ["train"]
    assert averaged("adapt_once", adapt={"rounds": 0}) == []
    assert averaged("lorm") == []


@pytest.mark.parametrize("name", ["hepco", "analytic", "plora"])
def test_a_method_without_such_rounds_is_refused_with_what_to_do(name):
    method = load_method(name)
    with pytest.raises(ConfigError, match="round.mode is 'async'") as caught:
        check_asynchronous(method, method.hparams(), BACKBONE)
    assert "Set round.mode to 'sync'" in str(caught.value)


def test_an_averaged_exchange_keeps_no_state_of_the_client():
    with pytest.raises(ValueError, match="cannot keep a client's state"):
        Exchange("train", PayloadSchema(()), averaged=True, keeps_state=True)
