"""Checks of gradients that travel during the backward pass. Each prints nothing and raises when it fails.

Arguments: the file to which rank 0 writes the names of the checks that passed, and the names to run.
"""

import contextlib
import functools
import gc
import sys
import warnings
from unittest import mock

import keras
import numpy as np
import torch
import torch.distributed as dist
from support import checks, problem
from support.checks import check, refused
from torch.utils.checkpoint import checkpoint

import keras_shardopt as ks
from keras_shardopt.backends.torch import communicator as torch_communicator
from keras_shardopt.backends.torch import overlap as torch_overlap
from keras_shardopt.backends.torch import rank_sums
from keras_shardopt.backends.torch import sliced_bucket as torch_sliced
from keras_shardopt.extensions.coding.codecs import CodedInTwoLegs
from keras_shardopt.sharding import slices

warnings.filterwarnings("ignore")
NUM_STEPS = 4
MORE = {}  # arguments of every optimizer
TINY = 1e-4  # MiB: four buckets for `make_model`


def make_model(middle=None):
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(6, activation="tanh"), *([] if middle is None else [middle]), keras.layers.Dense(5)]
    return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers, keras.layers.Dense(problem.NUM_OUTPUTS)])


def my_rows(scope, num_steps):
    """This rank's rows of each batch, and how many that are; the rest of a batch is nobody's."""
    size = problem.BATCH_SIZE // scope.num_replicas
    starts = [s + scope.replica_id * size for s in range(0, num_steps * problem.BATCH_SIZE, problem.BATCH_SIZE)]
    return [np.concatenate([a[s : s + size] for s in starts]) for a in problem.data(num_steps)], size


def buckets_of(model):
    return getattr(model.optimizer.pipeline.reducer, "buckets", None)


def cross_shard(inner, **arguments):
    return ks.CrossShard(inner, **MORE, **arguments)


def trained(scope, arguments, model=None, inner=problem.sgd_momentum, kind=None, loop=None, num_steps=NUM_STEPS):
    """The model after some steps of `fit` on this rank's rows."""
    model = make_model() if model is None else model
    if kind is not None:
        model.__class__ = kind
    model.compile(cross_shard(inner(), **arguments), "mse")
    (x, y), size = my_rows(scope, num_steps)
    if loop is None:
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    else:
        loop(model, x, y, size)
    return model


def by_hand(model, x, y, size):
    """A loop of the user's own, which sends everything at the end."""
    for start in range(0, len(x), size):
        model.zero_grad()
        outputs = model(x[start : start + size])
        loss = keras.ops.mean(keras.ops.square(outputs - torch.tensor(y[start : start + size])))
        model.optimizer.scale_loss(loss).backward()
        model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)


def close(scope):
    """How far weights may be from those of ranks that send at the end: thirds, and their sums, are rounded."""
    return 0.0 if scope.num_replicas == 2 and not MORE else 5e-7  # kernels round the end of a slice otherwise


def assert_same(some, others, tolerance=0.0):
    for a, b in zip(some.get_weights(), others.get_weights()):
        assert np.abs(a - b).max() <= tolerance, np.abs(a - b).max()


@contextlib.contextmanager
def recorded():
    """What goes into all-reduces: bytes, and whether in a backward pass."""
    real, calls = dist.all_reduce, []

    def all_reduce(tensor, *args, **kwargs):
        calls.append((tensor.nbytes, torch._C._current_graph_task_id() >= 0))
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = real


@check
def fit_sends_in_the_backward_pass(scope):
    plain = trained(scope, {"overlap": False})
    with recorded() as calls:
        model = trained(scope, {"bucket_mib": TINY})
    tolerance = close(scope)
    assert_same(model, plain, tolerance)
    assert_same(model, trained(scope, {"bucket_mib": TINY}, loop=by_hand))
    assert scope.largest_difference(model) == 0
    calls = calls[1:]  # the first belongs to the common start
    assert len(calls) == 4 * (NUM_STEPS + 1), calls  # and once more when `fit` ends
    assert [inside for _, inside in calls] == [False] * 4 + [True] * (4 * (NUM_STEPS - 1)) + [False] * 4
    whole = trained(scope, {})
    assert_same(whole, plain, tolerance)
    assert len(list(whole.optimizer.pipeline.reducer.buckets)) == 1


class Halves(ks.Stage):
    def commit(self, step, proceed):
        proceed(step.replace(grads=[grad / 2 for grad in step.grads]))


class Counts(Halves):
    num_windows = 0

    def collect(self, step, proceed):
        self.num_windows += 1
        proceed(step)


@check
def stages_after_the_reduction_leave_it_where_it_is(scope):
    for more in ({}, {"on_nonfinite": "skip"}, {"gradient_accumulation_steps": 2}):
        found = []
        for arguments in ({"overlap": False}, {}):
            with recorded() as calls:
                found.append(trained(scope, {"bucket_mib": TINY, "stages": [Halves()], **more, **arguments}))
            assert any(inside for _, inside in calls) == (not arguments), (more, arguments)
        assert_same(*found, close(scope))
    with recorded() as calls:  # it is to see gradients before
        found.append(trained(scope, {"bucket_mib": TINY, "stages": [Counts()]}))
    assert not any(inside for _, inside in calls)
    assert_same(found[-1], trained(scope, {"overlap": False, "stages": [Halves()]}))


@check
def next_values_do_not_travel_in_buckets(scope):
    """Of what comes as a float8 scale's gradient all ranks take the largest, which no bucket of sums can hold."""
    next_value = torch.tensor([1.0 + scope.replica_id, 2.0 - scope.replica_id])

    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(2,), initializer="zeros", name="scale")
            self.scale.overwrite_with_gradient = True

        def call(self, x):
            return through(x, self.scale.value)

    @keras.ops.custom_gradient
    def through(x, scale):
        return x * 1, lambda *args, upstream=None: (args[0] if upstream is None else upstream, next_value)

    for more in ({}, {"gradient_accumulation_steps": 2}, {"compression": "bfloat16"}):
        plain = trained(scope, {"overlap": False, **more}, make_model(Scaled()))
        model = trained(scope, {"bucket_mib": TINY, **more}, make_model(Scaled()))
        assert_same(model, plain)
        assert scope.largest_difference(model) == 0
        np.testing.assert_array_equal(model.layers[1].scale.numpy(), [scope.num_replicas, 2.0])


