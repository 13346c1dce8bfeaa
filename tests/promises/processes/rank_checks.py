"""Checks that several ranks make together. Each prints nothing and raises when it fails.

Arguments: the file to which rank 0 writes the names of the checks that passed, and the names to run.
"""

import contextlib
import functools
import json
import pathlib
import sys
import tempfile
import warnings
from unittest import mock

import keras
import numpy as np
import torch
import torch.distributed as dist
from keras.src.saving.saving_lib import H5IOStore
from promises.problems import every_argument, flips
from support import checks, problem, reducing, worlds
from support.checks import check, refused
from torch.nn.parallel import DistributedDataParallel

import keras_shardopt as ks
from keras_shardopt.backends.active import placement, processes, runtime
from keras_shardopt.backends.side_channel import NUM_MARKS
from keras_shardopt.backends.torch import communicator as torch_communicator
from keras_shardopt.backends.torch import placement as torch_placement
from keras_shardopt.fit.scope import largest_difference
from keras_shardopt.update import exchange
from keras_shardopt.update.trainer_context import BatchShare, batch_shared

warnings.filterwarnings("ignore")


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

    from keras_shardopt.backends.torch.processes import _agree_on_seed

    keras.utils.set_random_seed(100 + scope.replica_id)
    _agree_on_seed()
    assert rng_utils.get_random_seed() == 100
    keras.utils.set_random_seed(55)
    _agree_on_seed()
    assert rng_utils.get_random_seed() == 55


@check
def every_argument_does_what_the_docstring_says(scope):
    """Arguments with each other, against NumPy: a third of the rows, as replicas in threads try all of them."""
    limits = {
        "inner_optimizer": ["momentum", "adam clipnorm", "scaled", "masters", "larc"],
        "gradients": [("auto", "local"), *[(state, state) for state in ("local", "prescaled", "summed", "global")]],
        "program": ["several"],
        "name": [None],
    }
    for row in [*every_argument.rows(**limits), *every_argument.threesomes(**limits)][::3]:
        mine = every_argument.variables(row)
        if row["rows"] == "other start" and scope.replica_id in (2, 3):
            for variable in mine:
                variable.assign(variable + 1)
        optimizer = every_argument.cross_shard(row)
        optimizer.build(mine)
        replicas = runtime.communicator("batch")
        try:
            with torch.no_grad():
                errors = every_argument.train(row, replicas, mine, optimizer, scope.replica_id)
            found = [keras.ops.convert_to_numpy(v) for v in mine]
            every_argument.check(row, scope.replica_id, found, optimizer, errors)
        except Exception as error:
            error.add_note(every_argument.told(row))
            raise


@check
def what_ddp_has_reduced_counts_also_on_a_rank_without_rows(scope):
    x, y = my_rows(scope)
    for num_steps in (None, 2):
        reference = problem.model()
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        for _ in range(6 // (num_steps or 1)):
            inner.apply(gradients(reference, *problem.data(1)), reference.trainable_variables)
        model = problem.model()
        owner = DistributedDataParallel(model)
        optimizer = ks.CrossShard(problem.sgd_momentum(), gradient_accumulation_steps=num_steps)
        optimizer.build(model.trainable_variables)
        for _ in range(6):
            for variable in model.trainable_variables:
                variable.value.grad = None
            keras.ops.mean(keras.ops.square(keras.ops.subtract(owner(x), y))).backward()
            grads = [v.value.grad for v in model.trainable_variables]
            num_rows = 0 if scope.replica_id == 3 else len(x)
            with batch_shared(BatchShare(num_rows, len(x) * scope.num_replicas, runtime.communicator("batch"))):
                optimizer.apply(grads, model.trainable_variables)
        assert problem.relative_difference(model.get_weights(), reference.get_weights()) <= problem.TOLERANCE
        assert largest_difference([*model.trainable_variables, *optimizer.inner.variables]) == 0
        assert all(np.any(a != b) for a, b in zip(model.get_weights(), problem.start_weights()))


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
    assert largest_difference(state) == 0
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
    refused(
        lambda: optimizer.apply(grads, model.trainable_variables), ValueError, "shape (5, 3) in float32 on process 1"
    )
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))


