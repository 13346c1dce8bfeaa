"""Gradients that are known beforehand, so that what was sent of them, and what was not, can be added up after `fit`.

The loss is linear in the weights: its gradient is that of the batch, whatever the weights are.
"""

from __future__ import annotations

import contextlib
import pathlib
import runpy
import tempfile
from unittest import mock

import keras
import numpy as np
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends.active import placement, processes

NUM_UPDATES = 20
BATCH = 8
NUM_IDS = 30


@keras.saving.register_keras_serializable("keras_shardopt_tests")
def linear(targets, outputs):
    return keras.ops.mean(targets * outputs, axis=-1)


def model():
    numbers, ids = keras.Input((6,), name="numbers"), keras.Input((2,), dtype="int32", name="ids")
    dense = keras.layers.Dense(5, use_bias=False, kernel_initializer="zeros")(numbers)
    frozen = keras.layers.Dense(5, trainable=False)(dense)
    embedding = keras.layers.Embedding(NUM_IDS, 3, embeddings_initializer="zeros")(ids)
    return keras.Model({"numbers": numbers, "ids": ids}, [dense, frozen, keras.layers.Flatten()(embedding)])


def data(num_rows):
    random = np.random.default_rng(4)
    x = {
        "numbers": random.normal(size=(num_rows, 6)).astype("float32"),
        "ids": random.integers(0, NUM_IDS, (num_rows, 2)).astype("int32"),
    }
    return x, [random.normal(size=(num_rows, n)).astype("float32") for n in (5, 5, 6)]


def gradients(x, targets):
    """Of the mean over these rows."""
    kernel = x["numbers"].astype("float64").T @ targets[0] / (5 * len(targets[0]))
    table = np.zeros((NUM_IDS, 3))
    for row, weights in zip(x["ids"], targets[2].reshape(-1, 2, 3)):
        for i, weight in zip(row, weights):
            table[i] += weight / (6 * len(targets[2]))
    return [kernel, table]


int8, stochastic = ks.compression.Int8(block=16), ks.compression.Int8(block=16, rounding="stochastic", seed=5)
APART = {"bucket_mib": 1e-4}  # PyTorch: each variable is sent by itself, while the backward pass runs
CASES = {
    "int8": {"compression": int8},
    "int8 by chance": {"compression": stochastic},
    "int4": {"compression": "int4"},
    "bfloat16": {"compression": ks.compression.BFloat16(error_feedback=True)},
    "powersgd": {"compression": ks.compression.PowerSGD(rank=1, warmup_steps=0), **APART},
    "int8 in windows": {"compression": int8, "gradient_accumulation_steps": 4, **APART},
    "int8 that skips": {"compression": int8, "on_nonfinite": "skip"},
    "int4 in windows that skips": {
        "compression": "int4",
        "gradient_accumulation_steps": 4,
        "on_nonfinite": "skip",
        **APART,
    },
    "int8 with divided state": {"compression": int8, "shard_state": True},
    "int4 with divided state that skips": {"compression": "int4", "shard_state": True, "on_nonfinite": "skip"},
    "powersgd with divided state": {
        "compression": ks.compression.PowerSGD(rank=1, warmup_steps=0),
        "shard_state": True,
    },
    "int8 and uneven rows": {"compression": int8, **APART},
    "int8 in windows with divided state and a scaled loss that skips": {
        "inner_optimizer": lambda: ks.LossScaling(keras.optimizers.SGD(1.0), "Backoff", {"scale_max": 8.0}),
        "compression": int8,
        "gradient_accumulation_steps": 4,
        "shard_state": True,
    },
}
BAD_BATCH = 9