@check
def gradients_are_global_after_the_backward_pass(scope):
    model = trained(scope, {"bucket_mib": TINY})
    flat = torch.cat([v.value.grad.reshape(-1) for v in model.trainable_variables])
    everyones = [torch.empty_like(flat) for _ in range(scope.num_replicas)]
    dist.all_gather(everyones, flat)
    assert all((each == flat).all() for each in everyones)
    again = [v.value.grad for v in model.trainable_variables]
    trained(scope, {"bucket_mib": TINY}, model=model)  # of a new optimizer, with other memory
    addresses = [v.value.grad.data_ptr() for v in model.trainable_variables]
    model.fit(*problem.data(1), verbose=0)
    assert [v.value.grad.data_ptr() for v in model.trainable_variables] == addresses  # buckets are used again
    del again


@check
def bytes_are_those_of_the_ring(scope):
    n = scope.num_replicas
    layers = [keras.layers.Dense(500), keras.layers.Dense(500), keras.layers.Dense(problem.NUM_OUTPUTS)]
    model = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers])
    size = 4 * model.count_params()
    for arguments in ({}, {"bucket_mib": 0.97}, {"overlap": False}):
        with recorded() as calls:
            trained(scope, arguments, model, num_steps=3)
        last = calls[-len(calls[1:]) // 4 :]  # of the one that says that training has ended
        sent = sum(num_bytes for num_bytes, _ in last) * 2 * (n - 1) / n
        assert sent <= 1.01 * 2 * (n - 1) / n * size, (arguments, sent, size)
        assert len(last) == (2 if "bucket_mib" in arguments else 1), (arguments, calls)


@check
def half_the_bytes_with_compression(scope):
    n = scope.num_replicas
    layers = [keras.layers.Dense(200), keras.layers.Dense(problem.NUM_OUTPUTS)]
    model = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers])
    size = 4 * model.count_params()
    random = np.random.default_rng(scope.replica_id)
    variables = model.trainable_variables
    local = [random.normal(size=v.shape).astype("float32") for v in variables]
    flat = torch.tensor(np.concatenate([g.ravel() for g in local]))
    everyones = [torch.empty_like(flat) for _ in range(n)]
    dist.all_gather(everyones, flat)
    means, absolute = torch.stack(everyones).mean(0), torch.stack(everyones).abs().mean(0)
    for dtype, unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        for arguments in (
            {},
            {"overlap": False},
            {"reduction": "sum"},
            {"shard_state": True},
            {"on_nonfinite": "skip"},
        ):
            before = np.concatenate([v.numpy().ravel() for v in variables])
            optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), compression=dtype, **arguments)
            with recorded() as calls, torch.no_grad():
                optimizer.apply([torch.tensor(g) for g in local], variables)
            moved = before - np.concatenate([v.numpy().ravel() for v in variables])
            factor = n if "reduction" in arguments else 1
            error = np.abs(moved / factor - means.numpy())
            bound = (n + 1) * unit * absolute.numpy() + 1e-5  # float32 weights of size 10
            assert (error <= bound).all(), (dtype, arguments, error.max())
            assert error.max() > unit / 100, (dtype, arguments)
            if "shard_state" not in arguments:  # whose reduce-scatter is something else
                assert [num_bytes <= 1.02 * size / 2 for num_bytes, _ in calls[1:]] == [True], (dtype, arguments, calls)
    for arguments in ({"overlap": False}, {}):
        short = trained(scope, {"compression": "bfloat16", "bucket_mib": TINY, **arguments})
        assert scope.largest_difference(short) == 0
        x, y = problem.data(2 if scope.replica_id else 1)
        fit = lambda: short.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)  # noqa: B023, E731
        refused(fit, ValueError, "must make the same number of updates")
        dist.barrier()


class Sometimes(keras.layers.Layer):
    """Uses its layer on some ranks, or on none."""

    ranks = (0,)

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6, kernel_initializer=keras.initializers.GlorotUniform(3))

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return inputs + self.dense(inputs) if dist.get_rank() in self.ranks else inputs


@check
def gradients_that_some_ranks_lack(scope):
    for ranks in ((0,), (1,), ()):
        Sometimes.ranks = ranks
        models = [
            trained(scope, arguments, make_model(Sometimes()), keras.optimizers.Adam)
            for arguments in ({"overlap": False}, {"bucket_mib": TINY, "fused": False}, {"bucket_mib": TINY})
        ]
        assert_same(models[1], models[0], 1e-6)
        assert_same(models[2], models[1], 1e-6)
        assert scope.largest_difference(models[1]) == 0
        moved = np.abs(models[1].layers[1].dense.bias.numpy()).max() > 0
        assert moved == bool(ranks)


class Twice(keras.layers.Layer):
    """Makes its gradients in a backward pass within the backward pass, and again outside of it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(3))

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        if dist.get_rank() in Sometimes.ranks and not isinstance(inputs, keras.KerasTensor):
            inputs = checkpoint(self.dense, inputs, use_reentrant=True)
            return self.dense(inputs)
        return self.dense(self.dense(inputs))


@check
def gradients_that_come_in_parts(scope):
    for ranks in ((0, 1, 2), (1,)):
        Sometimes.ranks = ranks
        plain = trained(scope, {"overlap": False}, make_model(Twice()))
        model = trained(scope, {"bucket_mib": TINY}, make_model(Twice()))
        assert_same(model, plain, close(scope))
        assert model.optimizer.pipeline.reducer.buckets._overlaps == (scope.replica_id not in ranks)


class ClipsItself(keras.Sequential):
    """A step of the user's own, which changes gradients before they are reduced."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
        loss.backward()
        grads = [v.value.grad * (dist.get_rank() + 1) for v in self.trainable_variables]
        with torch.no_grad():
            self.optimizer.apply(grads, self.trainable_variables)
        return {}


