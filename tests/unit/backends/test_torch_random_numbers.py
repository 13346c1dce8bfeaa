"""PyTorch: which numbers a rank draws, before and after a restart."""

import keras
import pytest

torch = pytest.importorskip("torch")
from keras_shardopt.backends.torch import random_numbers  # noqa: E402

pytestmark = pytest.mark.backends("torch")


class SecondRank:
    replica_id = 1


def test_a_rank_that_takes_over_the_state_of_rank_0_draws_other_numbers(monkeypatch):
    for name in ("_ranks", "_seeded_with"):
        monkeypatch.setattr(random_numbers, name, None)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        of_rank_0 = random_numbers.rng_state()
        random_numbers.seed_per_rank(SecondRank, [])
        own, seed = random_numbers.rng_state(), torch.initial_seed()
        assert seed != 3
        random_numbers.set_rng_state(own)
        random_numbers.seed_per_rank(SecondRank, [])
        assert random_numbers.rng_state() == own
        random_numbers.set_rng_state(of_rank_0, is_own=False)
        random_numbers.seed_per_rank(SecondRank, [])
        assert torch.initial_seed() == seed


@pytest.mark.parametrize(("seed", "is_equal"), [(lambda: 5, True), (lambda: keras.random.SeedGenerator(5), False)])
def test_a_seed_that_is_a_number_gives_all_replicas_the_same_numbers(seed, is_equal):
    found = []
    with random_numbers.as_parts() as begin:
        for part in range(2):
            begin(part, [0])
            draw = random_numbers.in_step(lambda: keras.random.uniform((3,), seed=seed()).tolist())
            found.append(draw())
    assert (found[0] == found[1]) == is_equal
