"""Convolutions on JAX in the layout for which XLA has kernels on CPUs, with the values that they had."""

import re

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.jax import trainer

import keras_shardopt as ks
from keras_shardopt.fit.jax.convolutions import in_layout_of_kernels

pytestmark = pytest.mark.backends("jax")

layers = keras.layers


def values(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def gradients(*shapes, **how):
    """Of a convolution, by both of its arguments."""

    def loss(lhs, rhs):
        return (jax.lax.conv_general_dilated(lhs, rhs, **how) ** 2).sum()

    return jax.grad(loss, (0, 1)), [values(*shape) for shape in shapes]


def in_a_loop(*args):
    function, arguments = gradients(*args, **SQUARE)
    return (
        lambda lhs, rhs: jax.lax.scan(lambda rhs, _: (rhs + 0.01 * function(lhs, rhs)[1], 1.0), rhs, None, length=2)[0],
        arguments,
    )


SQUARE = {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
IMAGES, KERNEL = (2, 5, 6, 4), (3, 2, 4, 3)
CASES = {
    "space of one dimension": lambda: gradients(
        (2, 7, 4), (3, 4, 3), window_strides=(2,), padding="VALID", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "strides": lambda: gradients(IMAGES, KERNEL, **SQUARE),
    "dilation": lambda: gradients(IMAGES, KERNEL, **{**SQUARE, "window_strides": (1, 1), "rhs_dilation": (2, 2)}),
    "groups": lambda: gradients(IMAGES, (3, 2, 1, 8), **SQUARE, feature_group_count=4),
    "channels first": lambda: gradients(
        (2, 4, 5, 6), (3, 4, 2, 2), window_strides=(1, 2), padding="SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    ),
    "in a loop": lambda: in_a_loop(IMAGES, (3, 3, 4, 3)),
    "in a function that is compiled": lambda: (jax.jit(CASES["strides"]()[0]), CASES["strides"]()[1]),
}


@pytest.mark.parametrize("case", CASES)
def test_values_stay_and_the_layout_is_that_of_kernels(case):
    function, arguments = CASES[case]()
    changed = in_layout_of_kernels(function)
    for found, expected in zip(*(jax.tree.leaves(f(*arguments)) for f in (changed, function)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert set(layouts(function, *arguments)) - {"ours"} and set(layouts(changed, *arguments)) == {"ours"}


def layouts(function, *arguments):
    """Of each convolution in a program, as XLA gets it; "ours" for that of kernels."""
    found = re.findall(r"dim_numbers = (\[.*?\]->\[.*?\])", jax.jit(function).lower(*arguments).as_text())
    ours = re.compile(r"\[b, (?:\d, )+f\]x\[(?:\d, )+i, o\]->\[b, (?:\d, )+f\]")
    return ["ours" if ours.fullmatch(each) else each for each in found]


def test_what_a_function_returns_keeps_its_structure():
    given = {"a": values(2), "b": [values(3), None]}
    found = in_layout_of_kernels(lambda tree, factor: ({**tree, "c": tree["a"] * factor}, None))(given, 2.0)
    assert jax.tree.structure(found) == jax.tree.structure(({**given, "c": given["a"]}, None))
    np.testing.assert_array_equal(found[0]["c"], given["a"] * 2)


PARTS, CLIP = {"virtual_replicas": 2}, {"replica_clipnorm": 1.0}


@pytest.mark.parametrize(
    ("num_devices", "options", "num_rows", "number"),
    # Three of the second layer, of the first one no gradient of the images; of uneven rows for each number of them.
    [(1, PARTS, 4, 5), (2, PARTS, 4, 5), (2, CLIP, 3, 10)],
)
def test_a_step_in_parts_has_kernels_for_all_its_convolutions(num_devices, options, num_rows, number, monkeypatch):
    texts = []
    jit = trainer.jit

    def noting(function, **how):
        step = jit(function, **how)

        def run(*args):
            texts.append(step.lower(*args).compile().as_text())
            return step(*args)

        return run

    monkeypatch.setattr(trainer, "jit", noting)
    with ks.data_parallel(num_devices) as replicas:
        model = keras.Sequential(
            [
                keras.Input((12, 12, 2)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.Conv2D(4, 3, strides=2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile(ks.CrossShard("sgd", **options), "mse")
    model.train_on_batch(values(num_rows, 12, 12, 2), values(num_rows, 1))
    replicas.close()
    found = re.findall(r" convolution\(.*dim_labels=(\w+->\w+)", texts[0])
    assert len(found) == number
    assert set(found) == {"b01f_01io->b01f"}
