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


def test_what_was_in_the_memory_before_is_not_sent(monkeypatch):
    from keras_shardopt.backends.torch import sliced_bucket

    pool, sent = sliced_bucket.MemoryPool(), []
    pool.take(("sent", 0), 4, torch.zeros(0)).fill_(torch.nan)
    # Each rank has one element of gradient 0. Rank 0 also has the element of gradient 1, which is None. So the last
    # element of rank 1's part is unused.
    pieces, shapes = [[(0, 0, 1), (1, 0, 1)], [(0, 1, 2)]], {0: (1,), 1: (1,)}
    bucket = sliced_bucket.SlicedBucket(pool, 0, torch.zeros(0), [0, 1], pieces, shapes, "sum", 0, None, 0, False)
    monkeypatch.setattr(sliced_bucket.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(sliced_bucket.dist, "all_to_all_single", lambda _, flat, async_op: sent.append(flat.tolist()))
    bucket.open()
    bucket.put(0, torch.tensor([2.0, 4.0]), 1.0)
    bucket.put(1, None, 1.0)
    bucket.send()
    assert sent == [[2.0, 0.0, 4.0, 0.0]]


def test_buckets_are_sent_and_received_in_the_same_order():
    import types

    from keras_shardopt.backends.torch.bucket import Bucket
    from keras_shardopt.backends.torch.bucket_queue import BucketQueue

    log = []

    class Logged(Bucket):
        def __init__(self, name, place, num_collectives=1):
            self.name, self.places, self.num_left = name, [place], num_collectives

        @property
        def has_more(self):
            return self.num_left > 0

        def open(self):
            log.append(f"open {self.name}")

        def put(self, i, grad, weight):
            assert [i] == self.places

        def send(self):
            log.append(f"send {self.name}")
            return types.SimpleNamespace(wait=lambda: None)

        def receive(self, adds):
            log.append(f"receive {self.name}")
            self.num_left -= 1

    queue = BucketQueue([Logged("a", 2, num_collectives=2), Logged("b", 1), Logged("c", 0)], None)
    queue.start()
    queue.put_early(2, None)
    queue.put_early(0, None)  # the last bucket waits for the flags
    assert log == ["open a", "open b", "send a"] and queue.is_partly_sent
    log.clear()
    queue.put_early(1, None)  # one bucket at a time is under way, and two have memory
    assert log == ["receive a", "send a", "open c", "send b"] and queue.unsent_places() == [0]
    log.clear()
    queue.complete()
    assert log == ["receive b", "send c", "receive c", "receive a"] and not queue.is_partly_sent