@check
def steps_of_others_see_their_own_gradients(scope):
    plain = trained(scope, {"overlap": False}, kind=ClipsItself)
    assert_same(trained(scope, {"bucket_mib": TINY}, kind=ClipsItself), plain, close(scope))
    model = trained(scope, {"bucket_mib": TINY})
    x, y = problem.data(1)
    before = [w.copy() for w in model.get_weights()]
    model.zero_grad()
    for _ in range(1 + scope.replica_id):  # of each rank's own making, any number of times
        keras.ops.mean(model(x)).backward(retain_graph=True)
    pairs = model.optimizer.compute_gradients(lambda: keras.ops.mean(model(x * (1 + scope.replica_id))), None)
    assert all(grad is not None for grad, _ in pairs)
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))
    model.fit(x, y, verbose=0)
    assert scope.largest_difference(model) == 0


@check
def parameters_that_are_replaced(scope):
    found = []
    for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
        model = trained(scope, arguments)
        if scope.replica_id == 0:
            for variable in model.trainable_variables[1:3]:
                variable._value = torch.nn.Parameter(variable.value.detach().clone())
        x, y = problem.data(4)
        model.fit(x[scope.replica_id :: 3], y[scope.replica_id :: 3], batch_size=4, shuffle=False, verbose=0)
        found.append(model)
        assert scope.largest_difference(model) == 0
    assert_same(*found, 1e-6)


