"""`shard_data` on ranks that exist: all three, then the first two once more. Prints "passed" at the end."""

import gc
import os
import random
import warnings

import keras
import numpy as np
import torch
import torch.distributed as dist
from support import problem

import keras_shardopt as ks

warnings.filterwarnings("ignore")
NUM_ROWS = 23


class Shuffling(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.rows = np.arange(NUM_ROWS)

    def __len__(self):
        return -(-NUM_ROWS // 2)

    def __getitem__(self, index):
        return self.rows[2 * index : 2 * index + 2]

    def on_epoch_end(self):
        np.random.shuffle(self.rows)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(NUM_ROWS))


def kinds():
    rows = torch.arange(NUM_ROWS)
    data = torch.utils.data.TensorDataset(rows)
    shuffled = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 2, False)
    return {
        "arrays": ks.shard_data(np.arange(NUM_ROWS), batch_size=2),
        "arrays shuffled": ks.shard_data(np.arange(NUM_ROWS), batch_size=2, shuffle=True),
        "tensor shuffled": ks.shard_data(rows, shuffle=True).split(2),
        "PyDataset": ks.shard_data(Shuffling()),
        "PyDataset shuffled": ks.shard_data(Shuffling(), shuffle=True, seed=7),
        "DataLoader": ks.shard_data(torch.utils.data.DataLoader(data, 2)),
        "DataLoader shuffled": ks.shard_data(torch.utils.data.DataLoader(data, 2, shuffle=True)),
        "DataLoader of batches": ks.shard_data(torch.utils.data.DataLoader(data, batch_sampler=shuffled)),
        "stream": ks.shard_data(torch.utils.data.DataLoader(Stream(), 2)),
    }


def epoch_of(data):
    batches = data
    if isinstance(data, keras.utils.PyDataset):
        data.on_epoch_begin()
        batches = [data[i] for i in range(len(data))]
        data.on_epoch_end()
    return [np.asarray(b[0] if isinstance(b, (tuple, list)) else b).reshape(-1).tolist() for b in batches]


def everybodys(thing):
    things = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def each_row_once(scope):
    # Ranks do not agree on random numbers by themselves, and draw differently often.
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(scope.replica_id)
    for name, data in kinds().items():
        epochs = []
        for _ in range(2):
            epochs.append(everybodys(epoch_of(data)))
            rows = sorted(row for epoch in epochs[-1] for batch in epoch for row in batch)
            assert rows == list(range(NUM_ROWS)), (name, epochs[-1])
        new_order = ("shuffled" in name and "tensor" not in name) or name in ("PyDataset", "DataLoader of batches")
        assert (epochs[0] != epochs[1]) == new_order, (name, epochs)


def errors_on_every_rank(scope):
    wrong = {
        "same data and arguments": lambda: ks.shard_data(np.zeros(20 + scope.replica_id)),
        "same data and": lambda: ks.shard_data(np.zeros(20), shuffle=True, seed=scope.replica_id),
        "1 rows for": lambda: ks.shard_data(np.zeros(1)),
    }
    for words, call in wrong.items():
        try:
            call()
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")


def trains_as_one_process(scope):
    per_rank = problem.BATCH_SIZE // scope.num_replicas
    x, y = (array[: 4 * per_rank * scope.num_replicas] for array in problem.data())

    def trained(optimizer, *data, **arguments):
        model = problem.model()
        model.compile(optimizer, "mse")
        model.fit(*data, epochs=2, verbose=0, **arguments)
        return model

    with problem.alone():
        whole = {"batch_size": per_rank * scope.num_replicas, "shuffle": False}
        reference = trained(problem.sgd_momentum(), x, y, **whole).get_weights()
    both = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    loader = ks.shard_data(torch.utils.data.DataLoader(both, per_rank))
    for data, arguments in (
        (ks.shard_data(x, y), {"batch_size": per_rank, "shuffle": False}),
        ((ks.shard_data(x, y, batch_size=per_rank),), {"shuffle": False}),
        ((loader,), {"shuffle": False}),
    ):
        model = trained(ks.CrossShard(problem.sgd_momentum()), *data, **arguments)
        assert problem.relative_difference(model.get_weights(), reference) <= problem.TOLERANCE
        assert scope.largest_difference(model) == 0
        gc.collect()
        shape = (per_rank, *x.shape[1:])
        assert not [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape], (
            "the trained model keeps a batch"
        )


def main():
    rank = int(os.environ["RANK"])
    for num_ranks in (3, 2):
        if rank < num_ranks:
            os.environ["WORLD_SIZE"] = str(num_ranks)
            with ks.data_parallel() as scope:
                assert scope.num_processes == num_ranks
                each_row_once(scope)
                errors_on_every_rank(scope)
                trains_as_one_process(scope)
                dist.barrier()
            scope.close()
    if rank == 0:
        print("passed", flush=True)


if __name__ == "__main__":
    main()
