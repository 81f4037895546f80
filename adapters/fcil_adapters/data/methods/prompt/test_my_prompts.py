"""The method in one process: a server and its clients as plain calls."""

import numpy as np
import torch
from fcil_adapters.testing import ToyFederation, make_tasks, toy_backbone, toy_images

from my_prompts import METHOD
from my_prompts.learner import entropy

CLIENTS = [toy_images(dict.fromkeys(range(4), 12), seed) for seed in (1, 2)]
FAST = {
    "blocks": (0, 1),  # the toy backbone has two
    "pool_size": 3,
    "prompt_length": 4,
    "epochs": 4,
    "batch_size": 8,
    "lr": 0.05,
    "pixels": "normalised",
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
    assert (np.array([2, 3])[best] == test.labels).mean() > 0.8


def test_without_the_penalty_it_is_fedavg_prompt():
    plain = learned(ToyFederation.of("fedavg_prompt", CLIENTS, **FAST)).state
    state = learn(strength=0.0).state
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(state.tensors[name], tensor, err_msg=name)


def test_the_entropy_is_largest_where_all_classes_are_alike():
    alike, sure = torch.zeros(1, 4), torch.tensor([[9.0, 0, 0, 0]])
    torch.testing.assert_close(entropy(alike), torch.tensor(4.0).log())
    assert entropy(sure) < entropy(alike)
