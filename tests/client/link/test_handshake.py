"""What a client says of itself."""

import json
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from client.daemon_kit import HPARAMS, RUN
from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_fields
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.link import handshake
from fcil_client.link.handshake import installed_methods, read_terms
from fcil_protocol.errors import ConfigError
from fcil_protocol.messages.messages import PrivacyTerms, Welcome


def test_all_methods_are_named_after_one_look_at_the_packages_and_a_broken_one_is_told(monkeypatch):
    good = registry.installed().select(name="running_mean")
    broken = EntryPoint("broken", "no.such.module:METHOD", registry.GROUP)
    looks = []

    def look(*, group):
        looks.append(group)
        return EntryPoints([broken, *good])

    monkeypatch.setattr(registry, "entry_points", look)
    found, faults = installed_methods()
    assert [f.partition("==")[0] for f in found] == ["running_mean"]
    assert ["'broken'" in fault for fault in faults] == [True]
    assert looks == [registry.GROUP]


def fails(*_):
    return {}["gamma"]


def test_an_exception_in_a_manifest_is_its_authors(monkeypatch):
    """Not a defect of fcil, nor of the server."""
    bad = replace(METHOD, exchanges=fails)
    monkeypatch.setattr(registry, "load_method", lambda _name: bad)
    with pytest.raises(ConfigError, match="'running_mean' fails with KeyError") as at:
        read_terms(welcome_of(PrivacyTerms()))
    assert f"{Path(__file__).name}:" in at.value.action


def welcome_of(privacy, *, takes=True):
    return Welcome(
        protocol=1, server_nonce=bytes(16), certificate=b"", run=RUN, method=METHOD.name,
        method_version=METHOD.version, hparams=HPARAMS.model_dump_json(),
        schema_digest=registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE, privacy),
        backbone=json.dumps(backbone_fields(NO_BACKBONE)), needs_backbone=False, ready=True,
        max_payload_bytes=1000, credit=8, privacy=privacy, training_metrics=takes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("takes", "noise", "shared"), [(True, 0.0, True), (False, 0.0, False), (True, 1.0, False)]
)
def test_training_metrics_are_for_a_server_that_takes_them_and_never_beside_noise(
    monkeypatch, takes, noise, shared
):
    for check in ("check_privacy", "check_installed"):
        monkeypatch.setattr(handshake, check, lambda *_: None)
    welcome = welcome_of(PrivacyTerms(noise_multiplier=noise, clip=noise), takes=takes)
    assert read_terms(welcome).training_metrics is shared
    assert read_terms(welcome).compact is False
    assert read_terms(welcome.model_copy(update={"compact": True})).compact is True
