"""Runs a job of the fixture `world` on the ranks that torchrun started, or processes of JAX, once for each name.

Arguments: the file for what rank 0 has in the end, the job as `module:function`, and the names.
"""

import importlib
import pathlib
import pickle
import sys
import warnings

import keras

import keras_shardopt as ks

warnings.filterwarnings("ignore")

file, job, *names = sys.argv[1:]
module, function = job.split(":")
job = getattr(importlib.import_module(module), function)
if keras.config.backend() == "jax":
    keras.distribution.initialize()
with ks.data_parallel(auto_shard=False) as replicas:
    found = {name: job(replicas, name) for name in names}
    if replicas.is_chief:
        pathlib.Path(file).write_bytes(pickle.dumps(found))