@check
def a_frozen_layer_stays(scope):
    found = []
    for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
        model = trained(scope, arguments)
        model.layers[1].trainable = False
        before = model.layers[1].get_weights()
        model.fit(*problem.data(3), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
        assert all((a == b).all() for a, b in zip(before, model.layers[1].get_weights()))
        found.append(model)
    assert_same(*found, 1e-6)


WAYS = {
    "overlap": {"bucket_mib": TINY},
    "at the end": {"overlap": False},
    "compressed": {"compression": "bfloat16"},
    "compressed at the end": {"compression": "float16", "overlap": False},
    "skipping": {"on_nonfinite": "skip"},
    "accumulating": {"gradient_accumulation_steps": 2},
    "accumulating and skipping": {"gradient_accumulation_steps": 2, "on_nonfinite": "skip"},
    "divided": {"shard_state": True},
    "divided and skipping": {"shard_state": True, "on_nonfinite": "skip"},
    "clipping": {"replica_clipnorm": 1e6},
}


@check
def a_layer_that_one_rank_freezes_is_named_on_every_rank(scope):
    frozen_on = scope.num_replicas - 1
    for way, arguments in WAYS.items():
        for prepared in (False, True) if way in ("overlap", "at the end") else (False,):
            model = trained(scope, arguments, num_steps=2)
            if prepared:
                ks.prepare(model, auto_shard=False)
            (x, y), size = my_rows(scope, 2)
            names = [v.path for v in model.layers[1].trainable_variables]
            if scope.replica_id == frozen_on:
                model.layers[1].trainable = False
            before = model.get_weights()
            try:
                model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
            except ValueError as error:
                message = str(error)
            else:
                raise AssertionError(f"not refused: {way}")
            words = ", ".join(f"`{name}`" for name in names) + f" not trained on replica {frozen_on}"
            assert "must train the same variables" in message and words in message, (way, message)
            assert "all trained on replica 0" in message, (way, message)
            assert all((a == b).all() for a, b in zip(before, model.get_weights())), way
            dist.barrier()


@check
def a_layer_that_all_ranks_freeze_stays_and_the_rest_trains(scope):
    found = []
    for way in ("overlap", "at the end", "accumulating and skipping", "divided and skipping"):
        arguments = WAYS[way]
        model = trained(scope, arguments, num_steps=2)
        model.layers[1].trainable = False
        before = model.get_weights()
        (x, y), size = my_rows(scope, 4)
        with recorded() as calls:
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        after = model.get_weights()
        assert [bool((a == b).all()) for a, b in zip(before, after)] == [False] * 2 + [True] * 2 + [False] * 2, way
        assert scope.largest_difference(model) == 0
        if not way.startswith(("overlap", "divided")):
            assert len(calls) == 1 + 4 // arguments.get("gradient_accumulation_steps", 1), (way, calls)
        if not way.startswith("accumulating"):
            found.append(model)
    for model in found[1:]:
        assert_same(model, found[0], 1e-6)


@check
def what_is_not_finite_is_found_in_the_backward_pass(scope):
    skips = {"on_nonfinite": "skip"}
    plain = trained(scope, {"overlap": False, **skips})
    with recorded() as calls:
        model = trained(scope, {"bucket_mib": TINY, **skips})
    assert_same(model, plain, close(scope))
    assert [inside for _, inside in calls[1:]] == [False] * 4 + [True] * (4 * (NUM_STEPS - 1)) + [False] * 4, calls
    for other in (trained(scope, skips, loop=by_hand), trained(scope, {**skips, "compression": "bfloat16"})):
        assert int(other.optimizer.skipped_steps) == 0
    x, y = problem.data(1)
    for bad_rank in range(scope.num_replicas):
        before = [w.copy() for w in model.get_weights()]
        mine = x.copy()
        mine[0, 0] = np.inf if scope.replica_id == bad_rank else 0.0
        with recorded() as calls:
            model.fit(mine, y, batch_size=len(x), verbose=0)
        assert [inside for _, inside in calls] == [True] * 5 + [False] * 4, calls  # who it was, and the end of `fit`
        assert all((a == b).all() for a, b in zip(before, model.get_weights()))
        assert model.optimizer.last_nonfinite == (bad_rank, model.weights[0].path), model.optimizer.last_nonfinite
    assert int(model.optimizer.skipped_steps) == scope.num_replicas
    assert scope.largest_difference(model) == 0


@check
def sums_that_overflow_by_themselves_are_finite(scope):
    """A check of sums tells from the elements whether anything is bad, and names nobody where no gradient was."""
    weights = [keras.Variable(np.zeros(4, "float32"), name=name) for name in ("first", "second")]
    optimizer = ks.CrossShard(keras.optimizers.SGD(1e-38), on_nonfinite="skip")
    with recorded() as calls:
        for _ in range(2):
            optimizer.apply([torch.zeros(4), torch.full((4,), 2e38)], weights)
    assert len(calls) == 3, calls
    assert int(optimizer.skipped_steps) == 0 and int(optimizer.iterations) == 2
    np.testing.assert_allclose(weights[1].numpy(), -4.0, rtol=1e-6)
    # Where a sum of finite gradients overflows, it is nobody's.
    optimizer = ks.CrossShard(keras.optimizers.SGD(1e-38), on_nonfinite="skip", reduction="sum")
    optimizer.apply([torch.zeros(4), torch.full((4,), 2e38)], weights)
    assert int(optimizer.skipped_steps) == 1
    assert optimizer.last_nonfinite == (None, "second"), optimizer.last_nonfinite


@check
def the_last_micro_batch_of_a_window_sends_in_the_backward_pass(scope):
    for size, more in ((2, {}), (3, {"on_nonfinite": "skip"}), (2, {"reduction": "sum", "compression": "float16"})):
        arguments = {"gradient_accumulation_steps": size, **more}
        plain = trained(scope, {"overlap": False, **arguments}, num_steps=4 * size)
        with recorded() as calls:
            model = trained(scope, {"bucket_mib": TINY, **arguments}, num_steps=4 * size)
        assert_same(model, plain, close(scope))
        assert scope.largest_difference(model) == 0
        inside = [inside for _, inside in calls[1:]]
        assert inside == [False] * 4 + [True] * (4 * 3) + [False] * 4, inside
        assert int(model.optimizer.iterations) == 4


@check
def windows_in_which_gradients_come_and_go(scope):
    """A variable with a gradient in the first micro-batch only; one on one rank only; one that is frozen on the way."""

    class Sometimes(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
            self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")
            self.count = 0

        def call(self, x):
            self.count += 1
            x = x * self.scale if self.count % 3 == 1 else x
            return x + self.shift if scope.replica_id == 0 else x

    def freezing(model, x, y, size):
        for first, last in ((0, 6), (6, 10), (10, 12)):  # a window that is frozen, and one in which that ends
            model.layers[0].trainable = first != 6
            model.compile(model.optimizer, "mse")
            part = slice(first * size, last * size)
            model.fit(x[part], y[part], batch_size=size, shuffle=False, verbose=0)

    for loop in (None, freezing):
        arguments = {"gradient_accumulation_steps": 3}
        models = [
            trained(scope, {**how, **arguments}, make_model(Sometimes()), loop=loop, num_steps=12)
            for how in ({"overlap": False}, {"bucket_mib": TINY})
        ]
        assert_same(*models, close(scope))
        assert scope.largest_difference(models[1]) == 0
        assert int(models[1].optimizer.iterations) == 4


@check
def a_bad_micro_batch_leaves_its_window_out(scope):
    arguments = {"gradient_accumulation_steps": 3, "on_nonfinite": "skip"}
    for bad in range(3, 6):
        found = []
        for how in ({"overlap": False}, {"bucket_mib": TINY}):
            model = make_model()
            model.compile(cross_shard(problem.sgd_momentum(), **arguments, **how), "mse")
            (x, y), size = my_rows(scope, 9)
            if scope.replica_id == 1:
                x[bad * size] = np.nan
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
            assert int(model.optimizer.skipped_steps) == 1 and int(model.optimizer.iterations) == 2
            assert model.optimizer.last_nonfinite == (1, model.weights[0].path), model.optimizer.last_nonfinite
            found.append(model)
        assert_same(*found, close(scope))


@check
def parts_of_unequal_sizes(scope):
    found = []
    for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
        model = make_model()
        model.compile(cross_shard(problem.sgd_momentum(), **arguments), "mse")
        ks.prepare(model, auto_shard=False)
        x, y = problem.data(4)
        mine = slice(0, 9) if scope.replica_id else slice(9, None)  # the others run out of rows
        with recorded() as calls:
            model.fit(x[mine], y[mine], batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert any(inside for _, inside in calls) == (arguments.get("overlap") is None and "shard_state" not in MORE)
        assert scope.largest_difference(model) == 0
        found.append(model)
    assert_same(*found, 1e-6)
    # One process with the rows that all ranks have in a batch.
    alone = make_model()
    start = alone.get_weights()
    alone.compile(problem.sgd_momentum(), "mse")
    parts = [np.arange(9, len(x)), *[np.arange(9)] * (scope.num_replicas - 1)]
    for first in 2 * list(range(0, len(x), 4)):
        together = np.concatenate([part[first : first + 4] for part in parts])
        if len(together):
            alone.train_on_batch(x[together], y[together])
    assert problem.relative_difference(found[0].get_weights(), alone.get_weights(), start) <= problem.TOLERANCE


@check
def overflows_and_sums(scope):
    scaled = lambda: ks.LossScaling(problem.sgd_momentum(), "Backoff", {"scale_max": 8.0})  # noqa: E731
    for inner, arguments in ((scaled, {}), (lambda: keras.optimizers.SGD(0.05), {"reduction": "sum"})):
        plain = trained(scope, {"overlap": False, **arguments}, inner=inner)
        model = trained(scope, {"bucket_mib": TINY, **arguments}, inner=inner)
        assert_same(model, plain, 1e-6)
        x, y = problem.data(1)
        before = [w.copy() for w in model.get_weights()]
        if inner is scaled:
            if scope.replica_id == scope.num_replicas - 1:
                x[0, 0] = np.inf
            model.fit(x, y, verbose=0)
            assert int(model.optimizer.skipped_steps) == 1
            assert all((a == b).all() for a, b in zip(before, model.get_weights()))


@check
def what_needs_gradients_before_sends_at_the_end(scope):
    for arguments in (
        {"replica_clipnorm": 1.0},
        {"shard_state": True, "replica_clipnorm": 1.0},
        {"group_assignment": [[r] for r in range(scope.num_replicas)]},
        {"overlap": False},
    ):
        assert buckets_of(trained(scope, arguments)) is None, arguments
    model = make_model()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    plain, model = trained(scope, {"overlap": False}), trained(scope, {}, model)
    assert buckets_of(model) is None
    assert_same(model, plain, close(scope))
    del ddp


@check
def fit_after_a_loop_by_hand(scope):
    # From 3.16 on Keras puts a DDP around a model in `fit`, here when its gradients are reduced by us already.
    for arguments in ({"reduction": "sum"}, {"replica_clipnorm": 0.1}):
        inner = lambda: keras.optimizers.SGD(0.02)  # noqa: E731
        model, plain = (trained(scope, arguments, inner=inner, loop=by_hand) for _ in range(2))
        (x, y), size = my_rows(scope, NUM_STEPS)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        by_hand(plain, x, y, size)
        assert_same(model, plain, 1e-6)


@check
def ranks_that_end_early_are_noticed(scope):
    model = trained(scope, {"bucket_mib": TINY})
    x, y = problem.data(2 if scope.replica_id else 1)
    fit = lambda: model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)  # noqa: E731
    refused(fit, ValueError, "must make the same number of updates")
    dist.barrier()


@check
def an_update_that_one_rank_leaves_out_is_noticed(scope):
    model = trained(scope, {"bucket_mib": TINY})
    x, y = problem.data(1)
    if scope.replica_id == 1:
        real = model.optimizer.apply
        model.optimizer.__dict__["apply"] = lambda *_: 1 / 0  # in Keras' own step, after the backward pass
    try:
        model.train_on_batch(x, y)
    except ZeroDivisionError:
        model.optimizer.__dict__["apply"] = real
    refused(lambda: model.train_on_batch(x, y), ValueError, "must make the same updates, in the same order")
    dist.barrier()


@check
def layers_that_are_frozen_for_a_while(scope):
    found = []
    for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
        model = make_model()
        model.compile(cross_shard(problem.sgd_momentum(), **arguments), "mse")
        model.optimizer.build(model.trainable_variables)
        (x, y), size = my_rows(scope, 4)
        for is_frozen in (True, False):  # also while the backward pass is listened to for the first time
            model.layers[1].trainable = not is_frozen
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        found.append(model)
    assert_same(*found, 1e-6)


@check
def gradients_that_a_later_hook_changes(scope):
    def in_place(parameter):
        parameter.grad.mul_(0.1)

    def anew(parameter):
        parameter.grad = parameter.grad * 0.1

    for hook in (in_place, anew):
        found = []
        for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
            model = trained(scope, arguments, num_steps=3)
            for variable in model.trainable_variables:
                variable.value.register_post_accumulate_grad_hook(hook)
            (x, y), size = my_rows(scope, 3)
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
            found.append(model)
        assert_same(*found, 1e-6)


@check
def a_model_that_is_moved_between_two_fits(scope):
    """`Module.to`, `half` and `float` give weights and their `.grad` other memory."""
    for arguments in ({"bucket_mib": TINY}, {"shard_state": True}):
        found = []
        for more in ({"overlap": False}, {}):
            model = trained(scope, {**arguments, **more}, num_steps=3)
            model._apply(lambda tensor: tensor.clone())
            (x, y), size = my_rows(scope, 3)
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
            assert scope.largest_difference(model) == 0
            found.append(model)
        assert_same(*found, 1e-6)


@check
def hooks_end_with_their_optimizer(scope):
    model = make_model()
    for _ in range(3):
        trained(scope, {"bucket_mib": TINY}, model, num_steps=2)
    gc.collect()
    assert [len(v.value._post_accumulate_grad_hooks) for v in model.trainable_variables] == [1] * 6


class Failing(keras.layers.Layer):
    """Ends the backward pass with an error on some ranks, when others have sent gradients."""

    ranks = ()

    def call(self, inputs):
        outputs = inputs * 1.0
        if dist.get_rank() in self.ranks and not isinstance(inputs, keras.KerasTensor):
            outputs.register_hook(lambda _: 1 / 0)
        return outputs


@check
def backward_passes_that_fail(scope):
    for ranks in ((1,), tuple(range(scope.num_replicas))):
        found = []
        for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
            model = trained(scope, arguments, make_model(Failing()), num_steps=3)
            (x, y), size = my_rows(scope, 4)
            Failing.ranks = ranks
            if scope.replica_id in ranks:  # and goes on with the same rows
                refused(lambda: model.train_on_batch(x[:size], y[:size]), ZeroDivisionError, "")  # noqa: B023
            Failing.ranks = ()
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
            found.append(model)
        assert_same(*found, 1e-6)
        assert scope.largest_difference(found[1]) == 0


@check
def parts_that_come_on_one_rank_after_another(scope):
    found = []
    for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
        Sometimes.ranks = ()
        model = trained(scope, arguments, make_model(Twice()), num_steps=2)
        for rank in range(scope.num_replicas):  # those before send at the end already
            Sometimes.ranks = (rank,)
            (x, y), size = my_rows(scope, 2)
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        found.append(model)
    assert_same(*found, 1e-6)
    assert not found[1].optimizer.pipeline.reducer.buckets._overlaps


@check
def compression_of_gradients_in_half_precision(scope):
    for arguments in ({"overlap": False}, {}):
        weight = keras.Variable(np.zeros(4, "float32"))
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), compression="bfloat16", **arguments)
        optimizer.apply([torch.full((4,), 1.0 + scope.replica_id, dtype=torch.float16)], [weight])
        assert np.allclose(weight.numpy(), -(scope.num_replicas + 1) / 2, rtol=1e-3), weight.numpy()