def trained(replicas, name):
    """What the weights have lost and what was not sent, what it should be, and how far replicas are apart."""
    arguments = dict(CASES[name])
    inner = arguments.pop("inner_optimizer", lambda: keras.optimizers.SGD(1.0))
    x, targets = data(BATCH * NUM_UPDATES - 5 * ("uneven" in name))
    size = len(targets[0])
    if "skips" in name:
        x["numbers"][BAD_BATCH * BATCH + 1, 2] = np.nan
    trainee = model()
    optimizer = ks.CrossShard(inner(), **arguments)
    trainee.compile(optimizer, [linear] * 3, loss_weights=[1.0, 0.0, 1.0])
    if replicas.num_processes > 1:  # `prepare` divides each batch
        ks.prepare(trainee, auto_shard=True)
    with np.errstate(all="ignore"):
        trainee.fit(x, targets, batch_size=BATCH, shuffle=False, verbose=0)
    window = arguments.get("gradient_accumulation_steps", 1)
    expected = [0.0, 0.0]
    for first in range(0, size, BATCH * window):
        parts = [slice(start, start + BATCH) for start in range(first, min(first + BATCH * window, size), BATCH)]
        if "skips" in name and first <= BAD_BATCH * BATCH < first + BATCH * window:
            continue
        for part in parts:
            grads = gradients({k: v[part] for k, v in x.items()}, [t[part] for t in targets])
            expected = [e + g / window for e, g in zip(expected, grads)]
    # TensorFlow's losses are divided by the number of replicas, and so is what is left of their gradients.
    share = 1 if keras.config.backend() == "tensorflow" else 1 / replicas.num_replicas
    left = [share * np.sum(everyones(v), axis=0) for v in optimizer.pipeline.carried]
    moved = [-keras.ops.convert_to_numpy(v).astype("float64") for v in trainee.trainable_variables]
    assert all(np.max(np.abs(e)) > 0 for e in left)
    return {
        "moved": moved,
        "left": left,
        "expected": expected,
        "skipped": int(keras.ops.convert_to_numpy(optimizer.skipped_steps)),
        "apart": replicas.largest_difference(trainee),
    }


def everyones(variable):
    return [v for values in processes.gather_objects(placement.replica_values(variable)) for v in values]


# -- a codec of an example ---------------------------------------------------------------------------------------------

FRACTION, RATE, MOMENTUM = 0.2, 0.5, 0.9
TopK = runpy.run_path(str(pathlib.Path(__file__).parents[3] / "examples" / "top_k.py"))["TopK"]


def sparsified(replicas, name):
    """The weights after training with `TopK`, and what each replica is left with."""
    x, targets = data(BATCH * 20)
    trainee = model()
    sgd = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer = ks.CrossShard(sgd, compression=TopK(FRACTION), shard_state="divided" in name)
    trainee.compile(optimizer, [linear] * 3, loss_weights=[1.0, 0.0, 1.0])
    if replicas.num_processes > 1:  # `prepare` divides each batch
        ks.prepare(trainee, auto_shard=True)
    trainee.fit(x, targets, batch_size=BATCH, shuffle=False, verbose=0)
    scale = replicas.num_replicas if keras.config.backend() == "tensorflow" else 1  # its losses are divided
    left = [scale * np.array(everyones(v)) for v in optimizer.pipeline.carried]
    return [keras.ops.convert_to_numpy(v) for v in trainee.trainable_variables], left


def sparsified_in_numpy(num_replicas):
    """The same, in float64."""
    x, targets = data(BATCH * 20)
    shapes = [(6, 5), (NUM_IDS, 3)]
    weights, momenta = [np.zeros(s) for s in shapes], [np.zeros(s) for s in shapes]
    left = [np.zeros((num_replicas, *s)) for s in shapes]
    rows = BATCH // num_replicas
    for first in range(0, BATCH * 20, BATCH):
        parts = [slice(first + r * rows, first + (r + 1) * rows) for r in range(num_replicas)]
        own = [gradients({k: v[part] for k, v in x.items()}, [t[part] for t in targets]) for part in parts]
        for i, everyones in enumerate(zip(*own)):
            left[i] += everyones
            sent = np.zeros_like(left[i])
            for mine, values in zip(sent.reshape(num_replicas, -1), left[i].reshape(num_replicas, -1)):
                largest = np.argsort(-np.abs(values), kind="stable")[: round(FRACTION * values.size)]
                mine[largest] = values[largest]
            left[i] -= sent
            momenta[i] = MOMENTUM * momenta[i] - RATE * np.mean(sent, axis=0)
            weights[i] += momenta[i]
    return weights, left


