"""Checks that several ranks make together. Each prints nothing and raises when it fails.

Arguments: the file to which rank 0 writes the names of the checks that passed, and the names to run.
"""

import json
import pathlib
import sys
import warnings

import keras
import numpy as np
import torch
import torch.distributed as dist
from support import problem
from torch.nn.parallel import DistributedDataParallel

import keras_shardopt as ks
from keras_shardopt.replica import framework, torch_distributed

warnings.filterwarnings("ignore")
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def refused(function, error, words):
    try:
        function()
    except error as caught:
        assert words in str(caught), str(caught)
    else:
        raise AssertionError(f"not refused: {words}")


def counted(function):
    """How many all-reduces the function makes, with their sizes."""
    sizes = []
    real = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        function()
    finally:
        dist.all_reduce = real
    return sizes


def gradients(model, x, y):
    for variable in model.trainable_variables:
        variable.value.grad = None
    keras.ops.mean(keras.ops.square(keras.ops.subtract(model(x), y))).backward()
    return [v.value.grad for v in model.trainable_variables]


def my_rows(scope, num_steps=1):
    return [problem.rows_of_replica(a, scope.replica_id, scope.num_replicas) for a in problem.data(num_steps)]


@check
def facts(scope):
    assert scope.num_replicas == scope.num_processes == dist.get_world_size()
    assert scope.replica_id == scope.process_id == dist.get_rank()
    assert scope.is_chief == (dist.get_rank() == 0)
    with ks.data_parallel() as nested:  # uses the open group and leaves it
        assert nested.num_replicas == scope.num_replicas
    assert dist.is_initialized()
    refused(lambda: ks.data_parallel(scope.num_replicas + 1).__enter__(), ValueError, "torchrun --nproc-per-node")


@check
def seeds_agree(scope):
    from keras.src.utils import rng_utils

    from keras_shardopt.replica.torch_distributed import _agree_on_seed

    keras.utils.set_random_seed(100 + scope.replica_id)
    _agree_on_seed()
    assert rng_utils.get_random_seed() == 100
    keras.utils.set_random_seed(55)
    _agree_on_seed()
    assert rng_utils.get_random_seed() == 55


@check
def loss_scaling_outside_is_refused_on_every_rank(scope):
    words = "must be inside `CrossShard`"
    refused(lambda: keras.optimizers.LossScaleOptimizer(ks.CrossShard("sgd")), ValueError, words)
    keras.config.set_dtype_policy("mixed_float16")
    model = problem.model()
    refused(lambda: model.compile(ks.CrossShard("sgd"), "mse"), ValueError, words)
    keras.config.set_dtype_policy("float32")


@check
def all_start_with_what_rank_0_has(scope):
    keras.utils.set_random_seed(scope.replica_id)
    layers = [keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    optimizer = ks.CrossShard(problem.sgd_momentum())
    optimizer.build(model.trainable_variables)
    for variable in [*model.variables, *optimizer.variables]:
        if "float" in variable.dtype:
            variable.assign_add(keras.ops.ones(variable.shape) * scope.replica_id)
    keras.random.normal((1,))  # makes Keras' global seed generator
    first = [v.numpy().copy() for v in model.trainable_variables]
    grads = [torch.full(tuple(v.shape), 1.0 + scope.replica_id) for v in model.trainable_variables]
    if scope.replica_id:
        grads[0] = torch.full_like(grads[0], float("nan"))  # of weights that nobody has any more
    velocity = [v.numpy().copy() for v in optimizer.variables[2:]]
    optimizer.apply(grads, model.trainable_variables)

    from keras.src.random.seed_generator import global_seed_generator

    state = [*model.variables, *optimizer.variables, global_seed_generator().state]
    assert framework.largest_difference(state) == 0
    if scope.is_chief:
        # Only rank 0's gradients are of the weights that all have now.
        for variable, start, speed in zip(model.trainable_variables, first, velocity):
            np.testing.assert_allclose(variable.numpy(), start + 0.9 * speed - 0.1, rtol=1e-5)


@check
def equal_starts_use_every_gradient(scope):
    model = problem.model()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0))
    grads = [torch.full(tuple(v.shape), float(scope.replica_id)) for v in model.trainable_variables]
    optimizer.apply(grads, model.trainable_variables)
    mean = (scope.num_replicas - 1) / 2
    for weight, start in zip(model.get_weights(), problem.start_weights()):
        np.testing.assert_allclose(weight, start - mean, rtol=1e-6, atol=1e-6)