@check
def compiled_steps(scope):
    model, (x, y), size = problem.InOneLayer(), *my_rows(scope, num_steps=2)
    with problem.without_generated_code(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(ks.CrossShard(problem.sgd_momentum()), "mse", jit_compile=True)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    assert not [str(w.message) for w in caught if "Dynamo" in str(w.message)]
    whole_x, whole_y = problem.data(num_steps=2)
    reference = problem.model()
    reference.compile(problem.sgd_momentum(), "mse")
    reference.fit(whole_x, whole_y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(model.get_weights(), reference.get_weights()) <= problem.TOLERANCE
    assert scope.largest_difference(model) == 0


@contextlib.contextmanager
def exchanged():
    """What goes into all-to-alls: bytes, and whether in a backward pass."""
    real, calls = dist.all_to_all_single, []

    def all_to_all_single(result, tensor, *args, **kwargs):
        calls.append((tensor.nbytes, torch._C._current_graph_task_id() >= 0))
        return real(result, tensor, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single
    try:
        yield calls
    finally:
        dist.all_to_all_single = real


class Shifted(keras.layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=(), initializer="ones", name="shift")

    def call(self, inputs):
        return inputs + self.shift.value


SLICED = {"shard_state": True, "bucket_mib": TINY}
# Of SGD, which is tried out elsewhere each time it is built.
KNOWN = mock.patch.object(slices, "are_elementwise_inside", lambda optimizer, variables: [True] * len(variables))


@check
@KNOWN
def slices_travel_in_the_backward_pass(scope):
    """With the bits of those that travel at the end, and the same files."""
    plain = trained(scope, {**SLICED, "overlap": False}, make_model(Shifted()))
    assert_same(trained(scope, SLICED, make_model(Shifted())), plain)  # a scalar
    for steps, more in (
        (1, {}),
        (1, {"compression": "bfloat16", "on_nonfinite": "skip"}),
        (2, {"reduction": "sum", "gradient_accumulation_steps": 2}),
    ):
        plain = trained(scope, {**SLICED, "overlap": False, **more})
        with exchanged() as calls:
            model = trained(scope, {**SLICED, **more})
        assert_same(model, plain)
        num_updates = NUM_STEPS // steps
        inside = [inside for _, inside in calls]
        assert inside == [False] * 4 + [True] * (4 * (num_updates - 1)) + [False] * 4, (more, inside)
        assert scope.largest_difference(model) == 0
        files = [{}, {}]
        for store, one in zip(files, (plain, model)):
            one.optimizer.save_own_variables(store)
        assert all((files[0][key] == array).all() for key, array in files[1].items())
    assert_same(model, trained(scope, {**SLICED, **more}, loop=by_hand))
    assert_same(model, trained(scope, {"reduction": "sum", "gradient_accumulation_steps": 2}), 1e-6)


@check
def gradients_are_let_go_when_they_are_sent(scope):
    """A rank holds its slices of the gradients, and buckets that are filled and under way."""
    layers = [keras.layers.Dense(200) for _ in range(12)]
    model = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *layers, keras.layers.Dense(problem.NUM_OUTPUTS)])
    whole, bucket = 4 * model.count_params(), 0.17 * 2**20
    held = []

    class Watching(torch_sliced.SlicedBucket):
        def send(self):
            held.append(sum(v.value.grad.nbytes for v in model.trainable_variables if v.value.grad is not None))
            return super().send()

    with mock.patch.object(torch_sliced, "SlicedBucket", Watching):
        trained(scope, {"shard_state": True, "bucket_mib": bucket / 2**20}, model, num_steps=4)
    buckets = list(model.optimizer.pipeline.reducer.buckets)
    assert len(buckets) >= 10 and held[len(buckets) :] and max(held[len(buckets) : -len(buckets)]) <= bucket, held
    kept = sum(b._own.nbytes for b in buckets) + sum(t.nbytes for t in buckets[0]._pool.held.values())
    assert kept <= 1.02 * whole / scope.num_replicas + 3 * 1.02 * bucket, (kept, whole)
    for variable in model.trainable_variables:  # which nobody takes for a gradient
        assert torch.isnan(variable.value.grad).all() and variable.value.grad.untyped_storage().nbytes() == 4
    model.zero_grad()
    first = next(iter(model.trainable_variables)).value
    assert first.untyped_storage().nbytes() >= bucket / 2  # weights of a bucket lie together
    trained(scope, {"shard_state": True}, model, num_steps=2)  # in other buckets
    assert all(each.flat() is not None for each in model.optimizer._shards.holder.blocks)


@check
def slices_of_what_is_not_finite_name_the_rank(scope):
    model = trained(scope, {**SLICED, "on_nonfinite": "skip"})
    x, y = problem.data(1)
    for bad_rank in range(scope.num_replicas):
        before = [w.copy() for w in model.get_weights()]
        mine = x.copy()
        mine[0, 0] = np.inf if scope.replica_id == bad_rank else 0.0
        with exchanged() as calls:
            model.fit(mine, y, batch_size=len(x), verbose=0)
        assert [inside for _, inside in calls] == [True] * 4 + [False] * 4, calls
        assert all((a == b).all() for a, b in zip(before, model.get_weights()))
        assert model.optimizer.last_nonfinite == (bad_rank, model.weights[0].path), model.optimizer.last_nonfinite
    assert int(model.optimizer.skipped_steps) == scope.num_replicas


@check
@KNOWN
def slices_whose_sum_overflows_by_itself_are_finite(scope):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((16,)), dense])
    optimizer = cross_shard(keras.optimizers.SGD(1e-38, momentum=0.5), shard_state=True, on_nonfinite="skip")
    model.compile(optimizer, lambda target, output: keras.ops.mean(output, axis=-1))
    x, y = np.full((8, 16), 1e38, "float32"), np.zeros((8, 1), "float32")
    with exchanged() as calls:
        model.fit(x, y, batch_size=4, verbose=0)
    assert any(inside for _, inside in calls), calls
    assert int(optimizer.skipped_steps) == 0 and int(optimizer.iterations) == 2
    np.testing.assert_allclose(dense.kernel.numpy(), -2.5, rtol=1e-6)


