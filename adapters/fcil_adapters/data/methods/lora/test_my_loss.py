"""The method in one process: a server and its clients as plain calls."""

import numpy as np
import torch
from fcil_adapters.testing import ToyFederation, make_tasks, toy_backbone, toy_images

from my_loss import METHOD
from my_loss.learner import entropy

CLIENTS = [
    toy_images({0: 12, 1: 5, 2: 9, 3: 4}, seed=1),
    toy_images({0: 4, 2: 6, 3: 12}, seed=2),
]
FAST = {
    "blocks": (0, 1),  # the toy backbone has two
    "epochs": 3,
    "batch_size": 8,
    "lr_lora": 0.01,
    "lr_head": 0.3,
    "augment": "none",
}


def learn(**options):
    options = METHOD.hparams(**FAST, **options)
    return learned(ToyFederation(METHOD, options, toy_backbone(), CLIENTS))


def learned(federation):
    for task in make_tasks([1, 0], [2, 3]):
        federation.run(task, rounds=2)
    return federation


def test_it_tells_the_classes_of_a_task_apart():
    test = toy_images({2: 20, 3: 20}, seed=3)
    predictor = learn().predictor()
    columns = [predictor.classes.index(c) for c in (2, 3)]
    best = predictor.logits(test.pictures)[:, columns].argmax(axis=1)
    assert (np.array([2, 3])[best] == test.labels).mean() > 0.9


def test_without_the_penalty_it_is_fedavg_lora():
    plain = learned(ToyFederation.of("fedavg_lora", CLIENTS, **FAST)).state
    state = learn(strength=0.0).state
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(state.tensors[name], tensor, err_msg=name)


def test_the_entropy_is_largest_where_all_classes_are_alike():
    alike, sure = torch.zeros(1, 4), torch.tensor([[9.0, 0, 0, 0]])
    torch.testing.assert_close(entropy(alike), torch.tensor(4.0).log())
    assert entropy(sure) < entropy(alike)


def test_a_class_that_is_no_column_changes_nothing():
    logits = torch.tensor([[1.0, 2.0]], requires_grad=True)
    barred = torch.cat([logits, torch.full((1, 1), -torch.inf)], 1)
    torch.testing.assert_close(entropy(barred), entropy(logits))
    entropy(barred).backward()
    assert logits.grad.isfinite().all()