@check
def other_shapes_are_refused_on_every_rank(scope):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2 + (scope.replica_id == 1))])
    optimizer = ks.CrossShard("sgd")
    grads = [torch.ones(tuple(v.shape)) for v in model.trainable_variables]
    before = model.get_weights()
    refused(lambda: optimizer.apply(grads, model.trainable_variables), ValueError, "same trainable variables")
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))


@check
def other_optimizers_are_refused_on_every_rank(scope):
    model = problem.model()
    optimizer = ks.CrossShard("adam" if scope.replica_id == 1 else "sgd")
    grads = [torch.ones(tuple(v.shape)) for v in model.trainable_variables]
    refused(lambda: optimizer.apply(grads, model.trainable_variables), ValueError, "same optimizer variables")


@check
def an_overflow_on_any_rank_is_skipped_on_all(scope):
    def scaled(inner):
        return ks.LossScaling(inner, "Backoff", {"scale_max": 64.0})

    ways = {
        "in CrossShard": lambda inner: ks.CrossShard(scaled(inner)),
        "around CrossShard": lambda inner: scaled(ks.CrossShard(inner)),
        "masters": lambda inner: ks.CrossShard(
            ks.MixedPrecision(inner, ks.AutomaticLossScaler("Backoff", {"scale_max": 64.0}))
        ),
    }
    for way, wrap in ways.items():
        for bad_rank, bad in ((0, np.inf), (scope.num_replicas - 1, np.nan)):
            x, y = my_rows(scope, num_steps=4)
            rows = len(x) // 4
            if scope.replica_id == bad_rank:
                x[rows, 1] = bad
            if way == "masters":
                keras.config.set_dtype_policy("bfloat16")
            model = problem.model()
            keras.config.set_dtype_policy("float32")
            model.compile(wrap(problem.sgd_momentum()), "mse")
            model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
            optimizer = model.optimizer
            assert framework.largest_difference([*model.variables, *optimizer.variables]) == 0
            assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (32.0, 1), (way, bad)
            assert int(optimizer.iterations) == 3
            if way == "masters":
                continue
            reference = problem.model()
            whole_x, whole_y = (np.delete(a.reshape(4, 16, -1), 1, 0).reshape(48, -1) for a in problem.data(4))
            reference.compile(problem.sgd_momentum(), "mse")
            reference.fit(whole_x, whole_y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
            assert problem.relative_difference(model.get_weights(), reference.get_weights()) <= problem.TOLERANCE


@check
def none_on_one_rank_counts_as_zero(scope):
    model = problem.model()
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0))
    grads = [torch.ones(tuple(v.shape)) for v in model.trainable_variables]
    grads[3] = None
    if scope.replica_id == 1:
        grads[0] = None
    optimizer.apply(grads, model.trainable_variables)
    start, weights = problem.start_weights(), model.get_weights()
    np.testing.assert_allclose(weights[0], start[0] - 1 + 1 / scope.num_replicas, rtol=1e-5)
    np.testing.assert_allclose(weights[1], start[1] - 1, rtol=1e-5)
    np.testing.assert_array_equal(weights[3], start[3])
    assert scope.largest_difference(model) == 0


@check
def what_ddp_has_reduced_is_not_reduced_again(scope):
    x, y = my_rows(scope)
    whole_x, whole_y = problem.data(1)
    reference = problem.model()
    keras.optimizers.SGD(1.0).apply(gradients(reference, whole_x, whole_y), reference.trainable_variables)

    model = problem.model()
    owner = DistributedDataParallel(model)
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0))
    optimizer.build(model.trainable_variables)

    def step():
        for variable in model.trainable_variables:
            variable.value.grad = None
        keras.ops.mean(keras.ops.square(keras.ops.subtract(owner(x), y))).backward()
        grads = [v.value.grad for v in model.trainable_variables]
        return counted(lambda: optimizer.apply(grads, model.trainable_variables))

    first = step()  # one number, from the common start, and the gradients once more while DDP is not known
    assert len(first) == 2, first
    for weight, expected in zip(model.get_weights(), reference.get_weights()):
        np.testing.assert_allclose(weight, expected, atol=1e-6)
    assert step() == []
    assert step() == []
    with owner.no_sync():  # DDP leaves the gradients local, so they are ours to reduce
        assert len(step()) == 1
    assert step() == []
    # What does not go through DDP is not reduced by it.
    assert len(counted(lambda: optimizer.apply(gradients(model, x, y), model.trainable_variables))) == 1
    assert scope.largest_difference(model) == 0


