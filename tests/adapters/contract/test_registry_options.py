"""How presets and options of a method are laid over each other."""

import pytest

from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_adapters.methods.pilora import METHOD
from fcil_protocol.errors import ConfigError


def test_a_nested_option_keeps_the_rest_of_a_presets_section():
    hparams = make_hparams(METHOD, {"preset": "paper", "reweight": {"eta": 0.5}})
    assert hparams.reweight.eta == 0.5
    assert hparams.reweight.temperature == "mul"


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="lr_prototype"):
        make_hparams(METHOD, {"lr_prototypes": 1.0})


@pytest.mark.parametrize("preset", ["long", ["paper"], {"paper": 1}, 3, False])
def test_an_unknown_preset_lists_those_there_are(preset):
    with pytest.raises(ConfigError, match="it has: .*paper"):
        make_hparams(METHOD, {"preset": preset})


@pytest.mark.parametrize("name", method_names())
def test_every_option_of_a_method_is_described_and_every_preset_is_valid(name):
    method = load_method(name)
    assert all(field.description for field in method.hparams.model_fields.values())
    for preset in method.presets:
        make_hparams(method, {"preset": preset})
