"""FedAvg-LoRA, FedCLM, CCVR and LoRM on scanned digits, in one process over the embedded backbone."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from adapters.kit import Federation, Images, make_tasks
from digits import load_digits
from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.worker.evaluation import evaluate

pytestmark = pytest.mark.full

TASKS = make_tasks([0, 1], [2, 3], [4, 5])
OLD = (0, 1, 2, 3)
CLIENTS = 3


def scanned() -> tuple[list[Images], Images]:
    """Three clients' images, unevenly split, and images for testing; 20 and 15 of each digit."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    owner: list[list[int]] = [[] for _ in range(CLIENTS)]
    test: list[int] = []
    for c in range(6):
        index = rng.permutation(np.flatnonzero(digits.target == c))
        test += index[20:35].tolist()
        for k in range(20):
            owner[int(rng.choice(CLIENTS, p=np.roll([0.7, 0.2, 0.1], c)))].append(int(index[k]))

    def images(chosen: list[int]) -> Images:
        pictures = [
            Image.fromarray((digits.images[i] * (255 / 16)).round().astype(np.uint8))
            .resize((32, 32), Image.Resampling.BICUBIC).convert("RGB")
            for i in chosen
        ]  # fmt: skip
        return Images(np.stack(pictures), digits.target[chosen].astype(np.int64))

    return [images(own) for own in owner], images(test)


def test_what_is_done_at_a_tasks_end_keeps_old_digits_that_the_plain_average_loses():
    clients, test = scanned()
    backbone = load_backbone()
    right = {}
    for name in ("fedavg_lora", "fedclm", "ccvr"):
        fed = Federation.of(name, clients, backbone, preset="short", augment="jitter")
        for task in TASKS:
            fed.run(task, rounds=2)
        _, correct, total = evaluate(fed.predictor(), test.of(OLD))
        right[name] = correct.sum() / total.sum()
    assert right["fedclm"] > right["fedavg_lora"] + 0.3
    assert right["ccvr"] > right["fedavg_lora"] + 0.3


@pytest.mark.parametrize("rounds", [4, 8])
def test_factors_in_turns_learn_six_digits_in_one_task(rounds):
    """Measured: 83 % after four rounds, 87 % after eight, `fedavg_lora` 71 and 80; chance is 17."""
    clients, test = scanned()
    options = {"preset": "short", "augment": "jitter"}
    fed = Federation.of("lorm", clients, load_backbone(), **options)
    fed.run(make_tasks(range(6))[0], rounds=rounds)
    _, correct, total = evaluate(fed.predictor(), test)
    assert correct.sum() / total.sum() > 0.75
