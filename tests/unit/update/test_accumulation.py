"""Windows of micro-batches on one replica, and what is refused."""

import keras
import numpy as np
import pytest
from keras import ops
from support import problem

import keras_shardopt as ks


def apply(optimizer, weights, *grads):
    optimizer.apply([None if g is None else ops.full(w.shape, g) for g, w in zip(grads, weights)], weights)


def values(weights):
    return [float(ops.convert_to_numpy(w)[0]) for w in weights]


def two_weights():
    return [keras.Variable([10.0, 10.0], name=f"w{i}") for i in range(2)]


def test_a_gradient_that_is_missing_counts_as_zero_and_one_that_is_never_there_as_none():
    weights = two_weights()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2)
    apply(optimizer, weights, 4.0, None)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        apply(optimizer, weights, None, None)
    assert values(weights) == [8.0, 10.0]
    apply(optimizer, weights, None, 2.0)
    apply(optimizer, weights, 6.0, None)
    assert values(weights) == [5.0, 9.0]
    assert int(optimizer.iterations) == 2


def test_micro_steps_may_have_other_variables():
    weights = two_weights()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2)
    optimizer.build(weights)
    apply(optimizer, weights[1:], 4.0)
    apply(optimizer, weights[:1], 2.0)
    assert values(weights) == [9.0, 8.0]


def test_a_variable_that_a_window_did_not_have_stays():
    weights = two_weights()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0, momentum=0.5), gradient_accumulation_steps=2)
    optimizer.build(weights)
    for given in (weights, weights, weights[1:], weights[1:]):
        apply(optimizer, given, *[1.0] * len(given))
    assert values(weights) == [9.0, 7.5]


def test_a_variable_that_is_frozen_within_a_window_stays():
    weights = two_weights()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2)
    optimizer.build(weights)
    apply(optimizer, weights, 2.0, 4.0)
    weights[0].trainable = False
    apply(optimizer, weights[1:], 2.0)
    assert values(weights) == [10.0, 7.0]


@pytest.mark.neutral
def test_after_a_reset_a_window_that_the_caller_ends_takes_nothing_of_the_one_before():
    weights = two_weights()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=3)
    optimizer.build(weights)
    apply(optimizer, weights, 4.0, 4.0)
    optimizer.accumulation.reset()
    assert optimizer.accumulation.sums.mean_with_last(True) is None
    optimizer.accumulation.window.decide(True)
    mean = optimizer.accumulation.sums.mean_with_last(True)
    assert values([mean(0, ops.full((2,), 6.0))]) == [2.0]


@pytest.mark.backends("tensorflow", "torch")  # on JAX Keras takes all variables that an optimizer was built on
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_layer_that_is_frozen_later_stays(run_eagerly):
    model = problem.model()
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), gradient_accumulation_steps=2)
    for frozen in (False, True):
        model.layers[0].trainable = not frozen
        model.compile(optimizer, "mse", run_eagerly=run_eagerly)
        before = [w.copy() for w in model.get_weights()]
        model.fit(*problem.data(num_steps=4), batch_size=problem.BATCH_SIZE, verbose=0)
        changed = [np.any(a != b) for a, b in zip(model.get_weights(), before)]
        assert changed == [not frozen, not frozen, True, True]


@pytest.mark.backends("tensorflow")
def test_compiled_micro_steps_with_other_variables_warn():
    import tensorflow as tf

    weights = two_weights()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2)
    optimizer.build(weights)
    for given in (weights, weights[1:]):
        step = tf.function(lambda: apply(optimizer, given, *[1.0] * len(given)))  # noqa: B023
        if given is weights:
            step()
        else:
            with pytest.warns(UserWarning, match=f"without .'{weights[0].path}'"):
                step()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_next_window_is_clean_also_where_nobody_checks(bad):
    weights = two_weights()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=2)
    apply(optimizer, weights, bad, 1.0)
    apply(optimizer, weights, 1.0, 1.0)
    assert not np.isfinite(values(weights)[0])
    for weight in weights:
        weight.assign([1.0, 1.0])
    for _ in range(2):
        apply(optimizer, weights, 1.0, 1.0)
    assert values(weights) == [0.0, 0.0]


