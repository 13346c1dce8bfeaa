"""Trains cases of `problems/same_bits.py` on devices of TensorFlow, in one process.

Arguments: the file for what is found, the number of devices, and cases.
"""

import json
import pathlib
import sys
import warnings

import tensorflow as tf
from promises.problems import same_bits

import keras_shardopt as ks

warnings.filterwarnings("ignore")
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

file, num_devices, *cases = sys.argv[1:]
found = {}
for case in cases:
    with ks.data_parallel(int(num_devices)) as replicas:
        found[case] = same_bits.trained(replicas, case, **same_bits.validation_of(case))
    replicas.close()
pathlib.Path(file).write_text(json.dumps(found))
