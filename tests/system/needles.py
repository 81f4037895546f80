"""Secrets in every spelling that a program could give them, and a search for all of them."""

import base64

from zmq.utils import z85

DISTINCT = 12  # bytes at least of a spelling that nothing else looks like


def spellings(secret):
    """Yield (how, bytes) for a secret: raw, hex, base64 wherever it begins, Z85, as Python."""
    yield "raw", secret
    yield "hex", secret.hex().encode()
    yield "hex, upper case", secret.hex().upper().encode()
    yield "hex with spaces", secret.hex(" ").encode()
    for alphabet, encode in (("", base64.b64encode), (", URL", base64.urlsafe_b64encode)):
        for before in range(3):  # inside something longer it may begin at any of three places
            text = encode(bytes(before) + secret)
            yield f"base64{alphabet}, {before}", text[(0, 2, 3)[before] : len(text) // 4 * 4 - 4]
    yield "base32", base64.b32encode(secret).rstrip(b"=")
    if len(secret) % 4 == 0:
        yield "Z85", z85.encode(secret)
    yield "Python bytes", repr(secret)[2:-1].encode()
    yield "Python list", str(list(secret))[1:-1].encode()
    yield "JSON list", str(list(secret))[1:-1].replace(" ", "").encode()


class Needles:
    """Named secrets to look for."""

    def __init__(self):
        self._found_by = {}
        self._secrets = {}

    def add(self, name, secret):
        """Look for one more; it must be long enough to be recognised."""
        assert len(secret) >= DISTINCT
        self._secrets[secret] = name
        for how, text in spellings(secret):
            assert len(text) >= DISTINCT, how
            self._found_by.setdefault(text, f"{name} ({how})")

    @property
    def names(self):
        """What is looked for."""
        return sorted(self._secrets.values())

    def found_in(self, data):
        """Return the names of all that the data holds."""
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogateescape")
        return sorted({name for text, name in self._found_by.items() if text in data})

    def plain_in(self, data):
        """Return the names of all that the data holds raw or in hex; quicker, for memory."""
        plain = self._secrets.items()
        return {n for secret, n in plain if secret in data or secret.hex().encode() in data}
