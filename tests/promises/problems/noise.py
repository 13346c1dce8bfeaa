"""A problem whose gradient noise scale is known: a vector that is to be the mean of noisy rows, and never moves."""

from __future__ import annotations

import tempfile

import keras
import numpy as np
from support import events

import keras_shardopt as ks

SIZE = 128
BATCH_SIZE = 64
NUM_UPDATES = 120
TRUTH = 50.0
"""In rows: the trace of the covariance of one row's gradient over the square of the mean gradient's norm."""

CASES = {
    "plain": {},
    "accumulating": {"gradient_accumulation_steps": 2},
    "scaled loss": {"wrap": lambda sgd: ks.LossScaling(sgd, 64.0)},
    "a stage of its own": {"stages": True},
}


def rows(num_micro_batches=1):
    """Inputs of ones, and rows around 1 in each direction: the gradient of a row is its distance, times a constant."""
    random = np.random.default_rng(5)
    number = NUM_UPDATES * num_micro_batches * BATCH_SIZE
    y = random.normal(size=(number, SIZE))
    # The rows are those of whose mean and spread we know exactly.
    y = 1 + (y - y.mean(axis=0)) * np.sqrt(TRUTH) / y.std(axis=0)
    return np.ones((number, 1), "float32"), y.astype("float32")


def trained(case, num_replicas, x, y, batch_size, **optimizer_arguments):
    """What TensorBoard shows of the last update, if this process writes; and the optimizer."""
    given = {**CASES.get(case, {}), **optimizer_arguments}
    wrap, stages = given.pop("wrap", lambda sgd: sgd), [ks.GradientNoise()] if given.pop("stages", False) else []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(SIZE, use_bias=False, kernel_initializer="zeros")])
    model.compile(ks.CrossShard(wrap(keras.optimizers.SGD(0.0)), stages=stages, **given), "mse")
    num_before = len(model.optimizer.variables) if model.optimizer.built else None
    with tempfile.TemporaryDirectory() as folder:
        watching = ks.callbacks.TrainingSummaries(folder, ["gradient_noise_scale"], every=NUM_UPDATES)
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=[watching])
        assert num_before is None or len(model.optimizer.variables) == num_before
        found = events.read(folder)
    prefix = "Loss_Optimization/gradient_noise_scale"
    return {tag.removeprefix(prefix): found[tag][-1][1] for tag in found if tag.startswith(prefix)}, model.optimizer


def on_replicas(replicas, case):
    """What is shown of the noise on several replicas, and whether nothing is left of the watching."""
    k = CASES[case].get("gradient_accumulation_steps", 1)
    x, y = rows(k)
    here, rank = replicas.num_processes, replicas.process_id
    mine = [
        array.reshape(-1, here, BATCH_SIZE // here, array.shape[1])[:, rank].reshape(-1, array.shape[1])
        for array in (x, y)
    ]
    found, optimizer = trained(case, replicas.num_replicas, *mine, BATCH_SIZE // here)
    left = any(isinstance(stage, ks.GradientNoise) for stage in optimizer.pipeline.stages)
    return found, left or bool(optimizer.state_finder.needing) != (case == "a stage of its own")
