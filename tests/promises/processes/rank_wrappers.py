"""Trains the small problem with each wrapper at work, on the ranks that torchrun started, and writes what came of it.

Argument: the file to write.
"""

import sys
import warnings

import numpy as np
from promises.problems import at_work
from support import problem

import keras_shardopt as ks

warnings.filterwarnings("ignore")

results = {}
with ks.data_parallel() as replicas:
    rank, size = replicas.replica_id, replicas.num_replicas
    x, y = (problem.rows_of_replica(data, rank, size) for data in problem.data())
    for name in at_work.AT_WORK:
        model = at_work.compiled(name, at_work.in_cross_shard(name))
        model.fit(x, y, batch_size=problem.BATCH_SIZE // size, shuffle=False, verbose=0)
        results[f"{name}/difference"] = replicas.largest_difference(model)
        for i, weight in enumerate(model.get_weights()):
            results[f"{name}/weight{i}"] = weight
    if replicas.is_chief:
        np.savez(sys.argv[1], **results)
