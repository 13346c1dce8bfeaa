"""PyTorch: how gradients lie in what ranks send."""

import pytest

pytestmark = pytest.mark.backends("torch")
torch = pytest.importorskip("torch", reason="about PyTorch, which is not installed")


def test_a_gradient_counts_with_the_weight_of_its_rank():
    from keras_shardopt.backends.torch.flat_bucket import flat_buckets

    (bucket,) = flat_buckets([torch.zeros(2)], 8, "mean", 2, None, 0)
    for weight, expected in ((1.0, [1.0, 2.0]), (0.5, [0.5, 1.0])):
        bucket.put(0, torch.tensor([2.0, 4.0]), weight)
        assert bucket.flat.tolist() == expected  # of two ranks, half


def test_so_it_does_where_state_is_divided():
    from keras_shardopt.backends.torch.sliced_bucket import MemoryPool, SlicedBucket

    pieces, shapes = [[(0, 0, 1)], [(0, 1, 2)]], {0: (1,)}
    bucket = SlicedBucket(MemoryPool(), 0, torch.zeros(2), [0], pieces, shapes, "mean", 0, None, 0, False)
    bucket.open()
    for weight, expected in ((1.0, [2.0, 4.0]), (0.5, [1.0, 2.0])):
        bucket.put(0, torch.tensor([2.0, 4.0]), weight)
        assert bucket._flat.tolist() == expected  # the sum is divided
