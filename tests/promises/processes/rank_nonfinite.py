"""NaN and infinity on each of the ranks that torchrun started, in every way; an error on all of them; rollback.

Each check prints nothing and raises when it fails. Arguments: as in rank_checks.py.
"""

import itertools
import warnings

import keras
import numpy as np
import torch
import torch.distributed as dist
from promises.problems import nonfinite
from support import checks, problem
from support.checks import check, refused

import keras_shardopt as ks
from keras_shardopt.backends.side_channel import NUM_MARKS
from keras_shardopt.fit.scope import largest_difference

warnings.filterwarnings("ignore")


def run(optimizer, weights, steps, rank):
    optimizer.build(weights)
    for grads in steps:
        scale = nonfinite.number(optimizer.loss_scale)
        optimizer.apply([torch.from_numpy(grad[rank] * np.float32(scale)) for grad in grads], weights)


@check
def the_update_is_left_out_on_all_ranks(scope):
    rank = scope.replica_id
    for way, (wrap, arguments) in nonfinite.WAYS.items():
        optimizer, weights = ks.CrossShard(wrap(problem.sgd_momentum()), **arguments), nonfinite.weights()
        optimizer.build(weights)
        state = [*weights, *optimizer.variables]
        start = [v.numpy().copy() for v in state]
        for bad, bad_rank in itertools.product((np.nan, np.inf), range(scope.num_replicas)):
            for variable, value in zip(state, start):
                variable.assign(value)
            run(optimizer, weights, nonfinite.gradients(bad, bad_rank), rank)
            nonfinite.check(way, optimizer, [w.numpy() for w in weights], bad_rank, rank)
        if way != "in groups":
            assert largest_difference([*weights, *optimizer._shared_variables]) == 0


@check
def which_rank_it_was_is_asked_only_where_something_is_bad(scope):
    calls, real = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    optimizer, weights = ks.CrossShard("sgd", on_nonfinite="skip"), nonfinite.weights()
    run(optimizer, weights, nonfinite.gradients(), scope.replica_id)
    optimizer.finalize_variable_values(weights)
    dist.all_reduce = real
    # 5 elements, the presence of 2 gradients, which variables are trained, who goes on and who ends, and three flags of
    # buckets; the common start comes first.
    good = [5 + 2 + NUM_MARKS + 2 + 3]
    assert calls[1:] == good * (nonfinite.NUM_STEPS + 1), calls
    calls.clear()
    dist.all_reduce = counting
    optimizer, weights = ks.CrossShard("sgd", on_nonfinite="skip"), nonfinite.weights()
    run(optimizer, weights, nonfinite.gradients(np.nan, 2), scope.replica_id)
    dist.all_reduce = real
    # After the bad update's, one number of each rank.
    assert calls[1:] == [*good * (nonfinite.BAD_STEP + 1), scope.num_replicas, *good * 2], calls
    # Where gradients travel at once, two digits of each rank travel along.
    calls.clear()
    dist.all_reduce = counting
    optimizer, weights = ks.CrossShard("sgd", on_nonfinite="skip", overlap=False), nonfinite.weights()
    run(optimizer, weights, nonfinite.gradients(np.nan, 2), scope.replica_id)
    dist.all_reduce = real
    assert calls[1:] == [5 + 2 + NUM_MARKS + 2 + 2 * scope.num_replicas] * nonfinite.NUM_STEPS, calls


@check
def every_rank_raises(scope):
    optimizer = ks.CrossShard("sgd", on_nonfinite="raise", gradient_accumulation_steps=2)
    weights = nonfinite.weights()
    steps = nonfinite.gradients(np.inf, 3)
    refused(
        lambda: run(optimizer, weights, steps, scope.replica_id),
        FloatingPointError,
        "on replica 3, first in the gradient of second",
    )
    assert int(optimizer.iterations) == 0
    assert largest_difference(weights) == 0


# -- what forward passes have changed ------------------------------------------------------------------------------

FEATURES = 3
NUM_BATCHES = 8


def normalized(optimizer, prepared=True):
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dropout(0.25, seed=3),
        keras.layers.Dense(1, kernel_initializer="ones"),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return ks.prepare(model, auto_shard=False) if prepared else model


def rows_of(rank, num_rows):
    x = np.random.default_rng(rank).normal(size=(NUM_BATCHES, num_rows, FEATURES)).astype("float32")
    return x, np.tanh(x[..., :1])