@check
def other_optimizers_are_refused_on_every_rank(scope):
    model = problem.model()
    optimizer = ks.CrossShard("adam" if scope.replica_id == 1 else "sgd")
    grads = [torch.ones(tuple(v.shape)) for v in model.trainable_variables]
    refused(lambda: optimizer.apply(grads, model.trainable_variables), ValueError, "class of optimizer 1")


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
        if way == "masters":
            keras.config.set_dtype_policy("bfloat16")
        reference = problem.model()
        keras.config.set_dtype_policy("float32")
        whole_x, whole_y = (np.delete(a.reshape(4, 16, -1), 1, 0).reshape(48, -1) for a in problem.data(4))
        inner = problem.sgd_momentum()
        reference.compile(ks.MixedPrecision(inner) if way == "masters" else inner, "mse")
        reference.fit(whole_x, whole_y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
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
            assert largest_difference([*model.variables, *optimizer.variables]) == 0
            assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (32.0, 1), (way, bad)
            assert int(optimizer.iterations) == 3
            found, expected = model.get_weights(), reference.get_weights()
            if way == "masters":
                found, expected = (
                    [m.optimizer.get_slot(v, "master").numpy() for v in m.trainable_variables]
                    for m in (model, reference)
                )
            # Activations and gradients in bfloat16 have 8 bits, and each rank rounds its own.
            tolerance = 2**-6 if way == "masters" else problem.TOLERANCE
            assert problem.relative_difference(found, expected) <= tolerance, way


@check
def all_enter_and_the_chief_saves(scope):
    mine = pathlib.Path(tempfile.mkdtemp())
    folder = processes.gather_objects(mine)[0]
    x, y = my_rows(scope, num_steps=2)
    model = problem.model()
    model.compile(ks.CrossShard(worlds.InParts(keras.optimizers.Adam(0.01))), "mse")
    save = ks.callbacks.ModelCheckpoint(mine / "{epoch}" / "best.keras", "loss", save_best_only=True)
    rows = dict(batch_size=len(x) // 2, shuffle=False, verbose=0)
    model.fit(x, y, callbacks=[save], **rows)
    whole = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
    model.optimizer.inner.forget()
    ks.save_model(model, mine / "model.keras")
    ks.save_weights(model, mine / "model.weights.h5")
    for name in ("model.keras", "model.weights.h5", "1/best.keras"):
        assert (folder / name).is_file(), name  # for all, at once
        plain = problem.model()
        plain.compile(ks.CrossShard(keras.optimizers.Adam(0.01)), "mse")
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(folder / name)
        found = [variable.numpy() for variable in [*plain.variables, *plain.optimizer.variables]]
        assert all((a == b).all() for a, b in zip(found, whole)), name
    # Backups of what each rank has a part of: everybody gets its part again.
    backup = ks.callbacks.BackupAndRestore(mine / "backup")
    backup.set_model(model)
    backup.on_epoch_end(0)
    before = [variable.numpy().copy() for variable in model.optimizer.variables]
    for variable in model.optimizer.variables:
        variable.assign(keras.ops.zeros(variable.shape))
    backup.on_train_begin()
    for one, other in zip(before, model.optimizer.variables):
        np.testing.assert_array_equal(one, other.numpy())
    assert scope.is_chief or not any(mine.iterdir())
    # What fails on rank 0 fails on all.
    words = f"`{folder}/nowhere/model.keras` cannot"
    refused(lambda: ks.save_model(model, mine / "nowhere" / "model.keras"), FileNotFoundError, words)
    with contextlib.ExitStack() as stack:
        if scope.is_chief:  # in the middle of what all gather
            stack.enter_context(mock.patch.object(H5IOStore, "__setitem__", full_disk))
        refused(lambda: ks.save_model(model, mine / "model.keras"), OSError, "the disk is full")
    ks.save_model(model, mine / "model.keras", overwrite=True)


def full_disk(store, key, value):
    if store._h5_entry_path == "optimizer" and key == "4":
        raise OSError("the disk is full")
    store.h5_file.create_dataset(f"{store._h5_entry_path}/vars/{key}", data=value)


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

    first = step()  # one number, from the common start
    assert first == [1], first
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
    replicas = runtime.communicator("batch")
    sizes = [3, 400, 5, 1000, 2, 7]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float16, torch.bfloat16]
    tensors = [torch.full((n, 1), float(scope.replica_id + 1), dtype=d) for n, d in zip(sizes, dtypes)]
    found = []
    real, torch_communicator.BUCKET_BYTES = torch_communicator.BUCKET_BYTES, 2000
    calls = counted(lambda: found.extend(replicas.all_reduce(tensors, "mean")))
    torch_communicator.BUCKET_BYTES = real
    assert sorted(calls) == [2, 5, 7, 403, 1000], calls
    mean = (scope.num_replicas + 1) / 2
    for result, tensor in zip(found, tensors):
        assert result.shape == tensor.shape and result.dtype == tensor.dtype
        np.testing.assert_allclose(result.double().numpy(), mean)
        assert float(tensor[0]) == scope.replica_id + 1  # the argument is left unchanged
    scalar = replicas.all_reduce([torch.tensor(float(scope.replica_id))], "max")[0]
    assert float(scalar) == scope.num_replicas - 1 and scalar.shape == ()


@check
def moves(scope):
    replicas = runtime.communicator("batch")
    mine = torch.arange(4.0) + 10.0 * scope.replica_id
    found = problem.moves(replicas, mine)
    everyones = {}
    for name, value in found.items():
        everyones[name] = [None] * 4
        dist.all_gather_object(everyones[name], value.numpy())
    problem.check_moves(everyones)


GROUPS = [[0, 3], [1, 2]]


@check
def groups_drift_apart_and_are_made_once(scope):
    real, made = dist.new_group, []

    def counting(ranks=None, *args, **kwargs):
        made.append(list(ranks))
        return real(ranks, *args, **kwargs)

    runtime.communicator("batch").forget_groups()
    dist.new_group = counting
    x, y = (problem.rows_of_replica(a, scope.replica_id, scope.num_replicas) for a in problem.data(6))
    for clipnorm in (None, problem.CLIPNORM):
        model = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum(), group_assignment=GROUPS, replica_clipnorm=clipnorm)
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=problem.BATCH_SIZE // scope.num_replicas, shuffle=False, verbose=0)
        expected = problem.replicas_in_numpy(4, clipnorm, GROUPS, num_steps=6)[scope.replica_id]
        assert problem.relative_difference(model.get_weights(), expected) <= problem.TOLERANCE
        assert scope.largest_difference(model) > 1e-2
    dist.new_group = real
    assert made == GROUPS, made


