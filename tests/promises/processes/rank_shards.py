"""Checks of divided optimizer state that several ranks make together. Each prints nothing and raises when it fails.

Arguments: the file to which rank 0 writes the names of the checks that passed, and the names to run.
"""

import datetime
import pathlib
import sys
import time
import warnings
from unittest import mock

import keras
import numpy as np
import torch
import torch.distributed as dist
from keras.src.saving.saving_lib import H5IOStore
from promises.problems import gan
from support import checks, problem
from support.checks import NullStore, check, refused

import keras_shardopt as ks
from keras_shardopt.backends.active import processes
from keras_shardopt.backends.torch import communicator as torch_communicator
from keras_shardopt.backends.torch import memory
from keras_shardopt.backends.torch import process_group as torch_group
from keras_shardopt.fit.scope import largest_difference
from keras_shardopt.optimizers import gradient_clipping
from keras_shardopt.sharding import flat_state, sharded_files
from keras_shardopt.sharding import slices as sharding

warnings.filterwarnings("ignore")
NUM_STEPS = 3


def variables(dtype="float32", constraint=None):
    """Of sizes that divide by nothing, one of them with most of the elements."""
    random = np.random.default_rng(3)
    shapes = {
        "embedding/table": (101, 7),
        "hidden/kernel": (7, 11),
        "hidden/bias": (11,),
        "out/kernel": (11, 3),
        "gain": (),
    }
    made = []
    for path, shape in shapes.items():
        *scopes, name = path.split("/")
        with keras.name_scope(scopes[0]) if scopes else keras.name_scope("top"):
            values = random.normal(size=shape).astype("float32")
            made.append(keras.Variable(values, dtype=dtype, name=name))
    made[1].constraint = constraint
    return made


def gradients(replica, step, scale=1.0):
    """Multiples of 1/64: their sums are exact in any order. Larger on some replicas than on others."""
    random = np.random.default_rng(1000 * step + replica)
    found = []
    for variable in variables():
        grad = random.integers(-64, 64, size=tuple(variable.shape)) * (replica + 1) / 64 * scale
        found.append(torch.tensor(np.asarray(grad, "float32")))
    return found


def mean_gradients(num_replicas, step, scale=1.0):
    everyones = [gradients(r, step, scale) for r in range(num_replicas)]
    return [torch.stack(column).sum(0).div_(num_replicas) for column in zip(*everyones)]


def trained(optimizer, grads_of, weights, num_steps=NUM_STEPS):
    optimizer.build(weights)
    with torch.no_grad():
        for step in range(num_steps):
            optimizer.apply([g.to(w.value.dtype) for g, w in zip(grads_of(step), weights)], weights)
        optimizer.finalize_variable_values(weights)
    return weights


def both(scope, make, arguments=None, num_steps=NUM_STEPS, dtype="float32", constraint=None, scale=1.0, prepare=None):
    """The optimizer with divided state, its weights, and those (and the state) of `make()` alone with the mean."""
    mine, alone = variables(dtype, constraint), variables(dtype, constraint)
    optimizer = ks.CrossShard(make(), shard_state=True, **{"fused": False, **(arguments or {})})
    inner = make()
    if prepare is not None:
        prepare(optimizer, mine)
        prepare(inner, alone)
    trained(optimizer, lambda step: gradients(scope.replica_id, step, scale), mine, num_steps)
    trained(inner, lambda step: mean_gradients(scope.num_replicas, step, scale), alone, num_steps)
    return optimizer, mine, inner, alone


def saved(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def assert_equal(scope, optimizer, mine, inner, alone, tolerance=0.0):
    for variable, reference in zip(mine, alone):
        a, b = keras.ops.convert_to_numpy(variable), keras.ops.convert_to_numpy(reference)
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max()), (variable.path, np.abs(a - b).max())
    assert largest_difference(mine) == 0
    found, expected = saved(optimizer), saved(inner)
    assert list(found) == list(expected)
    for key, array in expected.items():
        assert found[key].shape == array.shape, (key, found[key].shape, array.shape)
        assert found[key].dtype == array.dtype
        difference = np.abs(found[key].astype("float64") - array.astype("float64")).max(initial=0.0)
        assert difference <= tolerance * max(1.0, np.abs(array).max(initial=0.0)), (key, difference)


class Doubling(keras.optimizers.SGD):
    """Has something of its own to do when training ends."""

    def finalize_variable_values(self, var_list):
        for variable in var_list:
            variable.assign(2 * variable)


