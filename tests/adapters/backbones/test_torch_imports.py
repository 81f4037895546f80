"""Workers that do not train never load torch's compiler; whoever compiles has it whole."""

import subprocess
import sys

import pytest


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.full
def test_features_are_computed_without_it():
    code = """
import numpy as np
import pytest

from fcil_adapters.backbones.backbone import load_backbone
load_backbone().features(np.zeros((4, 32, 32, 3), np.uint8))
print("torch._dynamo.eval_frame" in sys.modules, "torch._dynamo.utils" in sys.modules)
import torch
from torchvision.ops import roi_align
x = torch.ones(1, 1, 8, 8)
print(torch.compile(lambda x: 2 * x, backend="eager")(x).sum().item())
from torch._dynamo.utils import counters, is_compile_supported
print(is_compile_supported("cpu"), type(sys.modules["torch._dynamo.utils"]).__name__)
"""
    assert run(code) == ["False", "False", "128.0", "True", "module"]


@pytest.mark.full
def test_whoever_needs_it_meanwhile_gets_the_real_one():
    code = """
from fcil_adapters.backbones.torch_imports import without_compiler
import torch
real = torch.compiler.disable
with without_compiler():
    marked = torch.compiler.disable(lambda x: x + 1)
    half = torch.compiler.disable(recursive=False)(lambda x: x + 2)
    print("torch._dynamo" in sys.modules)
    print(marked(1), half(1), "torch._dynamo.eval_frame" in sys.modules)
    from torch._dynamo.utils import counters
    print(type(sys.modules["torch._dynamo.utils"]).__name__)
print(torch.compiler.disable is real)
with without_compiler():
    print(torch.compiler.disable is real)
"""
    assert run(code) == ["False", "2", "3", "True", "module", "True", "True"]


@pytest.mark.full
def test_a_torch_that_marks_in_another_way_is_left_alone():
    code = """
from fcil_adapters.backbones.torch_imports import without_compiler
import torch
del torch._disable_dynamo
real = torch.compiler.disable
with without_compiler():
    print(torch.compiler.disable is real, "torch._dynamo.utils" in sys.modules)
"""
    assert run(code) == ["True", "False"]


TRAINING = """
from fcil_adapters.backbones.backbone import load_backbone
load_backbone()
import torch

def steps():
    weight = torch.nn.Parameter(torch.ones(3))
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        optimiser = kind([weight], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1)
        for _ in range(3):
            optimiser.zero_grad()
            (weight ** 2).sum().backward()
            optimiser.step()
            schedule.step()
    return weight.tolist()
"""


@pytest.mark.full
def test_a_training_does_without_it_and_gives_the_same_numbers():
    code = """
first = steps()
print("torch._dynamo.eval_frame" in sys.modules)
import torch._dynamo.eval_frame
print("torch._dynamo.eval_frame" in sys.modules, steps() == first)
"""
    assert run(TRAINING + code) == ["False", "True", "True"]


@pytest.mark.full
@pytest.mark.parametrize(
    "code",
    [
        "from torch._dynamo.utils import counters",
        "import torch._dynamo.config as config; config.cache_size_limit",
        "import torch._dynamo; torch._dynamo.reset()",
        "import torch._dynamo.exc",
        "import importlib.util; assert importlib.util.find_spec('torch._dynamo')",
        "torch.compiler.reset()",
        "torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(2))",
        "torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))",
    ],
)
def test_whoever_compiles_after_a_training_gets_the_real_one(code):
    once = """
import torch._dynamo.symbolic_convert as user
assert user.exc is sys.modules["torch._dynamo.exc"]
assert torch._dynamo.eval_frame.config is sys.modules["torch._dynamo.config"]
import importlib.util
assert importlib.util.find_spec("torch._dynamo") is not None
assert torch._dynamo.exc.__spec__.loader is not None
"""
    code += once
    names = 'print(type(sys.modules["torch._dynamo"]).__name__, type(torch._dynamo).__name__)'
    assert run(f"{TRAINING}\nsteps()\n{code}\nsteps()\n{names}") == ["module", "module"]
