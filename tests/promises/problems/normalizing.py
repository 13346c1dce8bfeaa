"""Models that normalise with the batch, which replicas have in uneven parts, or not at all."""

from __future__ import annotations

import keras
import numpy as np
from promises.problems import uneven
from support import problem

import keras_shardopt as ks

BatchNormalization = keras.layers.BatchNormalization


def branches(**more):
    """Three layers that normalise, two of them in branches, and one of these on what another has normalised."""
    inputs = keras.Input((problem.NUM_FEATURES,))
    hidden = keras.layers.Dense(6, activation="tanh", name="hidden")(inputs)
    hidden = BatchNormalization(momentum=0.5, **more)(hidden)
    left = keras.layers.Dense(4, activation="tanh", name="left")(hidden)
    left = BatchNormalization(momentum=0.9, **more)(left)
    right = keras.layers.Dense(3, activation="tanh", name="right")(inputs)
    right = BatchNormalization(scale=False, **more)(right)
    joined = keras.layers.Concatenate()([left, right])
    return keras.Model(inputs, keras.layers.Dense(problem.NUM_OUTPUTS, name="out")(joined))


def layers_in_a_row(**more):
    """A model inside another one, with images of one row whose channels come first."""
    tanh = keras.layers.Activation("tanh")  # of what is normalised twice in a row, gradients are differences
    convolution = keras.layers.Conv1D(3, 2)
    inside = [keras.layers.Reshape((problem.NUM_FEATURES, 1)), convolution, BatchNormalization(**more), tanh]
    images = [keras.layers.Permute((2, 1)), BatchNormalization(axis=1, center=False, **more), keras.layers.Flatten()]
    last = [keras.layers.Activation("tanh"), keras.layers.Dense(problem.NUM_OUTPUTS)]
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), keras.Sequential(inside), *images, *last])


class Masked(keras.layers.Layer):
    """Sequences, of which what is not positive is masked out."""

    def call(self, x):
        return keras.ops.stack([x, x**2], axis=-1)

    def compute_mask(self, x, mask=None):
        return x > 0


class Joined(keras.layers.Layer):
    """Each sequence as one row, without its mask."""

    def call(self, x, mask=None):
        return keras.ops.reshape(x, (-1, problem.NUM_FEATURES * 2))

    def compute_mask(self, x, mask=None):
        return None


def sequences(**more):
    layers = [Masked(), BatchNormalization(momentum=0.5, **more), Joined(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers])


def only_normalized(**more):
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), BatchNormalization(momentum=0.0, **more)])


def normalized_first(**more):
    first = [keras.Input((problem.NUM_FEATURES,)), BatchNormalization(momentum=0.5, **more)]
    return keras.Sequential([*first, keras.layers.Dense(problem.NUM_OUTPUTS)])


def normalized_once(**more):
    """Between two layers."""
    layers = [keras.layers.Dense(6, activation="tanh"), BatchNormalization(momentum=0.5, **more)]
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers, keras.layers.Dense(problem.NUM_OUTPUTS)])


def far_from_zero():
    x, y = uneven.data()
    return x + 3000, y[:, :1] * np.ones(problem.NUM_FEATURES, "float32")


def data_with_nan():
    x, y = uneven.data()
    x = x.copy()
    x[uneven.BATCH_SIZE + 1] = np.nan  # of the second batch, on the first replica
    return x, y


CASES = {
    "branches": {},
    "a row of layers": {"make": layers_in_a_row},
    "mask": {"make": sequences},
    "accumulation": {"make": normalized_once, "around": {"gradient_accumulation_steps": 2}},
    "skipped update": {"make": normalized_once, "around": {"on_nonfinite": "skip"}, "data": data_with_nan},
    "mixed precision": {"policy": "mixed_bfloat16"},
    "gradients of each replica": {"around": {"replica_clipnorm": 1e9}},
    "accumulated gradients of each replica": {
        "make": normalized_once,
        "around": {"replica_clipnorm": 1e9, "gradient_accumulation_steps": 2},
    },
    "few rows": {"make": normalized_once, "rows": slice(17)},  # 16 and one
    "far from zero": {"make": only_normalized, "data": far_from_zero},
    "apart": {"converts": False},
    "apart, few rows": {"converts": False, "make": normalized_first, "rows": slice(17)},
    "apart, skipped update": {
        **{"converts": False, "make": normalized_first, "data": data_with_nan},
        "around": {"on_nonfinite": "skip"},
    },
}


def parts(rank, size):
    """The rows of a rank in each batch: uneven parts, none on the last rank, all on the last rank, uneven parts."""
    divided, (_, second, third, _) = uneven.divided(rank, size), uneven.batches()
    without_last = np.array_split(second, size - 1)[rank] if rank < size - 1 else second[:0]
    return [divided[0], without_last, third if rank == size - 1 else third[:0], divided[3]]


def compiled(make=branches, around=None, policy="float32", converts=True, jit_compile="auto", **_):
    """Made as for one replica, and converted then."""
    keras.utils.set_random_seed(4)
    keras.config.set_dtype_policy(policy)
    model = make()
    keras.config.set_dtype_policy("float32")
    if converts:
        assert ks.synchronize_batch_normalization(model) is model
    model.compile(ks.CrossShard(problem.sgd_momentum(), **(around or {})), "mse", jit_compile=jit_compile)
    return model


def values(model):
    """The weights and the moving statistics."""
    of_both = [model.trainable_variables, [v for v in model.non_trainable_variables if "moving" in v.name]]
    return [[np.array(keras.ops.convert_to_numpy(v)) for v in variables] for variables in of_both]


def trained(replicas, name, **more):
    """The weights and statistics of a case after some updates, and those that it began with."""
    case = {**CASES[name], **more}
    model = compiled(**case)
    start = values(model)
    x, y = case.get("data", uneven.data)()
    if replicas is not None and replicas.num_processes > 1:
        for rows in parts(replicas.replica_id, replicas.num_replicas):
            model.train_on_batch(x[rows], y[rows])
        assert replicas.largest_difference(model) == 0
    else:
        rows = case.get("rows", slice(None))
        model.fit(x[rows], y[rows], batch_size=uneven.BATCH_SIZE, shuffle=False, verbose=0)
    return values(model), start


def assert_same(found, expected, tolerance=problem.TOLERANCE):
    (found, _), (expected, start) = found, expected
    for mine, others, before in zip(found, expected, start):
        difference = problem.relative_difference(mine, others, before)
        assert difference <= tolerance, difference
