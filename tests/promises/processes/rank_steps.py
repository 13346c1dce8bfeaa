"""Trains the small problem with `optimize_loss` on the ranks that torchrun started, and writes what came of it.

Argument: the file to write.
"""

import json
import pathlib
import sys

import numpy as np
from promises.problems import steps
from support import problem

import keras_shardopt as ks

results, seen = {}, {}
with ks.data_parallel() as replicas:
    rank, size = replicas.replica_id, replicas.num_replicas
    x, y = (problem.rows_of_replica(data, rank, size) for data in problem.data())
    for config in steps.CONFIGS:
        found, losses, step, model = steps.trained(config, x, y, problem.BATCH_SIZE // size, on_horovod=True)
        results[f"{config}/difference"] = replicas.largest_difference(model)
        results[f"{config}/losses"] = losses
        seen[config] = steps.scalars(step)
        for i, array in enumerate(found):
            results[f"{config}/{i}"] = array
    try:
        steps.trained("keras.losses", x, y, problem.BATCH_SIZE // size, on_horovod=False)
    except ValueError as error:
        seen["refused"] = str(error)
    if replicas.is_chief:
        np.savez(sys.argv[1], **results)
        pathlib.Path(sys.argv[1]).with_suffix(".json").write_text(json.dumps(seen))
