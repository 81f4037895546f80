"""TensorBoard's event files, read by their format: length, its check sum, event, its check sum."""

import struct
from pathlib import Path


def events(folder: Path):
    """Return (tag, step) -> (value, wall time) of all event files, read by their format."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag, event.step] = (value.simple_value, event.wall_time)
    return found
