"""What the server says to a client whose method is another one, and hears from one that ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE, preprocessing_digest
from fcil_adapters.methods.running_mean import METHOD
from fcil_protocol import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from fcil_protocol.errors import (
    BackboneMismatch,
    FcilError,
    MethodMismatch,
    StorageError,
    VersionMismatch,
)
from fcil_protocol.messages.messages import BackboneClaim, Bye, Hello
from fcil_server.sessions.handshake import RunTerms, check, feature_distance, leaving, welcome

RUN = "r20260102-030405-0a0b"
HPARAMS = METHOD.hparams()
TERMS = RunTerms(
    federation="f" * 32, certificate=b"", run=RUN, method=METHOD, hparams=HPARAMS,
    info=NO_BACKBONE, probe=None, max_payload_bytes=1, credit=1, package="9",
    schema_digest=registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE), method_package="pack 7",
)  # fmt: skip


def hello(**changes: object) -> Hello:
    fields = {
        "protocol": PROTOCOL_VERSION, "oldest": OLDEST_PROTOCOL_VERSION, "package": "9",
        "federation": TERMS.federation, "client": "c" * 26, "run": RUN,
        "methods": ["pilora==1", "running_mean==1"], "schema_digest": TERMS.schema_digest,
    }  # fmt: skip
    return Hello.model_validate(fields | changes)


def test_a_client_with_the_same_method_may_take_part() -> None:
    assert check(TERMS, hello())
    assert not check(TERMS, hello(schema_digest="")), "it has not loaded it yet"


def test_a_client_that_reads_no_compact_payloads_is_refused_where_there_are_some() -> None:
    compact = replace(TERMS, compact=True)
    assert check(compact, hello(takes_compact=True))
    assert check(TERMS, hello(takes_compact=True)), "it reads the plain ones as well"
    with pytest.raises(VersionMismatch) as caught:
        check(compact, hello(package="8"))
    assert "the client's fcil 8 does not read" in caught.value.message
    assert "Install fcil 9 on the client" in caught.value.action
    assert "-c wire.compact=false" in caught.value.action
    with pytest.raises(VersionMismatch) as same:
        check(compact, hello(package=TERMS.package))
    assert "the server's build of fcil" in same.value.action
    assert welcome(compact, nonce=bytes(16), ready=False, verdict=None).compact
    assert not welcome(TERMS, nonce=bytes(16), ready=False, verdict=None).compact


@pytest.mark.parametrize(
    ("methods", "has"),
    [
        ([], "has no such method"),
        (["running_mean_2==1", "pilora==1"], "has no such method"),
        (["running_mean==0.9"], "has version 0.9"),
    ],
)
def test_another_method_is_refused_with_both_versions_and_what_to_install(
    methods: list[str], has: str
) -> None:
    with pytest.raises(MethodMismatch) as caught:
        check(TERMS, hello(methods=methods))
    expected = f"the server runs method 'running_mean' version 1, the client {has}."
    assert caught.value.message == expected
    assert caught.value.action == "Install pack 7 on the client and start it again."


def test_without_a_known_package_there_is_still_something_to_do() -> None:
    with pytest.raises(MethodMismatch) as caught:
        check(replace(TERMS, method_package=""), hello(methods=[]))
    assert "the package that brings the method" in caught.value.action


def test_features_of_the_probes_agree_within_the_tolerance_or_are_refused() -> None:
    ours = np.eye(4, 8, dtype=np.float32)
    terms = replace(TERMS, probe=ours)

    def claim(theirs: np.ndarray) -> BackboneClaim:
        preprocessing = preprocessing_digest(NO_BACKBONE.preprocessing)
        probe = theirs.astype("<f4").tobytes()
        return BackboneClaim(digest=NO_BACKBONE.digest, preprocessing=preprocessing, probe=probe)

    close, far = claim(ours * np.float32(1 + 5e-4)), claim(ours * np.float32(1.01))
    assert check(terms, hello(backbone=close))
    assert feature_distance(terms, close) == pytest.approx(5e-4, rel=1e-3)
    with pytest.raises(BackboneMismatch, match=r"differ by 0.01 relative, allowed is 0.001"):
        check(terms, hello(backbone=far))
    assert feature_distance(TERMS, far) is None, "a method without backbone compares nothing"


def test_a_welcome_names_the_package() -> None:
    named = replace(TERMS, method_package="p" * 500)  # an absurd name is no reason to fall silent
    said = welcome(named, nonce=bytes(16), ready=False, verdict=None)
    assert said.method_package == "p" * 128


def test_a_client_that_ends_is_remembered_with_its_code_and_what_it_says() -> None:
    error = leaving(Bye(code="method_mismatch", reason="two schemas."))
    assert (type(error), error.message) == (MethodMismatch, "two schemas.")
    error = leaving(Bye(code="storage_failed"))
    assert type(error) is StorageError
    assert "its own log" in error.message
    assert type(leaving(Bye(code="of a later version"))) is FcilError
