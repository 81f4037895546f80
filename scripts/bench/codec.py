"""Would a lossless codec pay? Byte-shuffled zlib and zstandard on payloads of real training.

Every payload that one client fetches and sends in two tasks (`resent.py`: digits, embedded
backbone, preset ``short``), as float32 and with the kinds that the method offers in half
precision. Ratio is coded over plain bytes, all payloads of a method and way together; MB/s are
plain bytes per CPU second. "pays below" is the speed of a link, in Mbit/s, at which coding,
sending less and decoding takes as long as sending everything. zstandard is not installed with
the project::

    pip install zstandard && python scripts/bench/codec.py [METHOD ...]
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_data import digits
from resent import SEED, TASKS, TRAIN, watch

from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.contract import Method
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.contract.registry import load_method, method_names
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.payloads.schema import PayloadSchema

try:
    import zstandard
except ImportError:
    zstandard = None  # type: ignore[assignment]

Coder = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Codec:
    """A compressor and its opposite; shuffled: bytes of equal weight side by side first."""

    name: str
    code: Coder
    decode: Coder
    shuffled: bool


def codecs() -> list[Codec]:
    """Return what is compared."""
    found = [("zlib 1", lambda b: zlib.compress(b, 1), zlib.decompress)]
    found.append(("zlib 6", lambda b: zlib.compress(b, 6), zlib.decompress))
    if zstandard is not None:
        for level in (1, 3):
            coder = zstandard.ZstdCompressor(level=level).compress
            found.append((f"zstd {level}", coder, zstandard.ZstdDecompressor().decompress))
    return [
        Codec(f"{name}{', shuffled' if shuffled else ''}", code, decode, shuffled)
        for shuffled in (False, True)
        for name, code, decode in found
    ]


def shuffle(data: bytes) -> bytes:
    """Put the bytes of each tensor's numbers side by side: all first, all second bytes, ..."""
    payload = unpack(data)
    sizes = sum(array.nbytes for array in payload.tensors.values())
    pieces = [data[: len(data) - sizes]]
    for array in payload.tensors.values():
        flat = np.ascontiguousarray(array).reshape(-1)
        pieces.append(flat.view(np.uint8).reshape(-1, array.dtype.itemsize).T.tobytes())
    return b"".join(pieces)


def unshuffle(mixed: bytes, sizes: list[tuple[int, int]], head: int) -> bytes:
    """Undo it: (numbers, bytes of each) of every tensor, behind a head of so many bytes."""
    pieces, at = [mixed[:head]], head
    for count, width in sizes:
        part = np.frombuffer(mixed, np.uint8, count * width, at).reshape(width, count)
        pieces.append(part.T.tobytes())
        at += count * width
    return b"".join(pieces)


def measure(codec: Codec, payloads: Iterable[bytes]) -> tuple[float, float, float]:
    """Return the ratio and the plain bytes per CPU second of coding and of decoding."""
    plain = coded = 0
    spent = [0.0, 0.0]
    for data in payloads:
        tensors = unpack(data).tensors.values()
        sizes = [(a.size, a.dtype.itemsize) for a in tensors]
        head = len(data) - sum(a.nbytes for a in tensors)
        began = time.process_time()
        small = codec.code(shuffle(data) if codec.shuffled else data)
        between = time.process_time()
        back = codec.decode(small)
        if codec.shuffled:
            back = unshuffle(back, sizes, head)
        ended = time.process_time()
        if back != data:
            raise AssertionError(f"{codec.name} does not give back what it got")
        plain, coded = plain + len(data), coded + len(small)
        spent[0] += between - began
        spent[1] += ended - between
    return coded / plain, plain / max(spent[0], 1e-9), plain / max(spent[1], 1e-9)


def schemas(method: Method, hparams: Any, info: Any) -> dict[str, PayloadSchema]:
    """Return the schema of each exchange and part."""
    sent = {e.kind: e.upload for e in method.exchanges(hparams, info)}
    return {**sent, **method.broadcast(hparams, info)}


def narrowed(data: bytes, schema: PayloadSchema, forms: Forms) -> bytes:
    """Return a payload as it travels in half precision."""
    payload = unpack(data)
    half = {spec.name for spec in forms.schema(schema).tensors if spec.dtype == "F16"}
    tensors = {n: a.astype(np.float16) if n in half else a for n, a in payload.tensors.items()}
    return pack(Payload(tensors, payload.meta))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone("embedded")
    data = digits(backbone.info.preprocessing, SEED, TRAIN, 0, TASKS)
    print("| method | form | way | kB | codec | ratio | coding MB/s | decoding MB/s | pays below |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.methods or method_names():
        method = load_method(name)
        seen = watch(name, args.rounds, backbone, data)
        known = schemas(method, seen.hparams, backbone.info)
        for form, forms in (("fp32", Forms()), ("half", Forms(frozenset(method.half)))):
            for way, side in (("up", seen.up), ("down", seen.down)):
                payloads = [narrowed(p, known[kind], forms) for kind, p in side.payloads]
                size = sum(map(len, payloads)) / 1e3
                for codec in codecs():
                    ratio, code, decode = measure(codec, payloads)
                    link = 8e-6 * (1 - ratio) / (1 / code + 1 / decode)
                    pays = f"{link:.0f} Mbit/s" if ratio < 1 else "never"
                    print(
                        f"| {name} | {form} | {way} | {size:,.0f} | {codec.name} | {ratio:.3f} "
                        f"| {code / 1e6:.0f} | {decode / 1e6:.0f} | {pays} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
