import contextlib

import keras
import numpy as np
import pytest
from support import problem
from support.worlds import FakeWorld

import keras_shardopt as ks


@pytest.mark.parametrize("reduction", ["avg", "", None, 1, "MEAN", ["mean"]])
def test_unknown_reduction(reduction):
    with pytest.raises(ValueError, match="`reduction` must be") as caught:
        ks.CrossShard("sgd", reduction=reduction)
    assert repr(reduction) in str(caught.value)


def test_reduction_is_checked_before_the_optimizer_as_it_was_in_tf1():
    with pytest.raises(ValueError, match="`reduction`"):
        ks.CrossShard(None, reduction="avg")


def test_a_class_in_place_of_an_optimizer():
    with pytest.raises(TypeError, match=r"\(the class itself\)\. Use `CrossShard\(AdamW\(\.\.\.\)\)`"):
        ks.CrossShard(keras.optimizers.AdamW)


@pytest.mark.parametrize(("tf1", "meaning"), [("weighted_mean", "mean"), ("weighted_sum", "sum")])
def test_tf1_names_of_reductions(tf1, meaning):
    assert ks.CrossShard("sgd", reduction=tf1).reduction == meaning


@pytest.mark.parametrize("gradients", ["globally", None, 3])
def test_unknown_gradients(gradients):
    with pytest.raises(ValueError, match="`gradients` must be one of"):
        ks.CrossShard("sgd", gradients=gradients)


def test_axis_name_must_be_a_name():
    with pytest.raises(TypeError, match="`axis_name`"):
        ks.CrossShard("sgd", axis_name=0)


def test_config_holds_every_argument():
    optimizer = ks.CrossShard("sgd", reduction="sum", gradients="local", axis_name="data", name="mine")
    restored = ks.CrossShard.from_config(optimizer.get_config())
    assert (restored.reduction, restored.gradients, restored.axis_name, restored.name) == (
        "sum",
        "local",
        "data",
        "mine",
    )


def test_repr_shows_the_chain():
    optimizer = ks.CrossShard(ks.CrossShard(keras.optimizers.SGD()), reduction="sum")
    assert repr(optimizer) == "CrossShard(CrossShard(SGD, reduction='mean'), reduction='sum')"


THE_RIGHT_CALL = r"(?s)must be inside `CrossShard`.*compile\(optimizer=CrossShard\(LossScaling\("


def test_a_loss_scale_optimizer_around_it_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match=THE_RIGHT_CALL):
        keras.optimizers.LossScaleOptimizer(ks.CrossShard("sgd"))
    # Also where it is not the next one in the chain.
    with pytest.raises(ValueError, match=THE_RIGHT_CALL):
        keras.optimizers.LossScaleOptimizer(ks.CrossShard(ks.CrossShard("sgd")))


@contextlib.contextmanager
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def test_compile_under_mixed_float16_is_refused_and_the_right_call_works():
    with mixed_float16():
        model = problem.model()
        with pytest.raises(ValueError, match=THE_RIGHT_CALL):
            model.compile(ks.CrossShard("sgd"), "mse")
        inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
        model.compile(ks.CrossShard(inner), "mse", auto_scale_loss=False)
        x, y = problem.data(num_steps=2)
        model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
        moved = max(np.abs(a - b).max() for a, b in zip(model.get_weights(), problem.start_weights()))
    assert moved > 1e-2  # scaled once and unscaled once


def test_setting_the_loss_scale_factor_by_hand_still_works():
    optimizer = ks.CrossShard("sgd")
    optimizer.loss_scale_factor = 4.0
    assert optimizer.inner.loss_scale_factor == 4.0
    optimizer.loss_scale_factor = None
    assert optimizer.inner.loss_scale_factor is None


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras before 3.15 has no MultiOptimizer")
def test_a_loss_scale_optimizer_around_a_multi_optimizer_is_refused_by_the_time_it_is_built():
    def build():
        multi = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(ks.CrossShard("sgd"), {}))
        keras.optimizers.LossScaleOptimizer(multi).build(problem.model().trainable_variables)

    with pytest.raises(ValueError, match=THE_RIGHT_CALL):
        build()


def test_an_inner_optimizer_of_another_model_is_refused():
    inner = keras.optimizers.SGD()
    ks.CrossShard(inner).build(problem.model().trainable_variables)
    with pytest.raises(ValueError, match="two models"):
        ks.CrossShard(inner).build(problem.model().trainable_variables)


