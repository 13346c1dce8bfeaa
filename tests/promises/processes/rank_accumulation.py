"""Trains in windows of micro-batches on the ranks that torchrun started, and writes what came of it.

Arguments: the file to write; with "compiled", one case in a compiled step, and otherwise all others.
"""

import sys
import warnings

import numpy as np
import torch.distributed as dist
from promises.problems import accumulating
from support import problem

import keras_shardopt as ks

warnings.filterwarnings("ignore")
CALLS = []
_all_reduce = dist.all_reduce


def counting_all_reduce(tensor, *args, **kwargs):
    CALLS.append(tensor.numel())
    return _all_reduce(tensor, *args, **kwargs)


def main():
    results = {}
    if sys.argv[2:] == ["compiled"]:
        runs = [("compiled", 3, {})]
    else:
        runs = [("momentum", 2, {}), *[(case, 3, {}) for case in accumulating.CASES]]
        runs += [("replica clip", 3, {"replica_clipnorm": accumulating.CLIPNORM})]
    with ks.data_parallel(prepare=False) as replicas:
        rank, size = replicas.replica_id, replicas.num_replicas
        for name, num_steps, arguments in runs:
            case = name if name in accumulating.CASES else "momentum"
            make, _, data = accumulating.CASES[case]
            x, y = (problem.rows_of_replica(a, rank, size) for a in data())
            optimizer = ks.CrossShard(make(), gradient_accumulation_steps=num_steps, **arguments)
            if name == "compiled":
                model = problem.InOneLayer()
                model.compile(optimizer, "mse", jit_compile=True)
            else:
                model = accumulating.compiled(case, optimizer)
            optimizer.build(model.trainable_variables)
            dist.all_reduce, CALLS[:] = counting_all_reduce, []
            with problem.without_generated_code():
                model.fit(x, y, batch_size=problem.BATCH_SIZE // size, shuffle=False, verbose=0)
            dist.all_reduce = _all_reduce
            results[f"{name}/{num_steps}/difference"] = replicas.largest_difference(model)
            results[f"{name}/{num_steps}/calls"] = np.array(CALLS[1:])  # the first belongs to the common start
            for i, weight in enumerate(model.get_weights()):
                results[f"{name}/{num_steps}/weight{i}"] = weight
        if replicas.is_chief:
            np.savez(sys.argv[1], **results)


main()