@check
def compression_within_groups_divides_by_their_size(scope):
    """Each addend is divided by the members of its group: divided by fewer, the sum overflows."""
    (mine,) = [group for group in GROUPS if scope.replica_id in group]
    variables = problem.model().trainable_variables
    shapes = [tuple(v.shape) for v in variables]
    everyones = [
        [np.random.default_rng(10 * r + i).normal(size=s).astype("float32") for i, s in enumerate(shapes)]
        for r in range(scope.num_replicas)
    ]
    for dtype, unit, largest in (("float16", 2.0**-11, 6e4), ("bfloat16", 2.0**-8, 1e38)):
        for local in everyones:
            local[1][0] = largest  # of which float16 cannot hold two
        for reduction, arguments in (("mean", {}), ("sum", {}), ("mean", {"gradient_accumulation_steps": 2})):
            start = [v.numpy().copy() for v in variables]
            optimizer = ks.CrossShard(
                keras.optimizers.SGD(1.0), reduction, GROUPS, compression=dtype, fused=False, **arguments
            )
            for _ in range(arguments.get("gradient_accumulation_steps", 1)):
                grads = [torch.tensor(g) for g in everyones[scope.replica_id]]
                if reduction == "sum":
                    grads[1][0] = 1.0  # the sum of the others fits
                with torch.no_grad():
                    optimizer.apply(grads, variables)
            for i, (variable, before) in enumerate(zip(variables, start)):
                members = np.stack([everyones[r][i] for r in mine]).astype("float64")
                if reduction == "sum" and i == 1:
                    members[:, 0] = 1.0
                expected = getattr(np, reduction)(members, axis=0)
                scale = len(mine) if reduction == "sum" else 1
                moved = before.astype("float64") - variable.numpy()
                # Of each addend and of their sum; then the weights, in float32.
                bound = (len(mine) + 1) * unit * scale * np.mean(np.abs(members), axis=0) + 1e-6
                assert (np.abs(moved - expected) <= bound).all(), (dtype, reduction, arguments, i)
                variable.assign(before)