@pytest.mark.neutral
@pytest.mark.parametrize("gradients", ["local", "global"])
def test_the_name_of_what_is_not_finite_is_right_beside_frozen_variables(monkeypatch, gradients):
    world = FakeWorld(2, is_spmd=False).hold(monkeypatch)

    def work(replicas):
        weights = [keras.Variable(np.ones(2, "float32"), name=name) for name in ("frozen", "good", "bad", "last")]
        optimizer = ks.CrossShard("sgd", on_nonfinite="skip", gradients=gradients)
        optimizer.build(weights)
        bad = np.nan if gradients == "global" or replicas.replica_id == 1 else 1.0
        optimizer.apply([keras.ops.full((2,), value) for value in (1.0, bad, 1.0)], weights[1:])
        return optimizer.last_nonfinite

    assert world.run(work) == [(None if gradients == "global" else 1, "bad")] * 2


@pytest.mark.neutral
def test_beside_a_frozen_variable_and_in_any_order_each_gets_its_own_gradient(monkeypatch):
    world = FakeWorld(2, is_spmd=False).hold(monkeypatch)

    def work(replicas):
        weights = [keras.Variable(np.zeros(2, "float32"), name=name) for name in "abc"]
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0))
        optimizer.build(weights)
        grads = [keras.ops.full((2,), value + replicas.replica_id) for value in (1.0, 5.0)]
        optimizer.apply(grads, [weights[2], weights[0]])
        return [float(keras.ops.convert_to_numpy(weight)[0]) for weight in weights]

    assert world.run(work) == [[-5.5, 0.0, -1.5]] * 2


@pytest.mark.neutral
def test_a_variable_that_one_replica_leaves_out_is_named_on_all(monkeypatch):
    world = FakeWorld(2, is_spmd=False).hold(monkeypatch)

    def work(replicas):
        weights = [keras.Variable(np.ones(2, "float32"), name=name) for name in ("first", "second", "third")]
        optimizer = ks.CrossShard("sgd", gradients="local")
        optimizer.build(weights)
        given = weights if replicas.replica_id == 0 else weights[1:]
        with pytest.raises(ValueError, match="`first`|'first'") as caught:
            optimizer.apply([keras.ops.ones(2) for _ in given], given)
        return str(caught.value)

    assert all("1" in message for message in world.run(work))


@pytest.mark.neutral
def test_inside_another_one_the_name_of_what_is_not_finite_is_right_too():
    weights = [keras.Variable(np.ones(2, "float32"), name=name) for name in ("good", "bad", "last")]
    inner = ks.CrossShard("sgd", on_nonfinite="skip")
    optimizer = ks.CrossShard(inner)
    optimizer.build(weights)
    optimizer.apply([keras.ops.full((2,), value) for value in (1.0, np.inf, 1.0)], weights)
    assert inner.last_nonfinite[1] == "bad" and int(optimizer.skipped_steps) == 1


@pytest.mark.neutral
def test_the_loss_scale_is_that_of_whatever_scales_inside():
    assert ks.CrossShard("sgd").loss_scale == 1.0
    scaled = keras.optimizers.SGD(loss_scale_factor=8.0)
    assert ks.CrossShard(ks.GradientClipping(scaled, 1.0)).loss_scale == 8.0


@pytest.mark.neutral
@pytest.mark.parametrize("name", ["reduction", "replica_clipnorm", "fused", "stages"])
def test_arguments_cannot_be_changed_afterwards(name):
    optimizer = ks.CrossShard("sgd")
    with pytest.raises(
        AttributeError, match=f"`{name}` of a `CrossShard` cannot be changed. Received: 'x'. Create a new"
    ):
        setattr(optimizer, name, "x")


def test_raise_reads_no_weights_to_name_them(monkeypatch):
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), on_nonfinite="raise")
    weight = keras.Variable(np.ones(2, "float32"))
    printed = []
    monkeypatch.setattr(keras.Variable, "__repr__", lambda self: printed.append(self.path) or self.path)
    optimizer.apply([keras.ops.ones(2)], [weight])
    assert not printed
    with pytest.raises(FloatingPointError, match=weight.path):
        optimizer.apply([keras.ops.array([1.0, np.nan])], [weight])


def test_the_name_of_a_nonfinite_gradient_does_not_depend_on_the_order():
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.1), on_nonfinite="skip")
    weights = [keras.Variable(np.ones(2, "float32"), name=name) for name in "abc"]
    optimizer.build(weights)
    finite, bad = keras.ops.ones(2), keras.ops.array([1.0, np.nan])
    for given in (weights, weights[::-1], weights[1:], [weights[2], weights[0]]):
        for each in given:
            optimizer.apply([bad if weight is each else finite for weight in given], given)
            assert optimizer.last_nonfinite == (0, each.path)