ALREADY = ("SGD", "SGD momentum", "SGD nesterov", "Adam", "Adam amsgrad", "ScheduleFreeAdamW")  # here, or below
ALREADY += ("Lamb", "Muon", "Adafactor")
ELEMENTWISE = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.25),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
    "overwriting ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "inner accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "novograd": lambda: ks.NovoGrad(0.01),
    "own ending": lambda: Doubling(0.1),
    **{name: problem.keras_optimizers()[name] for name in ("AdamW", "Ftrl", "RMSprop momentum")},
}
OTHERS = {name: make for name, make in problem.keras_optimizers().items() if name not in (*ALREADY, *ELEMENTWISE)}


@check
def a_rank_without_a_part_of_a_weight_keeps_no_memory_of_it(scope):
    optimizer = ks.CrossShard(problem.sgd_momentum(), shard_state=True)
    optimizer.build(variables())
    sizes = [part.value.untyped_storage().nbytes() for part in optimizer._shards.stand_ins if 0 in part.shape]
    assert not any(sizes) and (sizes or scope.is_chief)


@check
def updates_are_those_of_one_process(scope, optimizers=ELEMENTWISE):
    for name, make in optimizers.items():
        # Ftrl takes powers, of which the last elements of a tensor are computed by another function than the rest.
        tolerance = 1e-6 if name in ("Adafactor", "novograd", "Ftrl") else 0.0
        try:
            assert_equal(scope, *both(scope, make), tolerance=tolerance)
        except BaseException:
            print(f"rank {scope.replica_id}: {name}", flush=True)
            raise


@check
def updates_of_other_optimizers_of_keras_are_those_of_one_process(scope):
    updates_are_those_of_one_process(scope, OTHERS)


@check
def slices_are_updated_in_one_pass(scope):
    kinds = [type(make()) for make in (keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.SGD)]
    reals = {kind: kind._parallel_update_step for kind in kinds}
    alone, divided = {}, {}
    for name in ("adam", "amsgrad", "AdamW", "momentum"):
        alone[name] = trained(ELEMENTWISE[name](), lambda step: mean_gradients(scope.num_replicas, step), variables())
        divided[name] = ks.CrossShard(ELEMENTWISE[name](), shard_state=True), variables()
        divided[name][0].build(divided[name][1])  # which tries Keras' arithmetic out
    for kind in kinds:
        kind._parallel_update_step = lambda *_: 1 / 0
    for name, (optimizer, mine) in divided.items():
        trained(optimizer, lambda step: gradients(scope.replica_id, step), mine)
        for a, b in zip(mine, alone[name]):
            assert np.abs(a.numpy() - b.numpy()).max() <= 1e-6, (name, a.path)
    for kind, real in reals.items():
        kind._parallel_update_step = real


@check
def whole_variables_are_updated_whole(scope):
    for make in (
        lambda: keras.optimizers.Lamb(0.01),
        lambda: keras.optimizers.Muon(0.01),
        lambda: keras.optimizers.Adafactor(0.01),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
        lambda: keras.optimizers.Lamb(0.01, gradient_accumulation_steps=NUM_STEPS),
        lambda: ks.LARC(keras.optimizers.SGD(0.1, momentum=0.9), 0.01),
        lambda: ks.LARC(ks.NovoGrad(0.01), 0.01),  # which has a number for each variable
    ):
        assert_equal(scope, *both(scope, make), tolerance=1e-6)
    optimizer = both(scope, lambda: keras.optimizers.Muon(0.01))[0]
    may_split = optimizer._shards.division.may_split
    assert may_split == [True, False, True, False, True]  # the embedding and the vectors may be


@check
def constraints_hold(scope):
    constraint = keras.constraints.MaxNorm(0.5)
    assert_equal(scope, *both(scope, ELEMENTWISE["momentum"], constraint=constraint), tolerance=0.0)


@check
def excluded_variables_do_not_decay(scope):
    make = lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5)  # noqa: E731
    by_name = lambda optimizer, v: optimizer.exclude_from_weight_decay(var_names=["bias", "gain"])  # noqa: E731
    by_variable = lambda optimizer, v: optimizer.exclude_from_weight_decay(var_list=[v[0], v[2]])  # noqa: E731
    for prepare in (by_name, by_variable):
        assert_equal(scope, *both(scope, make, prepare=prepare))