@check
def a_ddp_that_fit_does_not_call_reduces_nothing(scope):
    x, y = my_rows(scope, num_steps=3)
    model = problem.model()
    unused = DistributedDataParallel(model)
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    model.fit(x, y, batch_size=problem.BATCH_SIZE // scope.num_replicas, shuffle=False, verbose=0)
    assert scope.largest_difference(model) == 0
    del unused


@check
def buckets_and_dtypes(scope):
    replicas = framework.replicas("batch")
    sizes = [3, 400, 5, 1000, 2, 7]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float16, torch.bfloat16]
    tensors = [torch.full((n, 1), float(scope.replica_id + 1), dtype=d) for n, d in zip(sizes, dtypes)]
    found = []
    real, torch_distributed.BUCKET_BYTES = torch_distributed.BUCKET_BYTES, 2000
    calls = counted(lambda: found.extend(replicas.all_reduce(tensors, "mean")))
    torch_distributed.BUCKET_BYTES = real
    assert sorted(calls) == [2, 5, 7, 403, 1000], calls
    mean = (scope.num_replicas + 1) / 2
    for result, tensor in zip(found, tensors):
        assert result.shape == tensor.shape and result.dtype == tensor.dtype
        np.testing.assert_allclose(result.double().numpy(), mean)
        assert float(tensor[0]) == scope.replica_id + 1  # the argument is left alone
    scalar = replicas.all_reduce([torch.tensor(float(scope.replica_id))], "max")[0]
    assert float(scalar) == scope.num_replicas - 1 and scalar.shape == ()


@check
def moves(scope):
    replicas = framework.replicas("batch")
    mine = torch.arange(4.0) + 10.0 * scope.replica_id
    found = problem.moves(replicas, mine)
    everyones = {}
    for name, value in found.items():
        everyones[name] = [None] * 4
        dist.all_gather_object(everyones[name], value.numpy())
    problem.check_moves(everyones)


@check
def a_difference_is_found(scope):
    model = problem.model()
    assert scope.largest_difference(model) == 0
    if scope.replica_id == 1:
        weights = model.get_weights()
        weights[2][0, 0] += 0.25
        model.set_weights(weights)
    assert abs(scope.largest_difference(model) - 0.25) < 1e-6


@check
def compiled_steps(scope):
    x, y = my_rows(scope, num_steps=3)
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", jit_compile=True)
    model.fit(x, y, batch_size=problem.BATCH_SIZE // scope.num_replicas, shuffle=False, verbose=0)
    torch._dynamo.reset()
    whole_x, whole_y = problem.data(num_steps=3)
    reference = problem.model()
    reference.compile(problem.sgd_momentum(), "mse")
    reference.fit(whole_x, whole_y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(model.get_weights(), reference.get_weights()) <= problem.TOLERANCE
    assert scope.largest_difference(model) == 0


def main():
    file, *names = sys.argv[1:]
    with ks.data_parallel() as scope:
        pass
    assert not dist.is_initialized()  # nothing was made inside
    model = problem.model()
    model.compile(ks.CrossShard("sgd"), "mse")
    refused(lambda: model.fit(*problem.data(1), verbose=0), ValueError, "no process group is open")
    with ks.data_parallel() as scope:
        kept = ks.CrossShard("sgd")
        for name in names:
            try:
                CHECKS[name](scope)
            except BaseException:
                print(f"rank {scope.replica_id} failed in the check {name!r}", flush=True)
                raise
            dist.barrier()
    assert dist.is_initialized()  # for `fit` after the block
    if scope.is_chief:
        pathlib.Path(file).write_text(json.dumps(names))
    scope.close()
    assert not dist.is_initialized()
    del kept


if __name__ == "__main__":
    main()
