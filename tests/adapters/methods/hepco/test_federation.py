"""HePCo as a whole, in small federations: does it learn, and does the server's repair help?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapters.hepco_reference import SMALL
from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import Backbone, backbone_digest
from fcil_adapters.methods.hepco import METHOD
from fcil_adapters.toolkit.prompts.prefix import query_features
from fcil_adapters.worker.evaluation import evaluate
from tiers import sampled

TASKS = make_tasks([3, 4], [7, 2], [5, 9])
CLASSES = (3, 4, 7, 2, 5, 9)
# Two clients that have all classes, in different shares.
CLIENTS = [
    toy_images(dict.fromkeys(CLASSES, 8), 1),
    toy_images({3: 8, 4: 3, 7: 3, 2: 8, 9: 4, 5: 4}, 2),
]
TEST = toy_images(dict.fromkeys(CLASSES, 10), 5)
LEARNS = {
    **SMALL, "epochs": 8, "batch_size": 8, "lr": 3e-2, "schedule": "constant", "noise": 8,
    "hidden": [16, 32], "server_batch_size": 16, "generator_steps": 30, "lr_generator": 3e-3,
    "distillation_steps": 20, "lr_distillation": 1e-3,
}  # fmt: skip
PAPER = {
    k: v for k, v in METHOD.presets["paper"].items() if k not in ("query", "pixels", "schedule")
}
VARIANTS = [
    {},
    {**PAPER, "average": "samples"},
    {"weights": "repo", "total_classes": 6, "query": "view"},
    {"distill": "head", "augment": "jitter"},
]


def accuracy(fed: Federation, classes) -> float:
    _, correct, total = evaluate(fed.predictor(), TEST.of(classes))
    return float(correct.sum() / total.sum())


def accuracy_within(fed: Federation, classes) -> float:
    """Share of right answers if the task is told."""
    images, predictor = TEST.of(classes), fed.predictor()
    columns = [predictor.classes.index(c) for c in classes]
    best = predictor.logits(images.pictures)[:, columns].argmax(1)
    return float((np.array(classes)[best] == images.labels).mean())


@pytest.mark.parametrize("options", sampled(VARIANTS, lambda o: not o), ids=lambda o: str(o)[:40])
def test_a_federation_of_three_tasks_learns_all_classes(options):
    """Each task nearly perfectly, and of all six classes twice what guessing gives."""
    fed = Federation.of("hepco", CLIENTS, **{**LEARNS, **options})
    for task in TASKS:
        fed.run(task, rounds=2)
    assert min(accuracy_within(fed, task.classes) for task in TASKS) > 0.8
    assert accuracy(fed, CLASSES) > 0.35
    assert backbone_digest(fed.backbone.module.state_dict()) == fed.backbone.info.digest


def test_a_federation_of_single_class_tasks_learns_the_first_and_the_next():
    clients = [toy_images({0: 6, 1: 6}, 1), toy_images({0: 3, 1: 4}, 2)]
    fed = Federation.of("hepco", clients, **SMALL)
    for task in make_tasks([0], [1]):
        fed.run(task)
    _, correct, total = evaluate(fed.predictor(), toy_images({0: 10, 1: 10}, 5))
    assert fed.predictor().classes == (0, 1)
    assert correct.sum() / total.sum() > 0.7


def spread_backbone() -> Backbone:
    """The toy transformer with features around zero, as large as before.

    Those of the plain one nearly all point in one direction (cosine of class means 0.95), which
    no backbone does on the kind of images that it was trained for, and HePCo cannot work on
    (hepco/NOTES.md).
    """
    backbone = toy_backbone()
    with torch.no_grad():
        mean = query_features(backbone, TEST.pictures).mean(0)
        backbone.module.norm.bias.sub_(mean).mul_(4)
        backbone.module.norm.weight.mul_(4)
    return backbone


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
@pytest.mark.full
def test_the_repair_helps_and_the_previous_server_is_what_holds_old_classes(seeds):
    """The paper's ablation in small: 76.5, without distillation 67.3, without the server 61.2."""
    backbone = spread_backbone()

    def mean_accuracy(**kw) -> float:
        found = []
        for seed in seeds:
            options = {**LEARNS, "lr_distillation": 4e-3, **kw}
            fed = Federation.of("hepco", CLIENTS, backbone, seed=seed, **options)
            for task in TASKS[:2]:
                fed.run(task, rounds=2)
            found.append(accuracy(fed, CLASSES[:4]))
        return float(np.mean(found))

    whole = mean_accuracy()
    assert whole > mean_accuracy(replay_ratio=0.0) + 0.05
    assert whole > mean_accuracy(distill="none") + 0.05