@check
def one_reduction_per_update_within_a_group(scope):
    model = problem.model()
    optimizer = ks.CrossShard("sgd", group_assignment=GROUPS, replica_clipnorm=1.0)
    grads = [torch.ones(tuple(v.shape)) for v in model.trainable_variables]
    optimizer.apply(grads, model.trainable_variables)
    sizes = counted(lambda: optimizer.apply(grads, model.trainable_variables))
    # With which gradients there are, what is trained, who goes on or ends, and whether another group has failed.
    flags = len(grads) + NUM_MARKS + 3
    assert sizes == [sum(g.numel() for g in grads) + flags], sizes


@check
def groups_start_together_each_on_its_own(scope):
    """Each group takes its first rank's weights, and gradients of other weights do not count, clipped or not."""
    rank = scope.replica_id
    model = problem.model()
    model.set_weights([w + rank for w in problem.start_weights()])
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), group_assignment=GROUPS, replica_clipnorm=1.0)
    size = 10.0 if rank in (0, 1) else float("nan")  # the first of [0, 3] and of [1, 2]
    grads = [torch.full(tuple(v.shape), size) for v in model.trainable_variables]
    optimizer.apply(grads, model.trainable_variables)
    first = 0 if rank in (0, 3) else 1
    length = sum(g.numel() for g in grads) ** 0.5
    for weight, start in zip(model.get_weights(), problem.start_weights()):
        np.testing.assert_allclose(weight, start + first - 1 / length, rtol=1e-5, atol=1e-6)


