"""PyTorch: how gradients lie in what ranks send."""

import pytest

pytestmark = pytest.mark.backends("torch")
torch = pytest.importorskip("torch", reason="about PyTorch, which is not installed")


@pytest.mark.parametrize(("weight", "expected"), [(1.0, [1.0, 2.0]), (0.5, [0.5, 1.0])])
def test_a_gradient_counts_with_the_weight_of_its_rank(weight, expected):
    from keras_shardopt.backends.torch.flat_bucket import laid_out

    (bucket,) = laid_out([torch.zeros(2)], 8, "mean", 2, None, 0)
    bucket.put(0, torch.tensor([2.0, 4.0]), weight)
    assert bucket.flat.tolist() == expected  # of two ranks, half
