"""Trains a case of `problems/same_bits.py` on processes of JAX. Arguments: the file for what is found, and the case."""

import json
import pathlib
import sys
import warnings

import jax
from promises.problems import same_bits

import keras_shardopt as ks

warnings.filterwarnings("ignore")

file, case = sys.argv[1:]
with ks.data_parallel() as replicas:
    found = same_bits.trained(replicas, case)
    if jax.process_count() > 1:
        model = same_bits.model_of(case)
        for _ in range(5):  # what is dispatched for one fit is not overtaken by what processes exchange before the next
            same_bits.fit(model, case, epochs=1)
    if replicas.is_chief:
        pathlib.Path(file).write_text(json.dumps(found))