@check
def a_loss_that_adds_up_is_warned_of_once_where_the_mean_is_wrong(scope):
    def warned(reduction, loss, prepared=False, calls=1):
        model = problem.model()
        model.compile(ks.CrossShard("sgd", reduction=reduction), loss)
        if prepared:
            ks.prepare(model, auto_shard=False)
        x, y = my_rows(scope, num_steps=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(calls):
                model.fit(x, y, batch_size=len(x) // 2, shuffle=False, verbose=0)
        return [str(w.message) for w in caught if "a loss that sums over rows" in str(w.message)]

    def adding():
        return keras.losses.MeanSquaredError(reduction="sum")

    messages = warned("mean", adding(), calls=2)
    assert len(messages) == scope.is_chief
    times = f"{scope.num_replicas} times too small"
    assert all(times in message and 'CrossShard(..., reduction="sum")' in message for message in messages)
    assert warned("sum", adding()) == []
    assert warned("mean", "mse") == []
    assert warned("mean", adding(), prepared=True) == []


class Noise(keras.layers.Layer):
    """Draws from a generator of its own, and from Keras' global one, and keeps what a layer makes of ones."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.seeds, self.seen = layer, keras.random.SeedGenerator(3), []

    def call(self, inputs, training=False):
        if not training or isinstance(inputs, keras.KerasTensor) or inputs.device.type == "meta":
            return inputs
        drawn = [keras.random.normal((2, 3), seed=seed) for seed in (self.seeds, None)]
        drawn.append(self.layer(torch.ones(6, 7), training=True))
        self.seen += [keras.ops.convert_to_numpy(each).ravel() for each in drawn]
        return inputs


def noise_of(way, layer):
    keras.utils.set_random_seed(8)
    noise = Noise(layer())
    model = keras.Sequential([keras.Input((5,)), noise, keras.layers.Dense(3)])
    model.compile("sgd" if way == "alone" else ks.CrossShard("sgd"), "mse")
    if way == "prepared":
        ks.prepare(model, auto_shard=False)
    for _ in range(2):
        model.fit(np.ones((6, 5)), np.ones((6, 3)), batch_size=2, shuffle=False, verbose=0)
    return list(noise.seen), model


@check
def ranks_draw_other_numbers_from_equal_seeds(scope):
    def default():
        return keras.layers.Dropout(0.5)

    def seeded():
        return keras.layers.Dropout(0.5, seed=4)

    for layer, ways in ((default, ("unprepared", "prepared")), (seeded, ("prepared",))):
        alone, _ = noise_of("alone", layer)
        for way in ways:
            mine, model = noise_of(way, layer)
            assert len(mine) == 3 * 6
            if layer is default:
                again, _ = noise_of(way, layer)
                assert all((a == b).all() for a, b in zip(mine, again)), "not reproducible"
            if scope.is_chief:  # what one process draws
                assert all((a == b).all() for a, b in zip(mine, alone))
            everyones = processes.gather_objects(mine)
            for number, drawn in enumerate(zip(*everyones)):
                for i, some in enumerate(drawn):
                    assert not any((some == other).all() for other in drawn[:i]), (layer, way, number, i)
            assert largest_difference(model.variables) == 0  # seeds too: what files hold
            # Weights of what is built later, and seeds that are numbers.
            later = keras.layers.Dense(4)
            later.build((None, 9))
            values = keras.Variable(keras.random.normal((4,), seed=7))
            assert largest_difference([later.kernel, values]) == 0
            # Orders that are drawn between steps: all ranks must divide the same.
            orders = [keras.random.shuffle(np.arange(20), seed=seed) for seed in (keras.random.SeedGenerator(5), None)]
            orders = [keras.ops.convert_to_numpy(order).tolist() for order in orders]
            everyones = processes.gather_objects([*orders, epochs_of(ShufflingWithASeed())])
            assert all(each == everyones[0] for each in everyones), everyones


class ShufflingWithASeed(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.seeds, self.rows = keras.random.SeedGenerator(6), np.arange(12)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.rows[2 * index : 2 * index + 2].tolist()

    def on_epoch_end(self):
        self.rows = keras.ops.convert_to_numpy(keras.random.shuffle(self.rows, seed=self.seeds))


def epochs_of(dataset):
    """What all ranks together see in an epoch: each row once, if they have shuffled alike."""
    part = ks.shard_data(dataset)
    seen = []
    for _ in range(2):
        mine = [part[i] for i in range(len(part))]
        seen.append(sorted(row for rows in processes.gather_objects(mine) for batch in rows for row in batch))
        part.on_epoch_end()
    assert seen == [list(range(12))] * 2, seen
    return seen


@check
def a_layer_frozen_on_one_rank_is_named_in_every_group(scope):
    words = "`mlp/hidden/kernel`, `mlp/hidden/bias` not trained on replica 1"
    is_in_its_group = scope.replica_id in next(group for group in GROUPS if 1 in group)
    x, y = my_rows(scope)
    for meets, inner, arguments in (
        (False, problem.sgd_momentum(), {}),
        # Groups that decide together wait for each other in each update.
        (True, problem.sgd_momentum(), {"on_nonfinite": "skip"}),
        (True, ks.LossScaling(problem.sgd_momentum(), "Backoff", {"scale_max": 1.0}), {}),
    ):
        model = problem.model()
        variables = model.trainable_variables
        optimizer = ks.CrossShard(inner, group_assignment=GROUPS, **arguments)
        optimizer.build(variables)

        def update(model=model, optimizer=optimizer):
            optimizer.apply(gradients(model, x, y), model.trainable_variables)

        update()
        dist.barrier()
        model.layers[0].trainable = scope.replica_id != 1
        before = model.get_weights()
        if meets or is_in_its_group:
            refused(update, ValueError, words)
        dist.barrier()
        if not (meets or is_in_its_group):  # at the latest when training ends
            refused(functools.partial(optimizer.finalize_variable_values, variables), ValueError, words)
        assert all((a == b).all() for a, b in zip(before, model.get_weights()))
        model.layers[0].trainable = True
        dist.barrier()
        update()
        assert not any((a == b).all() for a, b in zip(before, model.get_weights()))


@check
def clipping_comes_before_the_weight_of_the_first_gradients(scope):
    """Where only rank 0's gradients count, they count as often as there are ranks, but not before they are clipped."""
    model = problem.model()
    if scope.replica_id:
        model.set_weights([w + 1 for w in problem.start_weights()])
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), replica_clipnorm=1.0)
    grads = [torch.full(tuple(v.shape), 1e-3) for v in model.trainable_variables]
    optimizer.apply(grads, model.trainable_variables)
    for weight, start in zip(model.get_weights(), problem.start_weights()):
        np.testing.assert_allclose(weight, start - 1e-3, rtol=1e-5, atol=1e-7)


