"""Changes values inside an encoded input: what changing bytes alone would hardly hit upon."""

import contextlib
import json
import struct

import msgpack

from fuzz.harness import CUT

# What a parser may not expect: of another type, too long, too large, nearly right.
ODD = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "x" * 200, "\0", "\u202e", "\ud800", "../..", "0" * 64,
    "F32", "nan", [], [0], [[]] * 20, list(range(300)), {}, {"": 0}, {"a": {"b": [1]}},
)  # fmt: skip
BYTES = (b"", b"x", bytes(16), bytes(32), bytes(64), b"\xff" * 33, bytes(1216))


def mutate(form, data, dice):
    """Return an input with one value changed in its first piece; None if it is not of the form."""
    first, cut, rest = data.partition(CUT)
    with contextlib.suppress(Exception):  # damaged by an earlier change, or no longer encodable
        tree, encode = dice.choice(list(TREES[form](first)))
        return encode(changed(tree, dice)) + cut + rest
    return None


def each_replaced(form, data):
    """Yield an input for each value in its first piece and each odd one that takes its place.

    Of a list's items, two stand for all. Nothing comes of an input that is not of the form.
    """
    first, cut, rest = data.partition(CUT)
    trees = []
    with contextlib.suppress(Exception):  # as in `mutate`
        trees = list(TREES[form](first))
    seen = set()  # two encodings of a tree are often the same
    for tree, encode in trees:
        for path in _paths(tree):
            for odd in (*ODD, *BYTES):
                with contextlib.suppress(OverflowError, TypeError, ValueError):  # not in this form
                    made = encode(_replaced(tree, path, odd))
                    if hash(made) not in seen:
                        seen.add(hash(made))
                        yield made + cut + rest


def _paths(tree, path=()):
    yield path
    items = len(tree) if isinstance(tree, list) else 0
    for key in tree if isinstance(tree, dict) else range(min(items, 2)):
        yield from _paths(tree[key], (*path, key))


def _replaced(tree, path, value):
    if not path:
        return value
    made = tree.copy()
    made[path[0]] = _replaced(tree[path[0]], path[1:], value)
    return made


def changed(tree, dice):
    """Return a tree with one node replaced, removed, doubled or renamed."""
    if isinstance(tree, dict) and tree and dice.random() < 0.8:
        made = dict(tree)
        key = dice.choice(list(made))
        match dice.randrange(6):
            case 0:
                del made[key]
            case 1:
                made[dice.choice(("x", key + "x", ""))] = made.pop(key)
            case _:
                made[key] = changed(made[key], dice)
        return made
    if isinstance(tree, list) and tree and dice.random() < 0.8:
        made = list(tree)
        at = dice.randrange(len(made))
        match dice.randrange(4):
            case 0:
                del made[at]
            case 1:
                made += made[at : at + 1] * dice.choice((1, 2, 100))
            case _:
                made[at] = changed(made[at], dice)
        return made
    return near(tree, dice)


def near(value, dice):
    """Return something like a value, or something odd."""
    if dice.random() < 0.5:
        return dice.choice((*ODD, *BYTES) if isinstance(value, bytes) else ODD)
    match value:
        case bool():
            return not value
        case int():
            return value + dice.choice((-1, 1, 2**31, -value - 1, value))
        case str() | bytes():
            at = dice.randrange(len(value) + 1)
            return dice.choice((value[:at], value[at:], value + value, value[:at] + value))
        case _:
            return value


def _msgpack(data):
    tree = msgpack.unpackb(data, raw=False, strict_map_key=False)
    yield tree, _packed
    for key in ("core", "body"):  # a map within the map
        with contextlib.suppress(Exception):  # none, or a damaged one
            inner = msgpack.unpackb(tree[key], raw=False, strict_map_key=False)
            yield inner, lambda made, key=key: _packed({**tree, key: _packed(made)})


def _packed(tree):
    return msgpack.packb(tree, unicode_errors="surrogatepass")


def _json(data):
    tree = json.loads(data)
    yield tree, lambda made: json.dumps(made).encode()
    yield tree, lambda made: json.dumps(made, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _safetensors(data):
    (size,) = struct.unpack_from("<Q", data)
    tree, tensors = json.loads(data[8 : 8 + size]), data[8 + size :]

    def encode(made):
        head = json.dumps(made).encode()
        head += b" " * (-len(head) % 8)
        return struct.pack("<Q", len(head)) + head + tensors

    yield tree, encode
    meta = tree.get("__metadata__", {})
    if "fcil" in meta:
        for inner, text in _json(meta["fcil"]):

            def whole(made, text=text):
                told = text(made).decode("utf-8", "surrogatepass")
                return encode({**tree, "__metadata__": {**meta, "fcil": told}})

            yield inner, whole


# form -> the trees of an input, each with what makes an input of it again
TREES = {"msgpack": _msgpack, "json": _json, "safetensors": _safetensors}
