"""First in PYTHONPATH, this makes every Python process one in which torch cannot be imported.

Each process notes itself in the file that the environment names, and each refusal.
"""

import os
import sys

REFUSED = ("torch", "timm", "torchvision", "functorch")


def _note(text):
    with open(os.environ["FCIL_TEST_REFUSALS"], "a") as file:
        file.write(text + "\n")


class _Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            _note(f"refused {name}")
            raise ModuleNotFoundError(f"refused: {name}", name=name)


sys.meta_path.insert(0, _Refuse())
_note(f"started {' '.join(sys.orig_argv[1:])}")
