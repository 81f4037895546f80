"""The analytic method as processes: the same classifier, whoever holds which image, and when."""

import numpy as np
import pytest

from fcil_server.lab.local.federation import LocalFederation
from system.analytic_kit import TOLERANCE, learn
from system.kit import write_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.full
def test_any_split_any_order_and_a_late_client_give_the_classifier_of_one_machine(tmp_path):
    first = [write_client(tmp_path / "a", range(4), per_class=20),
             write_client(tmp_path / "b", range(4), per_class=10, offset=20)]  # fmt: skip
    second = [write_client(tmp_path / "c", (0, 1, 2), per_class=30),
              write_client(tmp_path / "d", (3,), per_class=10),
              write_client(tmp_path / "e", (3,), per_class=20, offset=10)]  # fmt: skip
    with LocalFederation(tmp_path) as federation:
        results = [
            learn(federation, first, [["0", "1"], ["2", "3"]]),
            learn(federation, second, [["3", "0"], ["1"], ["2"]], "--new-run", late="e"),
        ]
    for weight, expected, accuracy in results:
        apart = np.linalg.norm(weight - expected) / np.linalg.norm(expected)
        assert apart < TOLERANCE
        assert accuracy > 60
