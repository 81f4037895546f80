"""What people and local programs give: configuration, commands, worker messages, images."""

import asyncio
import contextlib
import io
import json
import os
import random
import socket
import tarfile
import warnings
import zipfile

import numpy as np
from PIL import Image

from fcil_adapters.contract import Preprocessing, registry
from fcil_adapters.images import decoding as images
from fcil_adapters.images import image_source
from fcil_adapters.images.cifar_source import CIFAR_100, CifarSource
from fcil_adapters.images.list_source import JsonListSource, ListSource
from fcil_adapters.images.shard_source import ShardSource
from fcil_adapters.images.sources import ZipSource
from fcil_adapters.worker.pipe import Pipe, _encode
from fcil_protocol.errors import ConfigError, FcilError, UsageError
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.process import control_socket
from fcil_protocol.process.overrides import apply_override
from fcil_server.federation import config
from fcil_server.reports.results.news import NewsPosition
from fuzz.disk_targets import file
from fuzz.harness import CUT, must, pieces, target
from fuzz.wire_targets import quick_registry

# --- configuration --------------------------------------------------------------------------


def config_seeds():
    yield b""
    yield config.to_toml(config.Config(), comments=True).encode()
    yield b'[tasks]\nschedule = "listed"\nclasses = [["a", "b"], ["K\xc3\xa4se"]]\n'
    yield b'[method]\nname = "pilora"\npreset = "short"\nlr_lora = 0.1\n[round]\nquorum = 2\n'


@target("config", config_seeds, max_words=100_000, max_bytes=32768)
def config_file(data):
    """It lists every fault, so its words may be as many as its keys."""
    found = config.load(file("federation.toml", data))
    must(config.parse(config.to_toml(found)) == found, "a configuration is read as it was written")
    with contextlib.suppress(ConfigError), quick_registry():
        registry.make_hparams(registry.load_method(found.method.name), found.method.options)
    return True


@target("override", lambda: [b"round.min_clients=3", b'tasks.classes=[["a"]]', b"method.name=x"])
def override(data):
    fields = {"round": {"quorum": 1}, "method": {"name": "pilora"}}
    apply_override(fields, data.decode("utf-8", "surrogateescape"))
    return True


@target("news_position", lambda: [b"1.2.r20260102-030405-abcd.3", b"0.0..-1"])
def news_position(data):
    """What a program names to resume a stream."""
    found = NewsPosition.parse(data.decode("utf-8", "surrogateescape"))
    must(NewsPosition.parse(found.text()) == found, "a position is read as it was written")
    return True


# --- commands -------------------------------------------------------------------------------


class Ear:
    """What the control socket writes its answer to."""

    def __init__(self, sock):
        self._sock = sock

    def get_extra_info(self, _name):
        return self._sock


async def reply(data, sock):
    reader = asyncio.StreamReader(limit=control_socket.MAX_LINE_BYTES)
    reader.feed_data(data)
    reader.feed_eof()

    async def handle(op, fields):
        if op != "status":
            raise UsageError(f"no command {op!r}.")
        return fields

    return await control_socket._reply(reader, Ear(sock), handle)


