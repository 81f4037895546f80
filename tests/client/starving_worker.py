"""The client's worker on a machine whose memory holds few images; ``python -m starving_worker``.

``MOST``: images in one pass through the backbone; at more the process ends as the kernel would
end it. ``SIGHT``: a file that gets a line for every pass.
"""

import os
import signal
from pathlib import Path

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.worker import loop as worker_ops
from fcil_client.rounds.worker import ClientWorker

_normalise = Backbone.normalise


def normalise(self, images):
    with Path(os.environ["SIGHT"]).open("a") as sight:
        sight.write(f"{len(images)}\n")
    if len(images) > int(os.environ["MOST"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return _normalise(self, images)


if __name__ == "__main__":
    Backbone.normalise = normalise
    worker_ops.main(ClientWorker().operations())