# -- bytes -------------------------------------------------------------------------------------------------------------

WIDTH = 300
SENT = {
    "nothing": None,
    "bfloat16": "bfloat16",
    "bfloat16 fed back": ks.compression.BFloat16(error_feedback=True),
    "int8": "int8",
    "int4": "int4",
    "powersgd": ks.compression.PowerSGD(rank=4, warmup_steps=0),
}


class Counts(keras.callbacks.Callback):
    """On PyTorch, how many bytes ranks in a ring send in the third step, from what its collectives are given."""

    total = None

    def __init__(self, size):
        super().__init__()
        self._size = size
        self._patches = contextlib.ExitStack()

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and keras.config.backend() == "torch":
            import torch.distributed as dist

            from keras_shardopt.backends.torch import communicator

            self.total, others = 0, self._size - 1
            self._watch(dist, "all_reduce", 0, 2 * others / self._size)
            self._watch(dist, "all_to_all_single", 1, others / self._size)
            self._watch(communicator, "_all_gather", 1, others)
            self._watch(communicator, "_reduce_scatter", 1, others / self._size)

    def _watch(self, module, name, position, factor):
        real = getattr(module, name)

        def counted(*tensors, **arguments):
            self.total += tensors[position].nbytes * factor
            return real(*tensors, **arguments)

        self._patches.enter_context(mock.patch.object(module, name, counted))

    def on_train_batch_end(self, batch, logs=None):
        self._patches.close()


def sent(replicas, name):
    """The report after an update of a model with some 90,000 weights."""
    trainee = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    trainee.compile(ks.CrossShard(keras.optimizers.SGD(0.1), compression=SENT[name]), "mse")
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
    counts = Counts(replicas.num_replicas)
    trainee.fit(x, x, batch_size=8 // replicas.num_processes, verbose=0, callbacks=[counts])
    report = trainee.optimizer.communication_report()
    collectives = [(c.kind, c.dtypes) for c in report.collectives]
    return report.bytes_per_update, report.float32_bytes, collectives, str(report), counts.total


def divided(replicas, name):
    """The weights after some updates, with whole and with divided state."""
    x, y, batch_size = problem.rows_here(replicas)
    found = []
    for shard_state in (False, True):
        trainee = problem.model()
        codec = ks.compression.PowerSGD(rank=1, warmup_steps=0)
        trainee.compile(ks.CrossShard(problem.sgd_momentum(), compression=codec, shard_state=shard_state), "mse")
        trainee.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        found.append(trainee.get_weights())
    return found


# -- going on after a restart ------------------------------------------------------------------------------------------

RESTARTS = {
    "int4": {"compression": "int4"},
    "powersgd": {"compression": ks.compression.PowerSGD(rank=1, warmup_steps=0)},
    "int4 with divided state": {"compression": "int4", "shard_state": True},
}


class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


def restarted(replicas, name):
    """The weights, and what was not sent, of a training that was never interrupted, and of one that was."""
    x, y, batch_size = problem.rows_here(replicas)
    found = []
    folder = processes.gather_objects(tempfile.mkdtemp())[0]
    for is_interrupted in (False, True):
        backup = ks.callbacks.BackupAndRestore(pathlib.Path(folder, str(is_interrupted)))
        for callbacks in ([backup, Dies()], [backup]) if is_interrupted else ([backup],):
            keras.utils.set_random_seed(1)
            trainee = problem.model()
            trainee.compile(ks.CrossShard(problem.sgd_momentum(), **RESTARTS[name]), "mse")
            with contextlib.suppress(InterruptedError):
                trainee.fit(x, y, batch_size=batch_size, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
        left = [everyones(v) for v in trainee.optimizer.pipeline.carried]
        found.append((trainee.get_weights(), left, int(keras.ops.convert_to_numpy(trainee.optimizer.iterations))))
    return found