@pytest.mark.exhaustive("jax", "tensorflow")
def test_files_fit_any_number_of_steps_and_a_window_starts_anew(tmp_path):
    x, y = problem.data(3)

    def trained(optimizer, file=None):
        model = problem.model()
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
        if file is not None:
            model.load_weights(file)
        model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
        return model

    file = tmp_path / "window.weights.h5"
    model = trained(ks.CrossShard("adam", gradient_accumulation_steps=2, on_nonfinite="skip"))
    model.save_weights(file)  # with one gradient of the second window
    expected = trained(keras.optimizers.Adam(), file).get_weights()
    others = [{}, {"gradient_accumulation_steps": 1}, {"on_nonfinite": "skip"}]
    for arguments in others:
        found = trained(ks.CrossShard("adam", **arguments), file)
        for a, b in zip(found.get_weights(), expected):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    model.load_weights(file)
    again = trained(ks.CrossShard("adam", gradient_accumulation_steps=2), file)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_it_tells_how_many_steps():
    optimizer = ks.CrossShard("adam", gradient_accumulation_steps=3, on_nonfinite="raise")
    assert optimizer.gradient_accumulation_steps == 3
    assert "gradient_accumulation_steps=3, on_nonfinite='raise'" in repr(optimizer)
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert restored.get_config() == optimizer.get_config()
    with pytest.raises(ValueError, match="cannot be changed"):
        optimizer.gradient_accumulation_steps = 2


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ks.CrossShard("sgd", gradient_accumulation_steps=0), ValueError, "must be at least 1. Received"),
        (lambda: ks.CrossShard("sgd", gradient_accumulation_steps=2.0), TypeError, "must be an int. Received"),
        (lambda: ks.CrossShard("sgd", gradient_accumulation_steps=True), TypeError, "must be an int. Received"),
        (lambda: ks.CrossShard("sgd", on_nonfinite="stop"), ValueError, '`on_nonfinite` must be "ignore"'),
        (
            lambda: ks.CrossShard(keras.optimizers.Adam(gradient_accumulation_steps=2), gradient_accumulation_steps=3),
            ValueError,
            r"Use `CrossShard\(Adam\(...\), gradient_accumulation_steps=3\)`",
        ),
        (
            lambda: ks.LossScaling(ks.CrossShard("sgd", gradient_accumulation_steps=2)),
            ValueError,
            r"Use `CrossShard\(LossScaling\(inner_optimizer\), gradient_accumulation_steps=...\)`",
        ),
        (
            lambda: ks.CrossShard(ks.CrossShard("sgd", gradient_accumulation_steps=2)),
            ValueError,
            "must be passed to the outer `CrossShard`",
        ),
        (
            lambda: ks.CrossShard(ks.LossScaling("sgd"), on_nonfinite="raise"),
            ValueError,
            "end training at the first overflow",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_does(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_half_precision_is_added_up_in_float32():
    weight = keras.Variable([0.0], dtype="bfloat16")
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=64)
    optimizer.build([weight])
    assert {v.dtype for v in optimizer._replica_state} == {"float32"}
    for i in range(64):
        optimizer.apply([ops.cast([256.0 if i == 0 else 1.0], "bfloat16")], [weight])
    # (256 + 63) / 64, where a sum in bfloat16 stays 256
    np.testing.assert_allclose(float(ops.convert_to_numpy(ops.cast(weight, "float32"))[0]), -4.98, atol=0.02)


def test_next_values_take_the_largest_of_the_window():
    scale, weight = keras.Variable([1.0, 1.0]), keras.Variable([1.0, 1.0])
    scale.overwrite_with_gradient = True
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), gradient_accumulation_steps=3)
    optimizer.build([scale, weight])
    for number, rows in enumerate([(8.0, 9.0), (9.0, 9.0), (8.0, 8.0), (1.0, 9.0), (7.0, 2.0), (4.0, 1.0)], 1):
        grads = [ops.convert_to_tensor(rows), ops.convert_to_tensor(rows)]
        optimizer.apply(grads, [scale, weight])
        if number == 3:  # and the next window takes nothing of this one
            np.testing.assert_array_equal(ops.convert_to_numpy(scale), [9.0, 9.0])
    np.testing.assert_array_equal(ops.convert_to_numpy(scale), [7.0, 9.0])
    np.testing.assert_allclose(ops.convert_to_numpy(weight), 1 - np.array([37.0, 38.0]) / 3, rtol=1e-6)


@pytest.mark.backends("tensorflow")
def test_sums_in_place_are_those_of_a_choice_between_two_tensors():
    import tensorflow as tf

    from keras_shardopt.backends.active import runtime
    from keras_shardopt.backends.runtime import Runtime

    random = np.random.default_rng(0)
    batches = [[random.normal(size=5).astype("float32"), None, random.normal(size=2).astype("float32")] for _ in "1234"]
    batches[1][0][2] = np.nan  # which must not outlive its window

    def sums(add_n):
        totals = [keras.Variable(np.full(size, np.nan, "float32"), trainable=False) for size in (5, 3, 2)]
        step = tf.function(lambda first, last, starts: add_n(totals, [first, None, last], starts))
        found = []
        for number, (first, _, last) in enumerate(batches):
            step(tf.constant(first), tf.constant(last), tf.constant(number % 2 == 0))
            found += [keras.ops.convert_to_numpy(total) for total in totals]
        return found

    for mine, general in zip(sums(runtime.add_n), sums(lambda *args: Runtime.add_n(runtime, *args))):
        np.testing.assert_array_equal(mine, general)