@check
def groups_of_other_sizes_are_refused_on_every_rank(scope):
    model = problem.model()
    optimizer = ks.CrossShard("sgd", group_assignment=[[0, 1]])
    grads = [torch.ones(tuple(v.shape)) for v in model.trainable_variables]
    refused(lambda: optimizer.apply(grads, model.trainable_variables), ValueError, "but the program has 4")


@check
def ddp_leaves_no_gradients_to_clip(scope):
    x, y = my_rows(scope)
    model = problem.model()
    owner = DistributedDataParallel(model)
    optimizer = ks.CrossShard("sgd", replica_clipnorm=1.0)
    keras.ops.mean(keras.ops.square(keras.ops.subtract(owner(x), y))).backward()
    grads = [v.value.grad for v in model.trainable_variables]
    for _ in range(2):
        refused(lambda: optimizer.apply(grads, model.trainable_variables), ValueError, "keras_shardopt.prepare(model)")
        keras.ops.mean(keras.ops.square(keras.ops.subtract(owner(x), y))).backward()


@check
def minimize_equals_one_process(scope):
    whole_x, whole_y = problem.data(num_steps=4)
    x, y = my_rows(scope, num_steps=4)
    for scale in (None, 1024.0):
        model, reference = problem.model(), problem.model()
        optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=scale))
        alone = problem.sgd_momentum()
        rows = problem.BATCH_SIZE // scope.num_replicas
        for i in range(4):
            mine = slice(i * rows, (i + 1) * rows)
            batch = slice(i * problem.BATCH_SIZE, (i + 1) * problem.BATCH_SIZE)

            def loss(mine=mine, model=model):
                return keras.ops.mean(keras.ops.square(keras.ops.subtract(model(x[mine]), y[mine])))

            optimizer.minimize(loss, model.trainable_variables)
            alone.apply(gradients(reference, whole_x[batch], whole_y[batch]), reference.trainable_variables)
        assert problem.relative_difference(model.get_weights(), reference.get_weights()) <= problem.TOLERANCE
        assert scope.largest_difference(model) == 0


@check
def minimize_through_ddp(scope):
    """DDP reduces in `backward`, so that is what `minimize` has to call."""
    x, y = my_rows(scope)
    whole_x, whole_y = problem.data(1)
    model, reference = problem.model(), problem.model()
    owner = DistributedDataParallel(model)
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0))

    def loss():
        return keras.ops.mean(keras.ops.square(keras.ops.subtract(owner(x), y)))

    for i in range(3):
        sizes = counted(lambda: optimizer.minimize(loss, model.trainable_variables))
        assert (sizes == []) == (i > 0), sizes
        keras.optimizers.SGD(1.0).apply(gradients(reference, whole_x, whole_y), reference.trainable_variables)
    for weight, expected in zip(model.get_weights(), reference.get_weights()):
        np.testing.assert_allclose(weight, expected, atol=1e-5)