@check
@KNOWN
def slices_of_gradients_meet_what_others_meet(scope):
    MORE["shard_state"] = True
    for same in (
        gradients_that_some_ranks_lack,
        parameters_that_are_replaced,
        windows_in_which_gradients_come_and_go,
        parts_of_unequal_sizes,
        gradients_that_a_later_hook_changes,
        ranks_that_end_early_are_noticed,
    ):
        try:
            same(scope)
        except BaseException:
            print(f"rank {scope.replica_id}: {same.__name__}", flush=True)
            raise
    MORE.clear()
    for ranks, more in (((0, 1, 2), {}), ((1,), {"gradient_accumulation_steps": 2})):
        Sometimes.ranks = ranks
        plain = trained(scope, {**SLICED, "overlap": False, **more}, make_model(Twice()))
        model = trained(scope, {**SLICED, **more}, make_model(Twice()))
        assert_same(model, plain, 5e-7)
    # After an error nobody can send again what was sent.
    model = trained(scope, SLICED, make_model(Failing()), num_steps=3)
    (x, y), size = my_rows(scope, 4)
    Failing.ranks = (1,)
    if scope.replica_id == 1:
        refused(lambda: model.train_on_batch(x[:size], y[:size]), ZeroDivisionError, "")
    Failing.ranks = ()
    refused(lambda: model.train_on_batch(x[:size], y[:size]), ValueError, "the memory of sent gradients is freed")
    dist.barrier()


