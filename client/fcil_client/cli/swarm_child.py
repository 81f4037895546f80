"""``python -m fcil_client.cli.swarm_child WORDS...``: a swarm that ends with its parent process.

Standard input is the cord: the line ``stop`` asks for an orderly end, its end without one means
that the starter is gone, and then so is the swarm, as after a kill (which loses nothing).
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from fcil_client.swarm.groups import STOP

GONE = 143  # exit code: as if SIGTERM had ended it


def _hold() -> None:
    # The bare descriptor: Python would wait at its end for a reader that holds sys.stdin.
    while said := os.read(0, len(STOP)):
        if said == STOP:
            os.kill(os.getpid(), signal.SIGINT)
    os._exit(GONE)


def main() -> None:
    """Run ``fcil-client swarm`` with the words of the command line."""
    from fcil_client.cli.main import main as run

    # Ray's processes block Ctrl-C's signal, and their children with them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_hold, name="cord", daemon=True).start()
    sys.argv[1:1] = ["swarm"]
    run()


if __name__ == "__main__":
    main()