@check
def a_difference_is_found(scope):
    model = problem.model()
    assert scope.largest_difference(model) == 0
    if scope.replica_id == 1:
        weights = model.get_weights()
        weights[2][0, 0] += 0.25
        model.set_weights(weights)
    assert abs(scope.largest_difference(model) - 0.25) < 1e-6


class Others(keras.callbacks.Callback):
    """Logs of a validation that is worse and worse on rank 1, and better and better elsewhere."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = 3.0 * epoch if self.rank == 1 else -0.5 * epoch


def decisions(scope, *synchronised):
    """What callbacks decide from logs that differ, on all ranks."""
    x, y = my_rows(scope, num_steps=2)
    model = problem.model()
    model.compile(keras.optimizers.SGD(1.0), "mse")  # without exchange, so that ranks may stop when they like
    plateau = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=2, min_delta=0)
    callbacks = [Others(scope.replica_id), *synchronised, plateau, keras.callbacks.EarlyStopping(patience=4)]
    history = model.fit(x, y, epochs=8, callbacks=callbacks, verbose=0).history
    everyones = [None] * scope.num_replicas
    dist.all_gather_object(everyones, history)
    return everyones


@check
def callbacks_decide_alike_from_averaged_logs(scope):
    everyones = decisions(scope, ks.callbacks.SyncReplicas())
    assert all(history == everyones[0] for history in everyones), everyones
    mean = (3.0 - 0.5 * (scope.num_replicas - 1)) / scope.num_replicas
    np.testing.assert_allclose(everyones[0]["val_loss"], mean * np.arange(5), rtol=1e-12)
    np.testing.assert_allclose(everyones[0]["learning_rate"], [1, 1, 1, 0.5, 0.5])
    # Without it they do not, so the above can fail.
    everyones = decisions(scope)
    assert [len(history["loss"]) for history in everyones] == [8, 5] + [8] * (scope.num_replicas - 2)


@check
def metrics_on_one_rank_only_are_refused_on_every_rank(scope):
    x, y = my_rows(scope)
    model = problem.model()
    model.compile("sgd", "mse")
    validation = dict(validation_data=(x, y)) if scope.is_chief else {}
    arguments = dict(callbacks=[ks.callbacks.SyncReplicas()], verbose=0, **validation)
    words = "['loss', 'val_loss'] on process 0, ['loss'] on process 1"
    refused(lambda: model.fit(x, y, **arguments), ValueError, words)


@check
def sync_replicas_starts_all_with_what_rank_0_has(scope):
    keras.utils.set_random_seed(scope.replica_id)
    layers = [keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    keras.random.normal((1,))  # makes Keras' global seed generator
    from keras.src.random.seed_generator import global_seed_generator

    state = [*model.variables, *model.optimizer.variables, global_seed_generator().state]
    for variable in state:
        variable.assign(keras.ops.convert_to_tensor(variable) + scope.replica_id)
    first = [v.numpy().copy() for v in state]
    callback = ks.callbacks.SyncReplicas()
    callback.set_model(model)
    real, placement.broadcast_state = placement.broadcast_state, lambda *_: None
    callback.on_train_begin()
    placement.broadcast_state = real
    assert largest_difference(state) >= 1  # so the check below can fail
    callback.on_train_begin()
    assert largest_difference(state) == 0
    if scope.is_chief:
        assert all((v.numpy() == before).all() for v, before in zip(state, first))


@check
def sync_replicas_refuses_other_models_on_every_rank(scope):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2 + (scope.replica_id == 2))])
    model.compile("sgd", "mse")
    callback = ks.callbacks.SyncReplicas()
    callback.set_model(model)
    refused(callback.on_train_begin, ValueError, "must have the same")


def checking(model):
    check = ks.callbacks.CheckReplicas()
    check.set_model(model)
    return check


@check
def one_flipped_bit_is_found_in_100_of_100_trials(scope):
    def make():
        return ks.CrossShard(keras.optimizers.Adam(0.01))

    model = flips.trained_with_many_dtypes(make, my_rows(scope))
    dtypes = {variable.dtype for variable in flips.compared(model)}
    assert {"float32", "bfloat16", "float16", "float64", "int32"} <= dtypes, dtypes

    def flip(variable, replica, element, bit):
        if replica == scope.replica_id:
            flips.flip(variable, replica, element, bit)

    flips.check_trials(checking(model), model, scope.num_replicas, flip)


@check
def elements_that_changed_places_are_found(scope):
    model = problem.model()
    kernel = model.trainable_variables[0]
    for values in ((1.0, 2.0), (0.25, -0.25), (0.0, -0.0), (float("nan"), 1.0)):
        start = kernel.numpy().copy()
        start[0, 0], start[3, 5] = values
        kernel.assign(start)
        check = checking(model)
        check.check()
        if scope.replica_id == 2:
            flips.swap(kernel, 2, 0, 3 * 7 + 5)
        refused(check.check, RuntimeError, "`mlp/hidden/kernel` on replica 2, against replicas 0, 1 and 3")


@check
def fingerprints_of_large_tensors_count_every_chunk(scope):
    large = keras.Variable(np.zeros(3 * torch_placement._CHUNK + 17, "float32"))
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    seen = {placement.fingerprints([large]).tobytes()}
    places = [0, torch_placement._CHUNK - 1, torch_placement._CHUNK, 2 * torch_placement._CHUNK + 5, -1]
    for place in places:
        values = np.zeros(tuple(large.shape), "float32")
        values[place] = 1
        large.assign(values)
        rows = placement.fingerprints([large])
        assert (rows == rows[0]).all()
        seen.add(rows.tobytes())
    assert len(seen) == len(places) + 1
    del model


@check
def other_numbers_of_variables_are_refused_on_every_rank(scope):
    variables = problem.model().trainable_variables
    mine = variables[: 3 if scope.replica_id == 1 else 4]
    refused(lambda: placement.fingerprints(mine), ValueError, "[4, 3, 4, 4] variables, by rank")


@check
def check_replicas_stops_fit_on_every_rank(scope):
    x, y = my_rows(scope, num_steps=6)
    arguments = dict(batch_size=problem.BATCH_SIZE // scope.num_replicas, shuffle=False, verbose=0)
    model = problem.model()
    model.compile(ks.CrossShard(problem.sgd_momentum(), overlap=False), "mse")
    model.fit(x, y, callbacks=[ks.callbacks.CheckReplicas(2)], **arguments)

    real, exchange.move = exchange.move, reducing.replacing(lambda grads, *_: grads)  # local from here on
    fit = lambda: model.fit(x, y, callbacks=[ks.callbacks.CheckReplicas(4)], **arguments)  # noqa: E731
    words = (
        "after 4 batches of this `fit`: different values of `mlp/hidden/kernel` on replica 0 against replica 1 against"
    )
    refused(fit, RuntimeError, words)
    exchange.move = real


def main():
    file, *names = sys.argv[1:]
    with ks.data_parallel() as scope:
        pass
    assert not dist.is_initialized()  # nothing was made inside
    model = problem.model()
    model.compile(ks.CrossShard("sgd"), "mse")
    refused(lambda: model.fit(*problem.data(1), verbose=0), ValueError, "no process group is open")
    with ks.data_parallel(prepare=False) as scope:
        kept = ks.CrossShard("sgd")
        checks.make(scope, names, dist.barrier)
    assert dist.is_initialized()  # for `fit` after the block
    if scope.is_chief:
        pathlib.Path(file).write_text(json.dumps(names))
    scope.close()
    assert not dist.is_initialized()
    del kept


if __name__ == "__main__":
    main()
