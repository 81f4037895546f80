"""The settings that the demo adds to its user's."""

from __future__ import annotations

import pytest

from fcil_server.lab.local.demo import demo_config


def method_settings(*settings: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in demo_config(3, settings)]
    return {key: value for key, _, value in pairs if key.startswith("method.")}


@pytest.mark.parametrize("method", ["hgp", '"hgp"', "running_mean", None])
def test_options_for_digits_are_set_where_the_method_has_them(method: str | None) -> None:
    settings = method_settings(*([f"method.name={method}"] if method else []))
    if method == "running_mean":
        assert settings == {"method.name": "running_mean"}
    else:
        assert settings["method.name"] == ("hgp" if method else "pilora")
        assert settings["method.preset"] == "short"
        assert settings["method.augment"] == "jitter"
