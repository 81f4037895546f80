"""From where `scripts/venv` takes torch: the machine and pip's configuration decide."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = (Path(__file__).resolve().parents[2] / "scripts" / "venv").read_text(encoding="utf-8")
CPU = "https://download.pytorch.org/whl/cpu"
NOTHING = ""


def chosen(
    *, pip: str | None = "", system: str = "Linux", smi: bool = False, env: str = "unset X"
) -> str:
    """Run the script's own function on a machine that is described; ``pip`` None: with real pip."""
    [real] = re.findall(r"^pip\(\) \{.*\}\n", SCRIPT, re.MULTILINE)
    stub = f"""pip() {{ printf '%s\\n' "{pip}"; }}\n"""
    said = real.replace(".venv/bin/python", sys.executable) if pip is None else stub
    [function] = re.findall(r"^torch_index\(\) \{\n.*?^\}\n", SCRIPT, re.MULTILINE | re.DOTALL)
    described = f"""
set -euo pipefail
unset FCIL_TORCH_INDEX
{env}
{said}
uname() {{ echo {system}; }}
compgen() {{ return 1; }}
command() {{ {"true" if smi else "false"}; }}
"""
    code = described + function.replace("/dev/nvidia0", "/dev/no-such-device") + "torch_index\n"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_linux_without_a_gpu_gets_the_build_for_processors():
    assert chosen() == CPU
    assert chosen(pip="global.cert='/etc/ssl/certs'") == CPU


@pytest.mark.parametrize(
    "line",
    [":env:.find-links='/wheels'", "global.index-url='u'", "global.extra-index-url='u'",
     "install.no-index='true'"],
)  # fmt: skip
def test_where_pip_is_told_an_index_that_decides(line):
    assert chosen(pip=line) == NOTHING


def test_real_pip_says_what_it_was_told():
    """Its configuration is read although what it installs is not listed."""
    assert chosen(pip=None, env="export PIP_FIND_LINKS=wheels") == NOTHING


def test_a_gpu_or_another_system_gets_what_pip_gets():
    assert chosen(smi=True) == NOTHING
    assert chosen(system="Darwin") == NOTHING


def test_a_word_of_the_user_comes_first():
    assert chosen(env="export FCIL_TORCH_INDEX=https://example.org", smi=True) == (
        "https://example.org"
    )
    assert chosen(env="export FCIL_TORCH_INDEX=") == NOTHING