@target(
    "control", lambda: [b'{"op": "status"}\n', b'{"op": "enrol_local", "keys": {}}\n'], form="json"
)
def control_line(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answer = asyncio.run(reply(data, ours))
    must(answer.get("error") != "internal", "no request is a defect of the daemon")
    json.dumps(answer)
    return "data" in answer


@target("control_answer", lambda: [
    b'{"data": {"running": true}}\n',
    b'{"error": "locked", "message": "no.", "action": "do."}\n',
], form="json")  # fmt: skip
def control_answer(data):
    """What a command makes of a daemon's answer, which may be any error."""
    with contextlib.suppress(FcilError):
        must(isinstance(control_socket._answer(data), dict), "an answer has fields")
    return True


# --- the worker's pipe ----------------------------------------------------------------------


def pipe_seeds():
    for message in ({"op": "train", "x": [1, 2.5, None, "y"]}, {}):
        head, body, _ = _encode(message, ())
        yield head + body
    payload = Payload({"mean": np.ones((2, 2), np.float32)})
    head, body, fd = _encode({"op": "train"}, (payload, b"raw"))
    yield head + body + CUT + os.pread(fd, 1 << 20, 0)
    os.close(fd)


@target("worker_pipe", pipe_seeds, expected=(EOFError,), base_mb=20)
def worker_pipe(data):
    """A message, and with it a file if there is a second piece."""
    message, payload = pieces(data, 2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = []
        if CUT in data:
            fds = [os.memfd_create("fuzz")]
            os.write(fds[0], payload)
        if message:
            socket.send_fds(theirs, [message[:4]], fds)
            theirs.sendall(message[4:])
        for fd in fds:
            os.close(fd)
        theirs.shutdown(socket.SHUT_WR)
        fields, blobs = Pipe(ours).recv()
    must(isinstance(fields, dict), "fields have names")
    must(b"".join(blobs) == (payload if blobs else b""), "payloads are the file")
    return True


# --- images ---------------------------------------------------------------------------------

SMALL = 1 << 20  # bytes and pixels, in place of what a real device could hold
image_source.MAX_FILE_BYTES = SMALL
images.MAX_FILE_BYTES = SMALL
images.MAX_PIXELS = SMALL
Image.MAX_IMAGE_PIXELS = SMALL
PREPROCESSING = Preprocessing(32, (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0)


def picture(form, mode="RGB", **options):
    noise = random.Random(0).randbytes(16 * 16 * 4)  # noqa: S311  any picture will do
    made = Image.frombytes("RGBA", (16, 16), noise).convert(mode)
    out = io.BytesIO()
    made.save(out, form, **options)
    return out.getvalue()


def image_seeds():
    yield from (picture(form) for form in ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM"))
    yield picture("GIF", "P")
    yield picture("PNG", "RGBA")
    yield picture("TIFF", "F")
    exif = Image.Exif()
    exif[0x0112] = 6
    yield picture("JPEG", exif=exif)


@target("image", image_seeds, base_mb=60, max_bytes=16384)
def image(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = images.decode(data)
        array = images.preprocess(found, PREPROCESSING)
    must(array.shape == (32, 32, 3), "every picture becomes what the backbone takes")
    return True


def zip_seeds():
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as made:
            for name in ("cat/1.png", "dog/2.png", "dog/deep/3.png", "x.txt", "../out.png"):
                made.writestr(name, picture("PNG"))
        yield out.getvalue()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name in ("all/train/a/1.png", "all/test/a/2.png"):
            made.writestr(name, b"x")
    yield out.getvalue()


def checked(source):
    """Read some images of a source as a scan does; True if it has any."""
    try:
        entries = source.listing().entries
        for entry in entries[:10]:
            must(".." not in entry.name.split("/"), "nothing lies outside")
            must("/" not in entry.class_name, "a class can be a folder")
            must(source.unchanged(entry), "it is as it was listed")
            with contextlib.suppress(images.DataError):
                must(len(source.read(entry)) <= SMALL, "no image is larger than allowed")
    finally:
        source.close()
    return True


@target("zip", zip_seeds, base_mb=30, max_bytes=16384)
def image_zip(data):
    return checked(ZipSource(file("images.zip", data)))


def shard_seeds():
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as made:
            for name, content in (
                (f"{'deep/' * 30}a.png", picture("PNG")),
                (f"{'deep/' * 30}a.cls", b"cat"),
                ("b.jpg", picture("JPEG")),
                ("b.json", b'{"label": 3}'),
                ("../c.png", b"x"),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
        yield out.getvalue()


@target("shards", shard_seeds, max_bytes=32768)
def image_shards(data):
    return checked(ShardSource(file("images.tar", data)))


def cifar_seeds():
    for size in (1, 3):
        yield CUT.join((b"\x00\x01" + bytes(range(256)) * 12, b"cat dog")) * size
    yield CUT.join((b"\x00\x07" + bytes(3072) + b"\x00", b"cat\n"))


@target("cifar", cifar_seeds, max_bytes=16384)
def image_records(data):
    records, names = pieces(data, 2)
    folder = file("test.bin", records).parent
    file("train.bin", records)
    file("fine_label_names.txt", names)
    return checked(CifarSource(folder, CIFAR_100))


def list_seeds():
    yield b"path,label\nimages.png,cat\n"
    yield "\ufeffpath,label,split\r\nimages.png,K\u00e4fer,train\r\n../x.png,cat,test\r\n".encode()
    yield b'label,path,note\n"a ""b""",images.png,"x\ny"\n'


@target("list", list_seeds, max_bytes=4096)
def image_list(data):
    file("images.png", picture("PNG"))
    return checked(ListSource(file("images.csv", data)))


def json_list_seeds():
    yield b'{"file_name": "images.png", "label": "cat"}\n'
    yield '\ufeff{"path": "images.png", "label": 7, "split": "test"}\r\n\n{"path": 1, "label": null}'.encode()


@target("json-list", json_list_seeds, max_bytes=4096)
def json_image_list(data):
    file("images.png", picture("PNG"))
    return checked(JsonListSource(file("images.jsonl", data)))
