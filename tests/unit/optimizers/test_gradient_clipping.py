import keras
import numpy as np
import pytest
from keras import ops
from support import golden, problem

import keras_shardopt as ks

CASES = golden.cases("clip_by_global_norm")


def float64_is_there(*dtypes):
    return "float64" not in dtypes or keras.config.backend() != "jax"


def is_of_tensorflow(grads):
    return any(golden.is_sparse(grad) for grad in grads)


def clipped(case):
    grads = [golden.tensor(grad, case["grad_dtype"]) for grad in case["grads"]]
    dtype = case["var_dtype"]
    variables = []
    for recorded in case["grads"]:
        shape = recorded["dense_shape"] if golden.is_sparse(recorded) else np.shape(recorded)
        variables.append(keras.Variable(np.zeros(shape), dtype=dtype))
    norm = ks.clip_by_global_norm(grads, case["clip_norm"])[1]
    return [grad for grad, _ in ks.clip_gradients_by_norm(zip(grads, variables), case["clip_norm"])], norm


@pytest.mark.parametrize("id", CASES)
def test_golden(id, backend):
    case = CASES[id]
    if is_of_tensorflow(case["grads"]) and backend != "tensorflow":
        pytest.skip("gradients are dense on this backend")
    if not float64_is_there(case["grad_dtype"], case["var_dtype"]):
        pytest.skip("JAX has no float64 by default")
    grads, norm = clipped(case)
    golden.assert_close(norm, case["global_norm"])
    for grad, expected in zip(grads, case["outputs"], strict=True):
        values = grad
        if expected["kind"] == "IndexedSlices":
            assert list(ops.convert_to_numpy(grad.indices)) == expected["indices"]
            values = grad.values
        assert keras.backend.standardize_dtype(values.dtype) == expected["dtype"]
        golden.assert_close(values, expected["values"], expected["dtype"])


def test_none_is_ignored_and_lists_may_be_tuples_or_empty():
    # The original documents this, and fails unless it is given the norm.
    three_four = ops.convert_to_tensor([3.0, 4.0])
    for use_norm in (None, 5.0):
        (first, second), norm = ks.clip_by_global_norm((three_four, None), 1.0, use_norm=use_norm)
        golden.assert_close(first, [0.6, 0.8])
        assert second is None and float(norm) == 5.0
    assert ks.clip_by_global_norm([], 1.0)[0] == []
    # Scalars keep their shape; the original made them vectors.
    (scalar,), _ = ks.clip_by_global_norm([ops.convert_to_tensor(5.0)], 1.0)
    assert tuple(scalar.shape) == () and float(scalar) == 1.0


@pytest.mark.parametrize("wrong", ["abc", {"a": 1.0}, np.ones(3)])
def test_what_is_no_list_is_refused(wrong):
    with pytest.raises(TypeError, match="`t_list` must be a list or tuple"):
        ks.clip_by_global_norm(wrong, 1.0)


def test_negative_limits_are_refused():
    with pytest.raises(ValueError, match="`clip_norm` must be >= 0"):
        ks.clip_by_global_norm([ops.ones(2)], -1.0)


def test_a_limit_of_zero_makes_zeros_and_leaves_those_that_are():
    for values in ([0.0, 0.0], [3.0, 4.0]):
        (clipped,), _ = ks.clip_by_global_norm([ops.convert_to_tensor(values)], 0.0)
        golden.assert_close(clipped, [0.0, 0.0])


def test_norms_of_half_precision_do_not_overflow():
    grads = [ops.full((4,), 300.0, dtype="float16"), ops.full((2,), 100.0, dtype="bfloat16")]
    result, norm = ks.clip_by_global_norm(grads, 1.0)
    assert float(norm) == pytest.approx(np.sqrt(4 * 300.0**2 + 2 * 100.0**2), rel=1e-3)
    assert [keras.backend.standardize_dtype(g.dtype) for g in result] == ["float16", "bfloat16"]
    weights = [keras.Variable(np.zeros(grad.shape), dtype=grad.dtype) for grad in grads]
    inside = ks.GradientClipping(keras.optimizers.SGD(), 1.0).transform_gradients(grads, weights)
    for one, other in zip(inside, result):
        np.testing.assert_allclose(ops.cast(one, "float32"), ops.cast(other, "float32"), rtol=1e-2)


def after_one_update(optimizer, grads):
    """How far SGD(1.0) moves the variables: the gradients that it has seen."""
    variables = [keras.Variable(np.zeros(np.shape(grad))) for grad in grads]
    optimizer.apply([ops.convert_to_tensor(np.array(grad, "float32")) for grad in grads], variables)
    return [-ops.convert_to_numpy(variable) for variable in variables]


