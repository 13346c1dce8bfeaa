"""A process of a job that profiles a step. Argument: the path of the report."""

import sys
import warnings

import keras
import numpy as np

import keras_shardopt as ks

warnings.filterwarnings("ignore")
with ks.data_parallel() as scope:
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile(ks.CrossShard(keras.optimizers.SGD(1e-4)), loss="mse")
x = np.random.default_rng(0).normal(size=(16 * 8, 256)).astype("float32")
report = ks.callbacks.StepReport(to=sys.argv[1], profile_step=6)
model.fit(x, x[:, :1], batch_size=16, verbose=0, callbacks=[report])
scope.close()
