"""The losses of the parts of a batch add up to Keras' own loss of the whole batch."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.losses import loss as keras_loss
from support import problem
from support.suites import some

from keras_shardopt.backends.communicator import SingleReplica
from keras_shardopt.update import losses as whole_batch
from keras_shardopt.update.trainer_context import BatchShare, batch_shared

# Shapes of values, weights and mask. The weights of the fourth make the values larger than they were.
SHAPES = [
    ((7,), (7,), (7,)),
    ((7, 3), (7, 1), (7, 1)),
    ((7, 3), (7, 3), (7, 3, 1)),
    ((7, 1), (7, 3), (7, 1)),
    ((7, 2, 3), (7, 2, 3), (7, 2, 1)),
    ((7, 1), (7,), (7,)),
]
# The bits of each, and as many again for the sums in another order.
TOLERANCES = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-6}


class Together(SingleReplica):
    """Replicas that run one after the other: first all of them tell what they have, then all of them hear the sum."""

    def __init__(self, num_replicas):
        self.num_replicas = num_replicas
        self.told = []
        self.heard = None

    def all_reduce(self, tensors, op):
        if self.heard is None:
            self.told.append([ops.convert_to_numpy(tensor) for tensor in tensors])
            return list(tensors)
        return [ops.convert_to_tensor(sum(each).astype("float32")) for each in zip(*self.told)]


def loss_of_parts(function, arrays, divided, num_padding):
    """The mean of what `function` gives for the rows of each replica, with rows that must not count at the end."""
    replicas = Together(len(divided))
    for replicas.heard in (None, True):
        losses = []
        for rows in divided:
            padded = np.concatenate([rows, np.zeros(num_padding, "int32")])
            mine = [None if array is None else array[padded] for array in arrays]
            part = BatchShare(len(rows), len(arrays[0]), replicas, ends_early=bool(num_padding))
            with batch_shared(part):
                losses.append(float(ops.convert_to_numpy(ops.cast(function(*mine), "float32"))))
    return np.mean(losses)


@pytest.fixture
def shared():
    model = problem.model()
    model.compile("sgd", "mse")
    whole_batch.share_losses(model)


@pytest.mark.backends("tensorflow", "torch")  # JAX compiles for each shape, and takes minutes
@pytest.mark.parametrize(
    ("dtype", "reduction"),
    some(
        itertools.product(TOLERANCES, ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]),
        [("float32", "sum"), ("float32", "sum_over_batch_size"), ("float16", "mean_with_sample_weight")],
        "tensorflow",
    ),
)
def test_parts_add_up_to_the_loss_of_the_whole(shared, reduction, dtype):
    random = np.random.default_rng(5)
    for shape, of_weights, of_mask in SHAPES:
        values = random.uniform(0.5, 2, shape).astype("float32")
        weights = random.uniform(0, 3, of_weights).astype("float32")
        mask = random.random(of_mask) < 0.6
        for weight, masked in ((None, None), (weights, None), (None, mask), (weights, mask), (weights, mask & False)):

            def loss(values, weight, mask, reduction=reduction):
                return keras_loss.reduce_weighted_values(values, weight, mask, reduction, dtype)

            expected = float(ops.convert_to_numpy(ops.cast(loss(values, weight, masked), "float32")))
            divided = [np.array(rows, "int32") for rows in ([0, 1, 2, 3, 4], [5, 6], [])]
            for num_padding in (0, 2):
                got = loss_of_parts(loss, [values, weight, masked], divided, num_padding)
                np.testing.assert_allclose(got, expected, rtol=TOLERANCES[dtype], err_msg=str(shape))


def test_a_float16_has_room_for_the_sum_but_not_for_more(shared):
    values = np.full((6, 1000), 9.0, "float16")  # sums to 54000, and a float16 ends at 65504

    def loss(values):
        return keras_loss.reduce_weighted_values(values, dtype="float16")

    divided = [np.array(rows, "int32") for rows in ([0, 1, 2, 3], [4], [5])]
    assert loss_of_parts(loss, [values], divided, 0) == pytest.approx(9.0, rel=4e-3)


def test_a_mean_over_no_rows_is_no_loss(shared):
    def loss(values):
        return keras_loss.reduce_weighted_values(ops.mean(values))

    values = np.arange(1.0, 7.0, dtype="float32")
    divided = [np.arange(4, dtype="int32"), np.array([4, 5], "int32"), np.array([], "int32")]
    assert loss_of_parts(loss, [values], divided, 0) == pytest.approx(3.5)


def test_keras_loss_is_its_own_elsewhere(shared):
    y, p = np.ones((3, 2), "float32"), np.zeros((3, 2), "float32")
    assert float(keras.losses.MeanSquaredError()(y, p)) == 1.0