def test_the_inner_optimizer_sees_clipped_gradients():
    grads = [[[3.0, 0.0], [0.0, 4.0]], [12.0], 0.0]
    seen = after_one_update(ks.GradientClipping(keras.optimizers.SGD(1.0), 6.5), grads)
    for got, grad in zip(seen, grads):
        np.testing.assert_allclose(got, np.array(grad) / 2, rtol=1e-6)
    np.testing.assert_array_equal(
        after_one_update(ks.GradientClipping(keras.optimizers.SGD(1.0), 13.5), [[3.1], [12.1]]),
        np.array([[3.1], [12.1]], "float32"),
    )


def test_an_overflow_is_still_seen_and_hides_in_no_other_gradient():
    inf, finite = after_one_update(ks.GradientClipping(keras.optimizers.SGD(1.0), 1.0), [[np.inf, 1.0], [2.0]])
    assert np.isnan(inf[0]) and inf[1] == 0 and finite[0] == 0
    assert np.isnan(after_one_update(ks.GradientClipping(keras.optimizers.SGD(1.0), 1.0), [[np.nan], [2.0]])).all()


@pytest.mark.parametrize(
    "scaled",
    [
        lambda: keras.optimizers.SGD(1.0, loss_scale_factor=64.0),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=64.0),
    ],
)
def test_the_limit_holds_for_the_gradient_of_the_unscaled_loss(scaled):
    optimizer = ks.GradientClipping(scaled(), 0.5)
    optimizer.build([keras.Variable([0.0, 0.0])])
    assert float(optimizer.scale_loss(ops.convert_to_tensor(1.0))) == 64.0
    (seen,) = after_one_update(ks.GradientClipping(scaled(), 0.5), [[3.0 * 64, 4.0 * 64]])
    np.testing.assert_allclose(seen, [0.3, 0.4], rtol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_equals_keras_global_clipnorm(run_eagerly):
    def trained(optimizer):
        x, y = problem.data(num_steps=4)
        model = problem.model()
        model.compile(optimizer, "mse", run_eagerly=run_eagerly)
        model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
        return model.get_weights()

    reference = trained(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1))
    for optimizer in (
        ks.GradientClipping(problem.sgd_momentum(), 0.1),
        ks.CrossShard(ks.GradientClipping(problem.sgd_momentum(), 0.1)),
    ):
        # The same formula in another order: a rounding more per update.
        assert problem.relative_difference(trained(optimizer), reference) <= 3 * problem.TOLERANCE


@pytest.mark.parametrize(("wrong", "error"), [(0.0, ValueError), (-1, ValueError), (None, TypeError), ("1", TypeError)])
def test_wrong_limits_are_refused(wrong, error):
    with pytest.raises(error, match="`clip_gradients` must be"):
        ks.GradientClipping("sgd", wrong)


def test_it_must_be_inside_cross_shard():
    with pytest.raises(ValueError, match=r"Use `CrossShard\(GradientClipping"):
        ks.GradientClipping(ks.CrossShard("sgd"), 1.0)


def test_next_values_of_float8_scales_are_no_gradients():
    scale, weight = keras.Variable(1.0, name="scale"), keras.Variable([0.0, 0.0])
    scale.overwrite_with_gradient = True
    optimizer = ks.GradientClipping(keras.optimizers.SGD(1.0), 1.0)
    optimizer.apply([ops.convert_to_tensor(100.0), ops.convert_to_tensor([0.3, 0.4])], [scale, weight])
    golden.assert_close(scale, 100.0)
    golden.assert_close(weight, [-0.3, -0.4])


@pytest.mark.parametrize("use_norm", [5, 5.0])
def test_a_norm_that_is_given_as_a_number(use_norm):
    clipped, _ = ks.clip_by_global_norm([keras.ops.convert_to_tensor([3.0, 4.0])], 0.5, use_norm=use_norm)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(clipped[0]), [0.3, 0.4], rtol=1e-6)


@pytest.mark.backends("torch")
def test_clipped_tensors_can_be_differentiated():
    import torch

    with torch.inference_mode():
        ks.clip_by_global_norm([torch.tensor([3.0, 4.0])], 1.0)
        weight = keras.Variable(np.ones(5))
        ks.GradientClipping(keras.optimizers.SGD(), 1.0).transform_gradients([torch.ones(5)], [weight])
    given = torch.tensor([3.0, 4.0], requires_grad=True)
    (clipped,), norm = ks.clip_by_global_norm([given], 1.0)
    (found,) = torch.autograd.grad(clipped[0], given)
    np.testing.assert_allclose(found, [0.128, -0.096], rtol=1e-5)
    assert norm.requires_grad