def fit(model, x, y):
    model.fit(x.reshape(-1, FEATURES), y.reshape(-1, 1), batch_size=x.shape[1], shuffle=False, verbose=0)


def state(model):
    return [keras.ops.convert_to_numpy(v).copy() for v in model.variables]


@check
def a_skipped_update_leaves_no_statistics_or_seeds_behind(scope):
    """On any rank; ranks have 1 to 4 rows of each batch."""
    rank = scope.replica_id
    scaled = {"scaling": nonfinite._scaled, "stock": lambda inner: keras.optimizers.LossScaleOptimizer(inner, 4.0)}
    for wrap, arguments, prepared in (
        (nonfinite._unchanged, {"on_nonfinite": "skip"}, True),
        (nonfinite._unchanged, {"on_nonfinite": "skip", "gradient_accumulation_steps": 4}, True),
        (nonfinite._unchanged, {"on_nonfinite": "skip", "shard_state": True, "fused": False}, True),
        (scaled["scaling"], {}, True),
        (scaled["stock"], {"gradient_accumulation_steps": 4}, True),
        (scaled["scaling"], {"shard_state": True, "fused": False}, True),
        (scaled["stock"], {}, False),
    ):
        x, y = rows_of(rank, 1 + rank if prepared else 2)
        size = arguments.get("gradient_accumulation_steps", 1)
        bad = 5
        good = [i for i in range(NUM_BATCHES) if i // size != bad // size]
        expected = normalized(ks.CrossShard(wrap(problem.sgd_momentum()), **arguments), prepared)
        fit(expected, x[good], y[good])
        poisoned = x.copy()
        if rank == 2:
            poisoned[bad, 0, 1] = np.nan
        found = normalized(ks.CrossShard(wrap(problem.sgd_momentum()), **arguments), prepared)
        fit(found, poisoned, y)
        assert nonfinite.number(found.optimizer.iterations) == len(good) // size
        seed = found.layers[1].seed_generator.state.numpy()
        assert prepared is False or seed[1] == len(good), seed
        for variable, value, other in zip(found.variables, state(found), state(expected)):
            np.testing.assert_array_equal(value, other, err_msg=f"{variable.path} with {arguments}")


@check
def moving_statistics_are_those_of_each_ranks_rows(scope):
    """Those of each rank's rows, averaged when the epoch ends; of a rank without rows, as they were."""
    rank, num_ranks = scope.replica_id, scope.num_replicas
    everyones = [rows_of(r, 1 + r)[0] for r in range(num_ranks)]
    num_batches = [NUM_BATCHES if r < num_ranks - 1 else 3 for r in range(num_ranks)]
    model = normalized(ks.CrossShard("sgd", on_nonfinite="skip"))
    x, y = rows_of(rank, 1 + rank)
    fit(model, x[: num_batches[rank]], y[: num_batches[rank]])
    own = []
    for x, num in zip(everyones, num_batches):
        mean, variance = np.zeros(FEATURES), np.ones(FEATURES)
        for batch in x[:num].astype("float64"):
            mean, variance = (mean + batch.mean(axis=0)) / 2, (variance + batch.var(axis=0)) / 2
        own.append((mean, variance))
    layer = model.layers[0]
    for variable, values in zip((layer.moving_mean, layer.moving_variance), zip(*own)):
        np.testing.assert_allclose(variable.numpy(), np.mean(values, axis=0), rtol=1e-5, atol=1e-6)


@check
def nan_on_a_rank_without_rows(scope):
    """A rank that has no batch left takes part with its last one, whose NaN no longer counts."""
    rank, num_ranks = scope.replica_id, scope.num_replicas
    for size in (1, 2):
        optimizer = ks.CrossShard("sgd", on_nonfinite="skip", gradient_accumulation_steps=size)
        model = normalized(optimizer)
        x, y = rows_of(rank, 2)
        if rank == num_ranks - 1:
            x, y = x[:4].copy(), y[:4]
            x[3, 0, 0] = np.nan
        fit(model, x, y)
        assert nonfinite.number(optimizer.skipped_steps) == 1
        assert nonfinite.number(optimizer.iterations) == NUM_BATCHES // size - 1
        assert all(np.isfinite(value).all() for value in state(model))


if __name__ == "__main__":
    checks.main(ks.data_parallel, dist.barrier)
