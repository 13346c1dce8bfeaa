"""Trains the small problem in each style on the ranks that torchrun started, and writes what came of it.

Argument: the file to write.
"""

import sys
import warnings

import numpy as np
from promises.problems import styles
from support import problem

import keras_shardopt as ks
from keras_shardopt.fit.scope import largest_difference

warnings.filterwarnings("ignore")

results = {}
with ks.data_parallel() as replicas:
    rank, size = replicas.replica_id, replicas.num_replicas
    x, y = (problem.rows_of_replica(data, rank, size) for data in problem.data())
    for style in styles.STYLES:
        model = styles.trained(style, ks.CrossShard(problem.sgd_momentum()), x, y, problem.BATCH_SIZE // size)
        variables = [*model.trainable_variables, *model.optimizer.variables]
        results[f"{style}/difference"] = largest_difference(variables)
        for i, array in enumerate(styles.outcome(model)):
            results[f"{style}/{i}"] = array
    if replicas.is_chief:
        np.savez(sys.argv[1], **results)
