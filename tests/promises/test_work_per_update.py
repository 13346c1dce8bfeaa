"""Python's work in an update: it grows with the number of variables, no faster, and is the same in each update."""

import functools
import gc
import itertools
import sys

import keras
import numpy as np
import pytest
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.active import runtime

CHAINS = {
    "alone": lambda inner: ks.CrossShard(inner, fused=False),
    "fused": lambda inner: ks.CrossShard(inner),
    "skips": lambda inner: ks.CrossShard(inner, on_nonfinite="skip"),
    "chain": lambda inner: ks.CrossShard(ks.LossScaling(ks.GradientClipping(ks.LARC(inner, 0.01), 1.0))),
}


def num_calls(function):
    """How many functions of Python and of C are called."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

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
        test_work_is_linear_and_constant("alone")


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
