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
from fcil_client.link.handshake import check_relay, installed_methods, read_terms
from fcil_protocol.errors import ConfigError, TrustError
from fcil_protocol.messages.messages import PrivacyTerms, RelayKeys, Welcome
from fcil_protocol.trust.keys import PrivateKeys


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


RELAY = PrivateKeys.generate().public


def welcome_through_relay(**terms):
    relay = RelayKeys(name="depot", **RELAY.to_fields())
    return welcome_of(PrivacyTerms(**terms)).model_copy(update={"summing_relay": relay})


def test_updates_that_are_sums_are_for_the_relay_too_and_nothing_else_is():
    terms = read_terms(welcome_through_relay(relay_sums=True))
    assert (terms.relay_name, terms.relay) == ("depot", RELAY)
    assert terms.summing_relay("train") == RELAY
    assert terms.summing_relay("evaluate") is None
    assert terms.summing_relay("inventory") is None


def test_a_relay_opens_nothing_in_a_run_whose_terms_do_not_say_so():
    terms = read_terms(welcome_through_relay())
    assert terms.relay is None
    assert terms.summing_relay("train") is None


def test_terms_with_sums_have_another_digest_than_those_without():
    """So a client that does not know them cannot join, and older runs keep theirs."""
    summed = registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE, PrivacyTerms(relay_sums=True))
    assert summed != registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE)
    noised = PrivacyTerms(noise_multiplier=1, clip=1)
    before = "d93bac8cccbd8bbce45035fb84b8cea53c4d0e84d7c391a2b3b69a9e36282b2e"
    assert registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE, noised) == before


@pytest.mark.parametrize("link_key", ["", "00" * 32])
def test_a_relay_that_the_client_was_not_enrolled_through_opens_nothing(link_key):
    terms = read_terms(welcome_through_relay(relay_sums=True))
    check_relay(terms, RELAY.curve.hex())
    with pytest.raises(TrustError, match="'depot' to open this client's updates"):
        check_relay(terms, link_key)
