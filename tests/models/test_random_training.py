"""Networks made at random train as the plain loop does, whole, cut or refused; see ``support.random_training``."""

from collections import Counter

import pytest

from support.random_training import outcome_of

EACH, NETWORKS = 20, 200


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, NETWORKS, EACH))
def test_networks_at_random_learn_what_they_learn_in_a_plain_loop_or_are_refused(first):
    outcomes = Counter(outcome_of(seed)[0].partition(",")[0] for seed in range(first, first + EACH))
    assert outcomes["cut"] >= EACH // 2, outcomes
    assert outcomes["cut"] + outcomes["all at the trainer"] + outcomes["refused: FrozenInTrainMode"] == EACH, outcomes