@contextlib.contextmanager
def gathered():
    """For each all-gather of coded gradients whether it is in a backward pass."""
    real, calls = torch_communicator._all_gather, []

    def all_gather(*args, **kwargs):
        calls.append(torch._C._current_graph_task_id() >= 0)
        return real(*args, **kwargs)

    with mock.patch.object(torch_communicator, "_all_gather", all_gather):
        yield calls


def unsent(model):
    return [v.numpy() for v in model.optimizer.pipeline.carried]


@check
def coded_gradients_travel_in_the_backward_pass(scope):
    """With the bits, and what is kept, of the same buckets that are sent at the end."""
    scaled = lambda: ks.LossScaling(problem.sgd_momentum(), ks.AutomaticLossScaler())  # noqa: E731
    for codec, inner, more in (
        (ks.compression.Int8(block=16), problem.sgd_momentum, {}),
        (ks.compression.Int8(block=8, rounding="stochastic"), scaled, {"on_nonfinite": "skip"}),
        (ks.compression.Int4(block=8), problem.sgd_momentum, {"reduction": "sum", "gradient_accumulation_steps": 2}),
        (ks.compression.PowerSGD(rank=1, warmup_steps=3), problem.sgd_momentum, {"on_nonfinite": "skip"}),
    ):
        arguments = {"bucket_mib": TINY, "compression": codec, **more}
        with exchanged() as exchanges, gathered() as gatherings, recorded() as sums:
            model = trained(scope, arguments, inner=inner)
        by_end = trained(scope, arguments, inner=inner, loop=by_hand)
        assert_same(model, by_end)
        assert all((a == b).all() for a, b in zip(unsent(model), unsent(by_end)))
        assert np.max([np.abs(a).max() for a in unsent(model)]) > 0
        assert scope.largest_difference(model) == 0
        plain = trained(scope, more, inner=inner)
        moved = max(np.abs(a - b).max() for a, b in zip(plain.get_weights(), make_model().get_weights()))
        assert_same(model, plain, 0.5 * moved)
        num_updates = NUM_STEPS // more.get("gradient_accumulation_steps", 1)
        inside = [False] * 4 + [True] * (4 * (num_updates - 1)) + [False] * 4
        if "PowerSGD" in repr(codec):
            assert sum(inside for _, inside in sums) > 4 * (num_updates - 1)
        else:
            assert [inside for _, inside in exchanges] == inside and gatherings == inside, codec
    dist.barrier()


@check
def what_is_not_finite_leaves_nothing_in_what_is_unsent(scope):
    x, y = problem.data(1)
    for codec in ("int8", "int4", ks.compression.PowerSGD(rank=1, warmup_steps=0)):
        for more in ({"on_nonfinite": "skip"}, {}):
            model = trained(scope, {"bucket_mib": TINY, "compression": codec, **more})
            for bad_rank in range(scope.num_replicas):
                before, left = [w.copy() for w in model.get_weights()], [a.copy() for a in unsent(model)]
                mine = x.copy()
                mine[0, 0] = np.inf if scope.replica_id == bad_rank else 0.0
                model.fit(mine, y, batch_size=len(x), verbose=0)
                assert all((a == b).all() and np.isfinite(a).all() for a, b in zip(left, unsent(model))), codec
                if more:
                    assert all((a == b).all() for a, b in zip(before, model.get_weights()))
                    assert model.optimizer.last_nonfinite == (bad_rank, model.weights[0].path), codec
                else:  # as asked
                    assert np.isnan(model.get_weights()[0]).any()


class Whole(CodedInTwoLegs):
    """Codes nothing, so that it does not matter what travels together."""

    def encode(self, values, key=()):
        return [values]

    def decode(self, sent):
        return sent[0]


class Breaking(Whole):
    """Raises an error in one of the two legs."""

    leg, error = None, None

    def encode(self, values, key=()):
        if self.error is not None and key[-1] == self.leg:
            raise self.error
        return super().encode(values)


@check
def what_is_raised_while_coding_reaches_the_user(scope):
    for leg in (0, 1):  # the second one begins in the hook of another gradient, or at the end
        for error in (ValueError("too odd"), RuntimeError("too odd")):
            for loop in (None, by_hand):
                codec = Breaking()
                model = trained(scope, {"bucket_mib": TINY, "compression": codec}, loop=loop)
                codec.leg, codec.error = leg, error
                before = model.get_weights()
                (x, y), size = my_rows(scope, 1)
                fit = model.train_on_batch if loop is None else functools.partial(loop, model, size=size)
                step = functools.partial(fit, x, y)
                refused(step, type(error), "too odd")
                try:
                    step()
                except RuntimeError as again:
                    assert f"{type(error).__name__}: too odd" in str(again), again
                    assert "`compression` failed on this rank" in str(again), again
                else:
                    raise AssertionError("goes on")
                assert all((a == b).all() for a, b in zip(before, model.get_weights()))
                dist.barrier()  # the group is open, as nobody else has failed


