"""What is not finite, found in sums of squares, which overflow before their elements do."""

import re

import keras
import numpy as np
import pytest

import keras_shardopt as ks
from keras_shardopt.backends import norms

NAN, INF = float("nan"), float("inf")
VALUES = {
    "finite": ([1.0, -2.0], True),
    "nan": ([1.0, NAN], False),
    "inf": ([INF, 1.0], False),
    "minus_inf": ([0.0, -INF], False),
    "whose_squares_overflow": ([1e30, -1e30], True),
    "whose_squares_vanish": ([1e-30, 0.0], True),
    "none": ([], True),
}


def tensors(names, dtype):
    return [keras.ops.cast(keras.ops.convert_to_tensor(VALUES[name][0], "float32"), dtype) for name in names]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("odd", list(VALUES))
def test_each_tensor_is_looked_at(odd, dtype):
    names = ["finite", odd, "whose_squares_vanish", "nan" if odd == "inf" else "finite"]
    found = keras.ops.convert_to_numpy(norms.are_finite(tensors(names, dtype)))
    np.testing.assert_array_equal(found, [VALUES[name][1] for name in names])


@pytest.mark.parametrize("odd", [name for name in VALUES if name != "none"])
def test_a_loss_scale_falls_where_an_element_is_not_finite(odd):
    weight = keras.Variable([1.0, 2.0])
    optimizer = ks.LossScaling(keras.optimizers.SGD(0.0), "Backoff", {"scale_max": 8.0})
    optimizer.build([weight])
    optimizer.apply(tensors([odd], "float32"))
    finite = VALUES[odd][1]
    assert float(optimizer.loss_scale) == (8.0 if finite else 4.0)
    assert int(optimizer.skipped_steps) == (0 if finite else 1)


# XLA for CPUs would write a mask as large as the gradient to memory, and a copy of the weights for a branch.
@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "make", [lambda o: ks.CrossShard(o, on_nonfinite="skip"), ks.LossScaling], ids=["on_nonfinite", "LossScaling"]
)
def test_an_update_that_may_be_skipped_writes_its_weights_only(make):
    import jax

    weight = keras.Variable(np.ones((5, 7), "float32"))
    optimizer = make(keras.optimizers.SGD(0.1))
    optimizer.build([weight])
    states = [variable.value for variable in optimizer.variables]
    step = jax.jit(optimizer.stateless_apply, donate_argnums=2)
    text = step.lower(states, [weight.value], [weight.value]).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    made = [line for line in entry.splitlines() if re.search(r"= (\(.*)?\w+\[5,7\]", line) and "parameter(" not in line]
    assert not [line for line in made if "pred[5,7]" in line]
    assert len([line for line in made if " fusion(" in line or " copy(" in line]) == 1


@pytest.mark.backends("torch")
def test_rows_that_a_sparse_gradient_repeats_are_added_first():
    import torch

    from keras_shardopt.backends.torch.nonfinite import first_not_finite

    def sparse(*values):
        return torch.sparse_coo_tensor(
            [[1] * len(values)], [[value] for value in values], (3, 1), check_invariants=True
        )

    assert first_not_finite([sparse(3e38, -3e38), None, sparse(3e38, 3e38)]) == 3
