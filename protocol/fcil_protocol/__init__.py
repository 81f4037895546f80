"""The wire between fcil clients and the server: payloads, envelopes, messages, links.

Needs numpy, safetensors, msgpack, cryptography, pyzmq and pydantic; never torch. ``PROTOCOL.md``
next to this package is the authority on every byte.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcil_protocol.payloads.payload import Payload, pack, unpack
    from fcil_protocol.payloads.schema import Kind, MetaSpec, PayloadSchema, TensorSpec

# The version of the wire, independent of the package's version. A side that speaks n
# also speaks n - 1.
PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1

__all__ = [
    "OLDEST_PROTOCOL_VERSION",
    "PROTOCOL_VERSION",
    "Kind",
    "MetaSpec",
    "Payload",
    "PayloadSchema",
    "TensorSpec",
    "pack",
    "unpack",
]

_PAYLOAD = ("Payload", "pack", "unpack")


def __getattr__(name: str) -> Any:
    """Load names lazily: most commands need no numpy, which takes a third of their start."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "payload" if name in _PAYLOAD else "schema"
    return getattr(import_module(f"fcil_protocol.payloads.{module}"), name)
