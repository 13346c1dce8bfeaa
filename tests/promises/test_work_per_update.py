"""Python's work in an update: it grows with the number of variables, no faster, and is the same in each update.

With one replica it is that of plain Keras.
"""

import functools
import gc
import itertools
import os
import sys

import keras
import numpy as np
import pytest
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.active import runtime

PACKAGE = os.path.dirname(ks.__file__)
_CALLS = ("call", "c_call")

CHAINS = {
    "alone": lambda inner: ks.CrossShard(inner, fused=False),
    "fused": lambda inner: ks.CrossShard(inner),
    "skips": lambda inner: ks.CrossShard(inner, on_nonfinite="skip"),
    "chain": lambda inner: ks.CrossShard(ks.LossScaling(ks.GradientClipping(ks.LARC(inner, 0.01), 1.0))),
}


def num_calls(function, only_ours=False):
    """How many functions of Python and of C are called; or how many of this package."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        is_counted = event == "call" and PACKAGE in frame.f_code.co_filename if only_ours else event in _CALLS
        count += is_counted

    gc.disable()  # which calls functions too, now and then
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_of_updates(chain, num_variables, num_updates=4):
    optimizer = CHAINS[chain](keras.optimizers.SGD(0.1, momentum=0.9))
    weights = [keras.Variable(np.ones(2, "float32")) for _ in range(num_variables)]
    grads = [keras.ops.ones(2) for _ in weights]
    optimizer.build(weights)
    return [num_calls(lambda: optimizer.apply(grads, weights)) for _ in range(num_updates)]


# On the other backends an update is traced once, and then no work of Python's.
@pytest.mark.backends("torch")
@pytest.mark.parametrize("chain", CHAINS)
def test_work_is_linear_and_constant(chain):
    calls_of_updates(chain, 8)  # what is imported or looked up on first use
    few, some, many = (calls_of_updates(chain, number) for number in (8, 16, 32))
    # But for a call or two of Python's own caches.
    assert all(max(counts[1:]) - min(counts[1:]) < 8 for counts in (few, some, many)), (few, some, many)
    # A quadratic part would be four times as much more.
    assert (many[-1] - some[-1]) <= 2.05 * (some[-1] - few[-1]), (few, some, many)


@pytest.mark.backends("torch")
def test_more_work_is_seen(monkeypatch):
    real = ks.CrossShard.transform_gradients

    def quadratic(self, grads, variables):
        for variable in variables:
            sum(bool(variable is other.value) for other in variables)
        return real(self, grads, variables)

    monkeypatch.setattr(ks.CrossShard, "transform_gradients", quadratic)
    with pytest.raises(AssertionError):
        test_work_is_linear_and_constant("skips")


SCALING = ("Backoff", {"scale_max": 8.0})
WAITING = {
    "plain": lambda inner: ks.CrossShard(inner),
    "skips": lambda inner: ks.CrossShard(inner, on_nonfinite="skip"),
    "LossScaling": lambda inner: ks.CrossShard(ks.LossScaling(inner, *SCALING)),
    "LARC": lambda inner: ks.CrossShard(ks.LARC(inner, 0.01)),
    "GradientClipping": lambda inner: ks.CrossShard(ks.GradientClipping(inner, 1.0)),
    "MixedPrecision": lambda inner: ks.CrossShard(ks.MixedPrecision(inner)),
    "all": lambda inner: ks.CrossShard(
        ks.LossScaling(ks.GradientClipping(ks.LARC(ks.MixedPrecision(inner), 0.01), 1.0), *SCALING)
    ),
}


def reads_of_an_update(optimizer, monkeypatch):
    """How often Python reads a tensor's value, for which it waits on a GPU, in an update that is not the first."""
    import torch

    weights = [keras.Variable(np.ones((3, 2), "float32")) for _ in range(3)]
    grads = [keras.ops.ones((3, 2)) for _ in weights]
    optimizer.build(weights)
    for _ in range(3):
        optimizer.apply(grads, weights)
    count = []

    def counting(real):
        def read(tensor, *args, **kwargs):
            count.append(real)
            return real(tensor, *args, **kwargs)

        return read

    # As on a GPU, where nothing is.
    monkeypatch.setattr(type(runtime), "is_cheap_to_read", lambda self, tensor: False)
    for name in ("__bool__", "__float__", "__int__", "item", "tolist", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
    optimizer.apply(grads, weights)
    monkeypatch.undo()
    return len(count)


@pytest.mark.backends("torch")
@pytest.mark.parametrize("chain", WAITING)
def test_an_update_waits_for_a_device_once_at_most(chain, monkeypatch):
    scales = "LossScaling" in chain or chain in ("skips", "all")
    assert reads_of_an_update(WAITING[chain](keras.optimizers.Adam(0.01)), monkeypatch) == scales


@pytest.mark.backends("torch")
def test_reads_of_an_update_are_counted(monkeypatch):
    class Reading(ks.Stage):
        def commit(self, step, proceed):
            if float(step.grads[0][0, 0]) and keras.ops.convert_to_numpy(step.grads[1]).any():
                proceed(step)

    optimizer = ks.CrossShard(keras.optimizers.Adam(0.01), stages=[Reading()])
    assert reads_of_an_update(optimizer, monkeypatch) == 2
    assert reads_of_an_update(ks.CrossShard(keras.optimizers.Nadam(0.01)), monkeypatch) == 1


class Counting(keras.optimizers.SGD):
    """Counts how often Python runs through its update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_runs = 0

    def update_step(self, gradient, variable, learning_rate):
        self.num_runs += variable is self._trainable_variables[0]
        super().update_step(gradient, variable, learning_rate)


def runs_of_fit(wrap, changes_shape):
    inner = Counting(0.1, momentum=0.9)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile(wrap(inner), "mse")
    for num_rows in (40, 40, 44 if changes_shape else 40):  # the last batch of 44 is smaller
        model.fit(np.ones((num_rows, 4)), np.ones((num_rows, 2)), batch_size=8, epochs=2, verbose=0)
    return inner.num_runs


# A trace runs through it once, and then no step does.
@pytest.mark.backends("jax", "tensorflow")
@pytest.mark.parametrize(
    ("name", "changes_shape"),
    some(itertools.product(CHAINS, [False, True]), [("skips", True), ("chain", True)]),
)
def test_fit_is_traced_as_often_as_plain_keras(name, changes_shape):
    plain = runs_of_plain_fit(changes_shape)
    assert plain < 6
    assert runs_of_fit(CHAINS[name], changes_shape) == plain


@functools.cache
def runs_of_plain_fit(changes_shape):
    return runs_of_fit(lambda inner: inner, changes_shape)


@pytest.mark.backends("jax", "tensorflow")
def test_fit_with_divided_state_is_traced_a_few_times():
    assert runs_of_fit(lambda inner: ks.CrossShard(inner, on_nonfinite="skip", shard_state=True), False) < 6


# -- one replica -----------------------------------------------------------------------------------------------------

WRAPPED = {
    "exact": lambda inner: ks.CrossShard(inner, fused=False),
    "fused": lambda inner: ks.CrossShard(inner),
}
SMALL, LARGE = (2, 16), (4, 256)  # layers and units; a step of the smaller one makes 5,000 calls in plain Keras


def model_of(wrap, prepares, size):
    num_layers, units = size
    layers = [keras.layers.Dense(units) for _ in range(num_layers)]
    model = keras.Sequential([keras.Input((units,)), *layers])
    model.compile(wrap(keras.optimizers.Adam()), "mse")
    return ks.prepare(model) if prepares else model


def calls_of_a_step(wrap, prepares, size, only_ours=False):
    """How many functions are called in one more step of `fit`."""
    model = model_of(wrap, prepares, size)

    def fit(num_steps):
        rows = np.ones((num_steps * 8, size[1]), "float32")
        model.fit(rows, rows, batch_size=8, verbose=0)

    fit(8)  # what is imported or looked up on first use
    # The least of two: what the garbage collector calls comes at any time.
    calls = [min(num_calls(lambda num=num: fit(num), only_ours) for _ in range(2)) for num in (4, 12)]
    return (calls[1] - calls[0]) / 8


def plain(inner):
    return inner


@functools.cache
def calls_of_a_plain_step(size):
    return calls_of_a_step(plain, False, size)


# Each call takes a few ten-thousandths of the time of a step of the smaller model.
@pytest.mark.backends("torch")
@pytest.mark.parametrize(
    ("name", "prepares", "size", "at_most"),
    [
        ("exact", False, SMALL, 40),
        ("exact", True, SMALL, 100),
        ("fused", True, SMALL, 125),
        ("exact", True, LARGE, 100),
    ],
)
def test_one_replica_calls_hardly_more_than_plain_keras(name, prepares, size, at_most):
    more = calls_of_a_step(WRAPPED[name], prepares, size) - calls_of_a_plain_step(size)
    assert more <= at_most


# Python goes through a step when it is traced, and never again.
@pytest.mark.backends("jax", "tensorflow")
@pytest.mark.parametrize("prepares", [False, True])
def test_one_replica_calls_nothing_in_a_compiled_step(prepares):
    # One of the iterator, if this process has prepared a model before.
    at_most = 20 if prepares else 1
    assert calls_of_a_step(WRAPPED["fused"], prepares, SMALL, only_ours=True) <= at_most


def program_of(wrap, prepares):
    """The step that JAX compiles."""
    import jax

    model = model_of(wrap, prepares, SMALL)
    rows = np.ones((8, SMALL[1]), "float32")
    model.fit(rows, rows, verbose=0)
    kinds = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    state = model._get_jax_state(**dict.fromkeys(kinds, True))
    return str(jax.make_jaxpr(model.train_step)(state, (rows, rows)))


@pytest.mark.backends("jax")
@pytest.mark.parametrize("prepares", [False, True])
def test_one_replica_compiles_the_program_of_plain_keras(prepares):
    expected = program_of(plain, False)
    assert len(expected) > 1000
    assert program_of(WRAPPED["fused"], prepares) == expected
    assert program_of(lambda inner: ks.CrossShard(inner, on_nonfinite="skip"), prepares) != expected