@check
def coded_gradients_are_let_go_after_the_update(scope):
    def held():
        """The bytes of tensors of floats that are not small."""
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel() >= 64}
        return sum(memory.values())

    def wide():
        sizes = (300, 300, problem.NUM_OUTPUTS)
        return keras.Sequential([keras.Input((problem.NUM_FEATURES,)), *map(keras.layers.Dense, sizes)])

    for codec, loop in (
        ("int8", None),
        ("int8", by_hand),
        (ks.compression.PowerSGD(rank=1, warmup_steps=0), None),
        (ks.compression.PowerSGD(rank=1), by_hand),
    ):
        before = held()
        model = trained(scope, {"bucket_mib": 0.1, "compression": codec}, wide(), loop=loop)
        model.zero_grad()
        variables = {v.path: v for v in [*model.variables, *model.optimizer.variables]}
        num_bytes = sum(v.value.nbytes for v in variables.values())
        assert held() - before <= 1.1 * num_bytes, (codec, held() - before, num_bytes)
        del model


@check
def coded_gradients_meet_what_others_meet(scope):
    with mock.patch.dict(MORE, compression=Whole()):
        for same in (
            fit_sends_in_the_backward_pass_coded,
            gradients_that_some_ranks_lack,
            gradients_that_come_in_parts,
            steps_of_others_see_their_own_gradients,
            parameters_that_are_replaced,
            windows_in_which_gradients_come_and_go,
            parts_of_unequal_sizes,
            gradients_that_a_later_hook_changes,
            backward_passes_that_fail,
            ranks_that_end_early_are_noticed,
        ):
            try:
                same(scope)
            except BaseException:
                print(f"rank {scope.replica_id}: {same.__name__}", flush=True)
                raise


def fit_sends_in_the_backward_pass_coded(scope):
    plain = trained(scope, {"overlap": False})
    with exchanged() as calls:
        model = trained(scope, {"bucket_mib": TINY})
    assert_same(model, plain, close(scope))
    assert sum(inside for _, inside in calls) == 4 * (NUM_STEPS - 1), calls


@check
def backward_passes_that_are_differentiated_themselves(scope):
    plain = trained(scope, {"overlap": False})
    with_graph = functools.partialmethod(torch.Tensor.backward, create_graph=True)
    with mock.patch.object(torch.Tensor, "backward", with_graph), recorded() as calls:
        assert_same(trained(scope, {"bucket_mib": TINY}), plain, close(scope))
    assert any(inside for _, inside in calls), calls


def calls_of_a_step(make, num_layers):
    """How many functions of Python each step of `fit` calls."""
    model = keras.Sequential([keras.Input((4,)), *[keras.layers.Dense(4) for _ in range(num_layers)]])
    model.compile(make(), "mse")

    def calls_of(num_steps):
        rows, count = np.ones((num_steps, 4), "float32"), 0

        def note(frame, event, argument):
            nonlocal count
            count += event == "call"

        gc.collect()
        sys.setprofile(note)
        try:
            model.fit(rows, rows, batch_size=1, shuffle=False, verbose=0)
        finally:
            sys.setprofile(None)
        return count

    calls_of(8)  # what happens once
    return (calls_of(8) - calls_of(4)) / 4


CALLS_MORE = {(): (450, 4), (("shard_state", True),): (750, 4)}
"""Than with Keras' own optimizer, at most: for each step, and for each variable."""


@check
def a_step_calls_few_functions_of_python(scope):
    for arguments, (of_step, of_variable) in CALLS_MORE.items():
        makes = (keras.optimizers.Adam, lambda: ks.CrossShard(keras.optimizers.Adam(), **dict(arguments)))  # noqa: B023
        few, many = ([calls_of_a_step(make, num_layers) for make in makes] for num_layers in (2, 8))
        more_of_few, more_of_many = few[1] - few[0], many[1] - many[0]
        slope = (more_of_many - more_of_few) / 12
        assert slope <= of_variable, (few, many)
        assert more_of_few - 4 * slope <= of_step, (few, many)


@check
def planted_faults_are_seen(scope):
    plain = trained(scope, {"overlap": False})
    kind = torch_overlap.BackwardPass
    reals = kind.take, rank_sums.flat_buckets

    def before_it_is_there(self, i, parameter):
        """Sends what the step before has left."""
        bucket = next(bucket for bucket in self._queue if i in bucket.places)
        with mock.patch.object(bucket, "put", lambda *_: None):
            reals[0](self, i, parameter)

    def as_a_sum(tensors, bucket_bytes, op, *rest):
        return reals[1](tensors, bucket_bytes, "sum", *rest)

    for faults in ((before_it_is_there, reals[1]), (reals[0], as_a_sum)):
        kind.take, rank_sums.flat_buckets = faults
        model = trained(scope, {"bucket_mib": TINY})
        kind.take, rank_sums.flat_buckets = reals
        refused(lambda: assert_same(model, plain, 1e-3), AssertionError, "")  # noqa: B023


# The last one: from such a layer on, slices of gradients travel at the end.
@check
def a_rank_that_sends_at_the_end_may_wait_in_a_layer(scope):
    for more in ({"shard_state": True}, {"compression": "int8"}):
        found = []
        for arguments in ({"overlap": False}, {"bucket_mib": TINY}):
            model = make_model(keras.layers.BatchNormalization(synchronized=True))
            for _ in range(3):  # buckets that are full before the layer's turn
                model.add(keras.layers.Dense(problem.NUM_OUTPUTS, kernel_initializer="orthogonal"))
            if scope.is_chief:
                for variable in model.trainable_variables:
                    variable.value.register_post_accumulate_grad_hook(lambda _: None)
            model.compile(cross_shard(problem.sgd_momentum(), **more, **arguments), "mse")
            ks.prepare(model, auto_shard=False)
            (x, y), size = my_rows(scope, NUM_STEPS)
            model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
            found.append(model)
        assert_same(*found, 5e-7 if "shard_state" in more else 1e-2)


if __name__ == "__main__":
    checks.main(ks.data_parallel, dist.barrier)