@check
def excluded_masters_do_not_decay(scope):
    starts = [w.numpy().astype("float16").astype("float64") for w in variables()]
    for arguments, left_out in (({"var_names": ["bias", "gain"]}, [2, 4]), ({"var_list": [0, 3]}, [0, 3])):
        weights = variables("float16")
        if "var_list" in arguments:
            arguments = {"var_list": [weights[i] for i in left_out]}
        inner = keras.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer = ks.CrossShard(ks.MixedPrecision(inner), shard_state=True)
        optimizer.exclude_from_weight_decay(**arguments)
        trained(optimizer, lambda step: [torch.zeros(tuple(w.shape)) for w in variables()], weights)
        masters = {}  # without gradients nothing but decay moves a weight
        optimizer.wrapper_state.save_own_variables(masters)
        for i, (weight, start) in enumerate(zip(weights, starts)):
            expected = start if i in left_out else start * (1 - 0.1 * 0.5) ** NUM_STEPS
            np.testing.assert_allclose(masters[str(i)], expected, rtol=1e-6)
            np.testing.assert_array_equal(weight.numpy(), masters[str(i)].astype("float16"))


@check
def next_values_are_the_largest_of_all_ranks(scope):
    """As float8 scales are: neither averaged, nor unscaled, nor cut into slices, nor updated."""
    for arguments, around, factor in (
        ({}, lambda inner: inner, 1.0),
        ({"gradient_accumulation_steps": 2}, lambda inner: ks.LossScaling(inner, 8.0), 8.0),
        ({"on_nonfinite": "skip"}, lambda inner: ks.LossScaling(inner, "Backoff", {"scale_max": 8.0}), 8.0),
    ):
        mine, alone = variables(), variables()
        scale = keras.Variable(np.zeros(3), name="scale")
        scale.overwrite_with_gradient = True
        optimizer = ks.CrossShard(around(ELEMENTWISE["momentum"]()), shard_state=True, fused=False, **arguments)
        optimizer.build([*mine[:2], scale, *mine[2:]])
        num_micro_batches = arguments.get("gradient_accumulation_steps", 1)
        values = lambda rank, call: (np.arange(3) + rank * np.array([1, -1, 0]) + 5.0 - call) / 7  # noqa: E731
        with torch.no_grad():
            for call in range(2 * num_micro_batches):
                grads = gradients(scope.replica_id, call // num_micro_batches, factor)
                value = torch.tensor(values(scope.replica_id, call), dtype=torch.float32)
                optimizer.apply([*grads[:2], value, *grads[2:]], [*mine[:2], scale, *mine[2:]])
        first = 2 * num_micro_batches - num_micro_batches  # of the last window, whose first values are the largest
        expected = np.max([values(rank, first) for rank in range(scope.num_replicas)], axis=0)
        np.testing.assert_array_equal(scale.numpy(), expected.astype("float32"))
        trained(ELEMENTWISE["momentum"](), lambda step: mean_gradients(scope.num_replicas, step), alone, 2)
        for weight, reference in zip(mine, alone):
            difference = np.abs(weight.numpy() - reference.numpy()).max()
            assert difference <= 1e-6 * max(1.0, np.abs(reference.numpy()).max()), (weight.path, difference)


@check
def mixed_dtypes_and_masters(scope):
    # There the mean is rounded to float32 first.
    assert_equal(scope, *both(scope, ELEMENTWISE["momentum"], dtype="float64"), tolerance=1e-6)
    # Here each replica's gradient, and their sum, is rounded to 8 bits; there only the mean.
    assert_equal(scope, *both(scope, ELEMENTWISE["momentum"], dtype="bfloat16", num_steps=1), tolerance=2**-7)
    make = lambda: ks.MixedPrecision(ELEMENTWISE["adam"](), 64.0)  # noqa: E731
    optimizer, mine, inner, alone = both(scope, make, dtype="float16", scale=16.0)
    assert_equal(scope, optimizer, mine, inner, alone, tolerance=1e-3)
    masters, expected = {}, {}
    optimizer.wrapper_state.save_own_variables(masters)
    inner.wrapper_state.save_own_variables(expected)
    assert [a.shape for a in masters.values()] == [a.shape for a in expected.values()]
    for key, array in expected.items():
        np.testing.assert_allclose(masters[key], array, atol=1e-3)


def small_model(optimizer, dtype="float32"):
    layers = [keras.Input((4,)), keras.layers.Dense(5, dtype=dtype), keras.layers.Dense(3, dtype=dtype)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


def rows(scope):
    random = np.random.default_rng(scope.replica_id)
    return random.normal(size=(8, 4)), random.normal(size=(8, 3))


@check
def masters_are_saved_by_all_together(scope):
    folder = pathlib.Path(sys.argv[1]).parent
    make = lambda: ks.CrossShard(ks.MixedPrecision(keras.optimizers.Adam(0.01), 64.0), shard_state=True)  # noqa: E731
    model = small_model(make(), "float16")
    model.fit(*rows(scope), verbose=0)
    masters = {}
    model.optimizer.wrapper_state.save_own_variables(masters)
    ks.save_model(model, folder / "masters.keras")
    backup = ks.callbacks.BackupAndRestore(folder / "backup")
    backup.set_model(model)
    backup.on_epoch_end(0)
    backup.on_train_end()
    loaded = {}
    keras.saving.load_model(folder / "masters.keras").optimizer.wrapper_state.save_own_variables(loaded)
    assert len(masters) == 4 and all((loaded[key] == array).all() for key, array in masters.items())

    # A disk that is full before or within the master weights: the others are waiting for these all the same.
    write = H5IOStore.__setitem__
    for place in ("optimizer/4", "optimizer/wrapper_state/2"):

        def full_disk(store, key, value, place=place):
            if f"{store._h5_entry_path}/{key}" == place:
                raise OSError("the disk is full")
            write(store, key, value)

        H5IOStore.__setitem__ = full_disk if scope.is_chief else write
        refused(lambda: ks.save_model(model, folder / "masters.keras"), OSError, "the disk is full")
        H5IOStore.__setitem__ = write
    ks.save_model(model, folder / "masters.keras")


@check
def norms_are_of_all_gradients(scope):
    for limit in (0.5, 1e6):
        make = lambda: ks.GradientClipping(ELEMENTWISE["momentum"](), limit)  # noqa: B023, E731
        assert_equal(scope, *both(scope, make), tolerance=1e-6)


@check
def an_overflow_on_one_rank_is_skipped_on_all(scope):
    for make, arguments in (
        (lambda: ks.LossScaling(ELEMENTWISE["momentum"](), "Backoff", {"scale_max": 8.0}), {}),
        (ELEMENTWISE["momentum"], {"on_nonfinite": "skip"}),
    ):
        weights = variables()
        optimizer = ks.CrossShard(make(), shard_state=True, **arguments)
        optimizer.build(weights)
        grads = gradients(scope.replica_id, 0)
        with torch.no_grad():
            optimizer.apply(grads, weights)
            before = [w.numpy().copy() for w in weights]
            if scope.replica_id == scope.num_replicas - 1:
                grads[3][2, 1] = float("nan")
            optimizer.apply(grads, weights)
        assert int(optimizer.skipped_steps) == 1
        assert all((w.numpy() == b).all() for w, b in zip(weights, before))
        assert all(each == 1 for each in processes.gather_objects(int(optimizer.iterations)))
        if arguments:
            assert optimizer.last_nonfinite == (scope.num_replicas - 1, "out/kernel"), optimizer.last_nonfinite
        else:
            assert float(optimizer.loss_scale) == 4.0
    # A sum that overflows where no gradient does.
    for overlap in ("auto", False):
        arguments = {"shard_state": True, "on_nonfinite": "skip", "overlap": overlap}
        optimizer = ks.CrossShard(ELEMENTWISE["momentum"](), "sum", **arguments)
        weights = variables()
        optimizer.build(weights)
        grads = gradients(scope.replica_id, 0)
        grads[1][:] = 3e38
        with torch.no_grad():
            optimizer.apply(grads, weights)
        assert optimizer.last_nonfinite == (None, "hidden/kernel"), optimizer.last_nonfinite


@check
def windows_of_micro_steps(scope):
    mine, alone = variables(), variables()
    optimizer = ks.CrossShard(ELEMENTWISE["adam"](), shard_state=True, gradient_accumulation_steps=2)
    trained(optimizer, lambda step: gradients(scope.replica_id, step), mine, 4)
    inner = ELEMENTWISE["adam"]()

    def of_window(step):
        pairs = zip(*[mean_gradients(scope.num_replicas, 2 * step + k) for k in (0, 1)])
        return [(a + b) / 2 for a, b in pairs]

    trained(inner, of_window, alone, 2)
    assert_equal(scope, optimizer, mine, inner, alone, tolerance=1e-6)


@check
def gradients_that_are_missing(scope):
    for everywhere in (True, False):
        mine, alone = variables(), variables()
        optimizer, inner = ks.CrossShard(ELEMENTWISE["adam"](), shard_state=True, fused=False), ELEMENTWISE["adam"]()
        optimizer.build(mine)
        inner.build(alone)
        for step in range(2):
            grads, means = gradients(scope.replica_id, step), mean_gradients(scope.num_replicas, step)
            everyones = [gradients(r, step)[0] for r in range(scope.num_replicas)]
            if everywhere or scope.replica_id == 0:
                grads[0] = None
            everyones[0] = torch.zeros_like(everyones[0])
            means[0] = None if everywhere else torch.stack(everyones).sum(0).div_(scope.num_replicas)
            with torch.no_grad():
                optimizer.apply(grads, mine)
                inner.apply(means, alone)
        assert_equal(scope, optimizer, mine, inner, alone)
    with torch.no_grad():
        refused(lambda: optimizer.apply([None] * 5, mine), ValueError, "No gradients provided")


@check
def wire_bytes_are_those_of_one_reduction(scope):
    """Reduce-scatter and all-gather: 2 (N - 1) / N of the weights, as an all-reduce alone."""
    n = scope.num_replicas
    weights = [keras.Variable(np.zeros((200, 210), "float32")), keras.Variable(np.zeros((333,), "float32"))]
    optimizer = ks.CrossShard(ELEMENTWISE["adam"](), shard_state=True)
    optimizer.build(weights)
    grads = [torch.ones(tuple(w.shape)) for w in weights]
    sent = []
    moves = {
        (dist, "all_to_all_single"): lambda result, tensor: tensor.nbytes * (n - 1) / n,
        (dist, "all_reduce"): lambda tensor, *_: 2 * tensor.nbytes * (n - 1) / n,
        (dist, "broadcast"): lambda tensor, *_: tensor.nbytes * (n - 1) / n,
        (memory, "_all_gather"): lambda result, tensor, **_: result.nbytes * (n - 1) / n,
        (torch_communicator, "_all_gather"): lambda result, tensor: result.nbytes * (n - 1) / n,
        (torch_communicator, "_reduce_scatter"): lambda result, tensor, *_: tensor.nbytes * (n - 1) / n,
    }
    with torch.no_grad():
        optimizer.apply(grads, weights)  # which lets ranks start together
        reals = {where: getattr(*where) for where in moves}
        for (module, name), size in moves.items():
            real = reals[module, name]
            setattr(
                module,
                name,
                lambda *a, real=real, size=size, **k: (sent.append(size(*a)), real(*a, **k))[1],
            )
        optimizer.apply(grads, weights)
        for (module, name), real in reals.items():
            setattr(module, name, real)
    total = sum(w.value.nbytes for w in weights)
    assert len(sent) == 1 + n, sent  # gloo gathers faster by a broadcast of each rank
    assert sum(sent) <= 1.01 * 2 * (n - 1) / n * total, (sum(sent), total)


@check
def weights_that_lie_elsewhere_on_one_rank(scope):
    """All ranks gather by the same collectives, also one whose weights do not lie where they are gathered."""

    def move(optimizer, weights):
        if scope.replica_id == 0:
            for variable in (weights[0], weights[1]):
                variable.value.data = variable.value.data.t().contiguous().t()

    seen = []
    real = memory.Together.room
    with mock.patch.object(memory.Together, "room", lambda *args: seen.append(args) or real(*args)):
        assert_equal(scope, *both(scope, ELEMENTWISE["adam"], prepare=move))
    assert bool(seen) == (scope.replica_id == 0)


@check
def weights_without_elements(scope):
    """One next to others of its dtype, and one that is the only one of it."""
    for make in (ELEMENTWISE["adam"], lambda: keras.optimizers.Lamb(0.01)):
        ends = []
        for arguments in ({"shard_state": True, "on_nonfinite": "skip"}, {}):
            weights = [keras.Variable(np.ones((0, 3), dtype), dtype=dtype) for dtype in ("float32", "float16")]
            weights += [keras.Variable(np.ones((5, 3), "float32"))]
            optimizer = ks.CrossShard(make(), fused=False, **arguments)
            optimizer.build(weights)
            with torch.no_grad():
                for _ in range(2):
                    optimizer.apply([torch.ones_like(weight.value) for weight in weights], weights)
            ends.append((weights, saved(optimizer)))
        (found, state), (expected, _) = ends
        assert np.allclose(found[2].numpy(), expected[2].numpy(), rtol=1e-6)
        again = ks.CrossShard(make(), shard_state=True, on_nonfinite="skip")
        again.build(found)
        again.load_own_variables(state)
        assert all((saved(again)[key] == array).all() for key, array in state.items())


@check
def the_report_says_what_is_held(scope):
    optimizer = both(scope, ELEMENTWISE["adam"], num_steps=1)[0]
    report = optimizer.memory_report()
    assert report.max_over_ideal <= 1.02, str(report)
    assert report.held[scope.replica_id] == sum(v.value.nbytes for v in optimizer.variables)
    assert report.whole == sum(array.nbytes for array in saved(optimizer).values())
    assert [path.split("/")[1] for path, _, _ in report.replicated] == ["iteration", "learning_rate"]
    assert str(report).count("\n") == scope.num_replicas + 2 + 1 + len(report.kinds)
    held = [v for v in optimizer.variables if "table" in v.name]
    # The slices are the weights' own memory, so that nothing is held twice.
    for stand_in, variable in zip(optimizer._shards.stand_ins, optimizer._shards.variables):
        if stand_in is not variable and 0 not in stand_in.shape:
            start = variable.value.untyped_storage().data_ptr()
            assert stand_in.value.untyped_storage().data_ptr() == start
    assert held
    embedding = [keras.Variable(np.zeros((950, 100), "float32")), keras.Variable(np.zeros((50, 100), "float32"))]
    optimizer = ks.CrossShard(ELEMENTWISE["adam"](), shard_state=True)
    optimizer.build(embedding)
    assert optimizer.memory_report().max_over_ideal <= 1.02


@check
def saved_state_fits_again_and_elsewhere(scope):
    for make in (ELEMENTWISE["adam"], lambda: keras.optimizers.Adafactor(0.01)):
        optimizer, mine, _, alone = both(scope, make)
        store = saved(optimizer)
        real, flat_state._MAX_ELEMENTS_SENT = flat_state._MAX_ELEMENTS_SENT, 50
        in_pieces = saved(optimizer)
        flat_state._MAX_ELEMENTS_SENT = real
        assert all((in_pieces[key] == array).all() for key, array in store.items())
        again = ks.CrossShard(make(), shard_state=True)
        if scope.replica_id % 2:
            again.load_own_variables(store)  # before it is built, as `load_model` does
        again.build(mine)
        if not scope.replica_id % 2:
            again.load_own_variables(store)
        found = saved(again)
        assert all((found[key] == array).all() for key, array in store.items())
        plain = make()
        plain.build(alone)
        plain.load_own_variables(store)
        grads, means = gradients(scope.replica_id, 9), mean_gradients(scope.num_replicas, 9)
        with torch.no_grad():
            for one, given, weights in ((again, grads, mine), (plain, means, alone)):
                one.apply(given, weights)
        assert_equal(scope, again, mine, plain, alone, tolerance=1e-6)
        fewer = {key: array for key, array in store.items() if key != "3"}
        refused(lambda: again.load_own_variables(fewer), ValueError, "must have")  # noqa: B023
        other = {**store, "2": np.zeros((3, 3, 3), "float32")}
        if make is ELEMENTWISE["adam"]:
            refused(lambda: again.load_own_variables(other), ValueError, "must have shape")  # noqa: B023


@check
def a_rank_that_saves_alone_is_told_so_in_time(scope):
    optimizer = both(scope, ELEMENTWISE["adam"])[0]
    real, sharded_files.BARRIER_SECONDS = sharded_files.BARRIER_SECONDS, 0.3
    for alone in (0, 1):
        if scope.replica_id == alone:
            refused(
                lambda: saved(optimizer), RuntimeError, "save_model(model, path)` (or `save_weights`) on every rank"
            )
        dist.barrier()
    sharded_files.BARRIER_SECONDS = real
    store = {} if scope.is_chief else NullStore()
    optimizer.save_own_variables(store)  # together it works as usual
    assert len(store) == (len(optimizer.variables) if scope.is_chief else 0)


@check
def a_rank_that_saves_alone_and_leaves_tells_the_others(scope):
    optimizer = both(scope, ELEMENTWISE["adam"])[0]
    rank, size = scope.replica_id, scope.num_replicas
    with mock.patch.object(
        torch_group.distributed_c10d, "_get_default_store", side_effect=dist.DistNetworkError("reset by peer")
    ):
        words = f"All ranks must save together. Received on rank {rank}: the rank that hosts the store has ended"
        refused(lambda: saved(optimizer), RuntimeError, words)
    torch_group._open.timeout = datetime.timedelta(seconds=1)  # as `data_parallel(timeout=1)` does
    start = time.monotonic()
    if rank == 0:
        refused(lambda: saved(optimizer), RuntimeError, "1 s after rank 0 called. With `shard_state=True` each")
        torch_group.close_group()  # as when the program ends
    else:
        words = "Before that: All ranks must save together. Received: no call on rank"
        refused(lambda: largest_difference(optimizer._trainable_variables), RuntimeError, words)
    assert time.monotonic() - start < 20
    torch_group.open_group("gloo", rank, size, None)


@check
def the_checks_can_fail(scope):
    """With something left out, weights or files are others. No exchange: ranks would leave at other places."""
    momentum = ELEMENTWISE["momentum"]

    def clipped():
        return ks.GradientClipping(momentum(), 0.5)

    def decaying():
        return keras.optimizers.AdamW(0.01, weight_decay=0.5)

    def excluded(optimizer, weights):
        optimizer.exclude_from_weight_decay(var_list=weights[:2])

    for where, name, nothing, make, prepare in (
        (memory.Gathering, "begin", lambda gathering, flat: None, momentum, None),
        (gradient_clipping, "norm_over_replicas", lambda norm: norm, clipped, None),
        (sharding, "keep_exclusions", lambda *args: None, decaying, excluded),
    ):
        real = getattr(where, name)
        setattr(where, name, nothing)
        _, mine, _, alone = both(scope, make, prepare=prepare)
        setattr(where, name, real)
        difference = max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in zip(mine, alone))
        assert max(processes.gather_objects(difference)) > 1e-4, name


@check
def what_cannot_be_right_is_refused(scope):
    adam = keras.optimizers.Adam
    for make, words in (
        (lambda: keras.optimizers.LossScaleOptimizer(adam()), "LossScaleOptimizer needs all gradients"),
        (lambda: ks.VariableClipping(adam(), {"a": []}, 1.0), "VariableClipping needs all gradients"),
    ):
        refused(lambda: ks.CrossShard(make(), shard_state=True), ValueError, words)  # noqa: B023
    optimizer = ks.CrossShard(adam(global_clipnorm=1.0), shard_state=True)
    refused(lambda: optimizer.build(variables()), ValueError, "GradientClipping(inner_optimizer")
    if hasattr(keras.optimizers, "MultiOptimizer"):
        rules = keras.optimizers.OptimizerMap(ks.CrossShard(adam(), shard_state=True), {})
        several = keras.optimizers.MultiOptimizer(rules)
        refused(lambda: several.build(variables()), ValueError, "cannot be inside a `MultiOptimizer`")
    penalised = variables("float16")
    penalised[1].regularizer = keras.regularizers.L2(0.1)
    optimizer = ks.CrossShard(ks.MixedPrecision(adam()), shard_state=True)
    refused(lambda: optimizer.build(penalised), ValueError, "regularizers of ['hidden/kernel']")
    penalised = variables()  # in float32 there are no masters
    penalised[1].regularizer = keras.regularizers.L2(0.1)
    ks.CrossShard(ks.MixedPrecision(adam()), shard_state=True).build(penalised)
    optimizer = both(scope, ELEMENTWISE["ema"])[0]
    refused(lambda: optimizer.get_slot(optimizer._trainable_variables[0], "momentum"), ValueError, "its own slices")
    refused(lambda: optimizer._model_variables_moving_average, ValueError, "SwapEMAWeights")


@check
def ranks_that_have_loaded_different_files_are_refused(scope):
    optimizer, mine, *_ = both(scope, ELEMENTWISE["adam"])
    store = saved(optimizer)
    again = ks.CrossShard(ELEMENTWISE["adam"](), shard_state=True)
    again.build(mine)
    if scope.is_chief:
        again.load_own_variables(store)
    grads = gradients(scope.replica_id, 0)
    words = "start with the same weights and at the same update"
    with torch.no_grad():
        refused(lambda: again.apply(grads, mine), ValueError, words)


@check
def a_rank_that_loads_alone_between_two_fits_is_noticed(scope):
    for prepares, callbacks in ((False, [ks.callbacks.SyncReplicas()]), (True, [])):
        model = small_model(ks.CrossShard(ELEMENTWISE["adam"](), shard_state=True))
        if prepares:
            ks.prepare(model, auto_shard=False)

        def fit(model=model, callbacks=callbacks):
            model.fit(*rows(scope), verbose=0, callbacks=callbacks)

        fit()
        store = saved(model.optimizer)
        fit()
        if scope.is_chief:
            model.optimizer.load_own_variables(store)
        refused(fit, ValueError, "start with the same weights and at the same update")


@check
def fit_trains_as_one_process_does(scope):
    x, y = problem.data(6)
    model, reference = problem.model(), problem.model()
    reference.compile(problem.sgd_momentum(), "mse")
    reference.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    if problem.BATCH_SIZE % scope.num_replicas == 0:
        mine = [problem.rows_of_replica(a, scope.replica_id, scope.num_replicas) for a in (x, y)]
        rows = problem.BATCH_SIZE // scope.num_replicas
        model.compile(ks.CrossShard(problem.sgd_momentum(), shard_state=True), "mse")
        callbacks = [ks.callbacks.SyncReplicas(), ks.callbacks.CheckReplicas(5)]
        model.fit(*mine, batch_size=rows, shuffle=False, verbose=0, callbacks=callbacks)
        assert problem.relative_difference(model.get_weights(), reference.get_weights()) <= problem.TOLERANCE
        prepared = problem.model()
        prepared.compile(ks.CrossShard(problem.sgd_momentum(), shard_state=True, on_nonfinite="skip"), "mse")
        ks.prepare(prepared, auto_shard=False)
        prepared.fit(*mine, batch_size=rows, shuffle=False, verbose=0)
        assert problem.relative_difference(prepared.get_weights(), reference.get_weights()) <= problem.TOLERANCE
        # One that ends early takes the others with it, as without divided state.
        short = problem.model()
        short.compile(ks.CrossShard(problem.sgd_momentum(), shard_state=True, on_nonfinite="skip"), "mse")
        cut = [a[: len(a) - rows * (scope.replica_id == 0)] for a in mine]
        fit = lambda: short.fit(*cut, batch_size=rows, shuffle=False, verbose=0)  # noqa: E731
        refused(fit, ValueError, "must make the same number of updates")


@check
def a_model_with_two_optimizers_of_its_own(scope):
    """The GAN of the Keras guide: each rank has rows of its own; state in parts is saved from wherever it is held."""
    folder = pathlib.Path(sys.argv[1]).parent
    size, rank = scope.num_replicas, scope.replica_id
    alone = gan.fit(gan.compiled())
    model = ks.prepare(gan.compiled(gan.one_divided), auto_shard=False)
    rows = np.array_split(np.arange(gan.BATCH_SIZE), [2] + [gan.BATCH_SIZE // size] * (size - 2))[rank]  # uneven, too
    gan.fit(model, rows=rows, callbacks=[ks.callbacks.CheckReplicas(every=2), ks.callbacks.StopOnNonFinite()])
    assert gan.difference(model, alone) <= problem.TOLERANCE, gan.difference(model, alone)
    assert scope.largest_difference(model) == 0
    path = folder / f"gan{size}.weights.h5"
    ks.save_weights(model, path)
    for one in (gan.built(gan.compiled(gan.one_divided)), gan.built(gan.compiled())):
        one.load_weights(path)
        assert gan.difference(one, model) == 0
    # One that averages nothing, next to one that does.
    mixed = gan.compiled(lambda inner, first: ks.CrossShard(inner) if first else inner)
    refused(lambda: ks.prepare(mixed), ValueError, "every optimizer")


@check
def variables_without_elements_change_nothing(scope):
    """Of an array: PyTorch takes its stride from NumPy."""
    empty = lambda: keras.Variable(np.zeros(0, "float32"), name="empty")  # noqa: E731
    alone = trained(ELEMENTWISE["momentum"](), lambda step: mean_gradients(scope.num_replicas, step), variables())
    for shard_state in (False, True):
        optimizer = ks.CrossShard(ELEMENTWISE["momentum"](), shard_state=shard_state, fused=False)
        *mine, last = trained(
            optimizer,
            lambda step: [*gradients(scope.replica_id, step), torch.zeros(0)],
            [*variables(), empty()],
        )
        assert tuple(last.shape) == (0,)
        for variable, reference in zip(mine, alone, strict=True):
            torch.testing.assert_close(variable.value, reference.value, rtol=1e-6, atol=1e-6)
        assert largest_difference([*mine, last]) == 0


@check
def files_travel_between_numbers_of_ranks(scope):
    folder = pathlib.Path(sys.argv[1]).parent
    for name, make in (("adam", ELEMENTWISE["ema"]), ("lamb", lambda: keras.optimizers.Lamb(0.01))):
        optimizer = both(scope, make)[0]
        store = saved(optimizer)
        if scope.is_chief:
            np.savez(folder / f"{name}-{scope.num_replicas}.npz", **store)
        dist.barrier()
        for file in sorted(folder.glob(f"{name}-*.npz")):  # of as many ranks as have run before
            arrays = dict(np.load(file))
            again = ks.CrossShard(make(), shard_state=True)
            again.build(variables())
            again.load_own_variables(arrays)
            found = saved(again)
            assert list(found) == list(arrays)
            assert all((found[key] == array).all() for key, array in arrays.items())
        dist.barrier()


if __name__ == "__main__":
    checks.main(ks.data_parallel, dist.barrier)
