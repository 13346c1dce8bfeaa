"""PyTorch: the samplers of a `DataLoader` learn the number of each epoch of `fit`."""

import keras
import numpy as np
import pytest

import keras_shardopt as ks
from keras_shardopt.data.part import Part
from keras_shardopt.data.torch_loader import part_of_loader

torch = pytest.importorskip("torch")
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset  # noqa: E402

pytestmark = pytest.mark.backends("torch")

ROWS = TensorDataset(torch.arange(12.0)[:, None], torch.ones(12, 1))


def sampler_of_rank_0():
    return DistributedSampler(ROWS, num_replicas=2, rank=0)


class Around:
    """A batch sampler that knows how to hand the epoch on."""

    def __init__(self):
        self._inside = sampler_of_rank_0()
        self.set_epoch = self._inside.set_epoch

    def __iter__(self):
        return iter(BatchSampler(self._inside, 3, False))

    def __len__(self):
        return 2


LOADERS = {
    "sampler": lambda: DataLoader(ROWS, 3, sampler=sampler_of_rank_0()),
    "sampler in a batch sampler": lambda: DataLoader(ROWS, batch_sampler=BatchSampler(sampler_of_rank_0(), 3, False)),
    "batch sampler": lambda: DataLoader(ROWS, batch_sampler=Around()),
    # The dataset makes the batches itself, from lists of indices.
    "batch sampler as the sampler": lambda: DataLoader(
        ROWS, batch_size=None, sampler=BatchSampler(sampler_of_rank_0(), 3, False)
    ),
}


class Rows(keras.layers.Layer):
    """Notes the rows that it is trained on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x, training=False):
        if training:
            self.seen += x.flatten().tolist()
        return x


def fitted(loader, is_prepared=True, **arguments):
    """The rows of each epoch."""
    rows = Rows()
    model = keras.Sequential([keras.Input((1,)), rows, keras.layers.Dense(1)])
    model.compile(ks.CrossShard("sgd"), "mse")
    if is_prepared:
        ks.prepare(model)
    model.fit(loader, verbose=0, shuffle=False, **arguments)
    return np.reshape(rows.seen, (-1, 6)).tolist()


def expected(epochs):
    sampler, found = sampler_of_rank_0(), []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found.append([float(row) for row in sampler])
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_each_epoch_has_the_order_of_its_number(kind):
    loader = LOADERS[kind]()
    assert fitted(loader, epochs=3) == expected(range(3))
    assert fitted(loader, epochs=5, initial_epoch=3) == expected([3, 4])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_steps_per_epoch_begin_the_next_pass_within_the_epoch_before(num_workers):
    loader = DataLoader(ROWS, 3, sampler=sampler_of_rank_0(), num_workers=num_workers)
    assert fitted(loader, epochs=3, steps_per_epoch=2) == expected(range(3))


def test_a_restart_goes_on_with_the_number_of_the_epoch(tmp_path):
    def stop(epoch, logs):
        raise KeyboardInterrupt

    backup = lambda: ks.callbacks.BackupAndRestore(tmp_path)  # noqa: E731
    stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    with pytest.raises(KeyboardInterrupt):
        fitted(LOADERS["sampler"](), epochs=4, callbacks=[backup(), stopping])
    assert fitted(LOADERS["sampler"](), epochs=4, callbacks=[backup()]) == expected([1, 2, 3])


def test_a_sampler_that_shard_data_divides_learns_it_too():
    class Shuffling(Sampler):
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __iter__(self):
            return iter(range(12))

        def __len__(self):
            return 12

    sampler = Shuffling()
    fitted(part_of_loader(DataLoader(ROWS, 3, sampler=sampler), False, 0, Part(2, 0)), epochs=3)
    assert sampler.epochs == [0, 1, 2]


def test_other_models_are_left_alone():
    loader = LOADERS["sampler"]()
    assert fitted(loader, is_prepared=False, epochs=2) == expected([0, 0])
