"""Key files: the same keys come back; whatever else lies there is refused and not shown."""

import base64
import json
import stat

import pytest

from fcil_protocol.errors import KeyFileError
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys

CURVE_SECRET = bytes(range(64, 96))
KEYS = PrivateKeys(
    curve=CURVE_SECRET, signing=bytes(range(96, 128)), sealing=bytes(range(128, 160))
)


def test_keys_are_the_same_after_save_and_load(tmp_path):
    keys = KEYS
    keys.save(tmp_path / "keys.json")
    loaded = PrivateKeys.load(tmp_path / "keys.json")
    assert loaded.public == keys.public
    assert loaded.curve_secret == CURVE_SECRET
    assert loaded.sign("x", b"y") == keys.sign("x", b"y")
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


def test_a_root_key_is_the_same_after_save_and_load(tmp_path):
    root = RootKey.generate()
    root.save(tmp_path / "root.json")
    loaded = RootKey.load(tmp_path / "root.json")
    assert (loaded.public, loaded.federation) == (root.public, root.federation)
    assert stat.S_IMODE((tmp_path / "root.json").stat().st_mode) == 0o600


def test_every_damaged_key_file_is_refused_without_showing_it(tmp_path):
    """Each field is changed in turn; an exchanged secret is noticed by the checksum."""
    path = tmp_path / "keys.json"
    KEYS.save(path)
    good = json.loads(path.read_bytes())
    other = base64.b64encode(bytes(range(32))).decode()
    short = base64.b64encode(bytes(31)).decode()
    bad = [
        *({**good, name: other} for name in ("curve", "signing", "sealing")),
        *({**good, name: short} for name in ("curve", "signing", "sealing")),
        *({**good, name: 7} for name in good),
        *({k: v for k, v in good.items() if k != name} for name in good),
        {**good, "version": 2},
        {**good, "check": "0" * 64},
        {**good, "curve": "no base64!"},
        [],
        None,
    ]
    for content in bad:
        path.write_text(json.dumps(content))
        with pytest.raises(KeyFileError) as caught:
            PrivateKeys.load(path)
        assert str(path) in str(caught.value)
        assert good["signing"] not in str(caught.value)
    path.write_bytes(b"\xff{")
    with pytest.raises(KeyFileError, match="damaged"):
        PrivateKeys.load(path)


def test_one_kind_of_key_file_does_not_serve_as_the_other(tmp_path):
    PrivateKeys.generate().save(tmp_path / "keys.json")
    RootKey.generate().save(tmp_path / "root.json")
    with pytest.raises(KeyFileError, match="expected format fcil-root-key"):
        RootKey.load(tmp_path / "keys.json")
    with pytest.raises(KeyFileError, match="expected format fcil-private-keys"):
        PrivateKeys.load(tmp_path / "root.json")


def test_a_key_file_that_others_can_read_is_refused(tmp_path):
    for keys in (PrivateKeys.generate(), RootKey.generate()):
        path = tmp_path / "key"
        keys.save(path)
        path.chmod(0o644)
        with pytest.raises(KeyFileError, match="chmod 600"):
            type(keys).load(path)
