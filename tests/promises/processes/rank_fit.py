"""Trains the small problem on the ranks that torchrun started, once per case, and writes what came of it.

Arguments: the file to write, a random seed per rank ("same" or "different"), and the names of the cases.
"""

import sys
import warnings

import keras
import numpy as np
import torch.distributed as dist
from support import problem, reducing

import keras_shardopt as ks
from keras_shardopt.update import exchange

warnings.filterwarnings("ignore")

CALLS = []
_all_reduce = dist.all_reduce


def counting_all_reduce(tensor, *args, **kwargs):
    CALLS.append(tensor.numel())
    return _all_reduce(tensor, *args, **kwargs)


CASES = dict(problem.keras_optimizers())
CASES["clipped"] = lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)
CASES["scaled"] = lambda: keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=4.0)
CASES["sum"] = problem.sgd_momentum
CASES["replica clip"] = problem.sgd_momentum
CASES["replica clip, scaled"] = CASES["scaled"]
CASES["eager loop"] = problem.sgd_momentum
# Planted faults: the reduction dropped, and made with a wrong factor.
CASES["fault: dropped"] = problem.sgd_momentum
CASES["fault: summed twice"] = problem.sgd_momentum

FAULTS = {
    "fault: dropped": lambda grads, *_: grads,
    "fault: summed twice": lambda grads, variables, replicas, *_: replicas.all_reduce(
        replicas.all_reduce(grads, "sum"), "mean"
    ),
}


def loop(model, x, y):
    """A custom training loop."""
    model.optimizer.build(model.trainable_variables)
    size = len(x) // problem.NUM_STEPS
    for start in range(0, len(x), size):
        model.zero_grad()
        outputs = model(x[start : start + size])
        loss = keras.ops.mean(keras.ops.square(keras.ops.subtract(outputs, y[start : start + size])))
        loss.backward()
        model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)


def main():
    file, seeds, *names = sys.argv[1:]
    results = {}
    with ks.data_parallel(prepare=False) as replicas:
        rank, size = replicas.replica_id, replicas.num_replicas
        x, y = (problem.rows_of_replica(data, rank, size) for data in problem.data())
        real = exchange.move
        for name in names:
            if seeds == "different":
                keras.utils.set_random_seed(rank)
            model = problem.model()
            if seeds == "different" and rank:
                model.set_weights([w + rank for w in problem.start_weights()])
            reduction = "sum" if name == "sum" else "mean"
            clipnorm = problem.CLIPNORM if name.startswith("replica clip") else None
            more = {"overlap": False} if name.startswith("fault") else {}  # its buckets do not use `exchange.move`
            optimizer = ks.CrossShard(CASES[name](), reduction=reduction, replica_clipnorm=clipnorm, **more)
            model.compile(optimizer, "mse")
            model.optimizer.build(model.trainable_variables)
            exchange.move = reducing.replacing(FAULTS[name]) if name in FAULTS else real
            dist.all_reduce, CALLS[:] = counting_all_reduce, []
            if name == "eager loop":
                loop(model, x, y)
            else:
                model.fit(x, y, batch_size=problem.BATCH_SIZE // size, shuffle=False, verbose=0)
            dist.all_reduce = _all_reduce
            results[f"{name}/difference"] = replicas.largest_difference(model)
            results[f"{name}/calls"] = np.array(CALLS[1:])  # the first belongs to the common start
            for i, weight in enumerate(model.get_weights()):
                results[f"{name}/weight{i}"] = weight
        if replicas.is_chief:
            np.savez(file, **results)


main()
