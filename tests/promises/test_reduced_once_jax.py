"""JAX: mapped axes, `fit` under a distribution, and what is compiled."""

import re

import keras
import numpy as np
import pytest
from support import problem
from support.reducing import global_gradients, plant
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("jax")
jax = pytest.importorskip("jax", reason="about JAX, which is not installed")
P = jax.sharding.PartitionSpec


def mesh(num_replicas, axis="batch"):
    return jax.sharding.Mesh(np.array(jax.devices()[:num_replicas]), (axis,))


def train(step, model, optimizer):
    """Runs `step(weights, state, x, y)` over all batches and returns the final weights."""
    weights, state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    x, y = problem.data()
    for start in range(0, len(x), problem.BATCH_SIZE):
        rows = slice(start, start + problem.BATCH_SIZE)
        weights, state = step(weights, state, x[rows], y[rows])
    return [np.asarray(w) for w in weights]


def made(optimizer):
    model = problem.model()
    optimizer.build(model.trainable_variables)

    def update(weights, state, x, y, cast=lambda weights: weights):
        def loss(weights):
            outputs, _ = model.stateless_call(weights, [], x)
            return keras.ops.mean(keras.ops.square(outputs - y))

        return optimizer.stateless_apply(state, jax.grad(loss)(cast(weights)), weights)

    return model, update


def trained_in_shard_map(num_replicas, optimizer, check_vma, varying=False, axis="batch"):
    model, update = made(optimizer)

    def step(weights, state, x, y):
        def cast(weights):
            return [jax.lax.pcast(w, (axis,), to="varying") for w in weights] if varying else weights

        return update(weights, state, x, y, cast)

    specs = dict(in_specs=(P(), P(), P(axis), P(axis)), out_specs=(P(), P()))
    step = jax.shard_map(step, mesh=mesh(num_replicas, axis), check_vma=check_vma, **specs)
    return train(jax.jit(step), model, optimizer)


def trained_in_pmap(num_replicas, optimizer):
    model, update = made(optimizer)
    step = jax.pmap(update, axis_name="batch")

    def on_all(weights, state, x, y):
        return step(weights, state, x.reshape(num_replicas, -1, 5), y.reshape(num_replicas, -1, 3))

    def spread(values):
        return [np.stack([v] * num_replicas) for v in values]

    first = True

    def with_spread(weights, state, x, y):
        nonlocal first
        if first:
            weights, state, first = spread(weights), spread(state), False
        return on_all(weights, state, x, y)

    copies = train(with_spread, model, optimizer)
    for weight in copies:
        assert all((copy == weight[0]).all() for copy in weight)
    return [weight[0] for weight in copies]


WAYS = {
    "shard_map, local": lambda n, o: trained_in_shard_map(n, o, check_vma=False),
    "shard_map, summed": lambda n, o: trained_in_shard_map(n, o, check_vma=True),
    "shard_map, cast to varying": lambda n, o: trained_in_shard_map(n, o, check_vma=True, varying=True),
    "pmap": trained_in_pmap,
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
# Where gradients arrive in one of two ways, the others add nothing but another path to them.
two_ways = pytest.mark.parametrize("way", some(WAYS.values(), [*WAYS.values()][:2]), ids=WAYS)
by_local = pytest.mark.parametrize("way", some(WAYS.values(), [*WAYS.values()][:1]), ids=WAYS)
by_summed = pytest.mark.parametrize("way", some(WAYS.values(), [*WAYS.values()][1:2]), ids=WAYS)


@pytest.fixture(scope="module")
def one_device():
    model, update = made(problem.sgd_momentum())
    del update
    model.compile(problem.sgd_momentum(), "mse")
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


@each_way
@pytest.mark.parametrize("num_replicas", some([2, 8], [2]))
def test_mapped_axes_equal_one_device(way, num_replicas, one_device):
    weights = way(num_replicas, ks.CrossShard(problem.sgd_momentum()))
    assert problem.relative_difference(weights, one_device) <= problem.TOLERANCE


@by_local
def test_loss_scaling_and_clipping_inside(way):
    def make():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1), initial_scale=1.0
        )

    weights = way(4, ks.CrossShard(make()))
    model, update = made(make())
    reference = train(jax.jit(update), model, make_built(make, model))
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@by_summed
def test_an_overflow_on_any_replica_is_skipped_on_all(way, monkeypatch):
    x, y = problem.data(num_steps=4)
    x[problem.BATCH_SIZE + 13, 2] = np.inf  # on the last of the replicas
    monkeypatch.setattr(problem, "data", lambda: (x, y))

    def make():
        return ks.LossScaling(problem.sgd_momentum(), "Backoff", {"scale_max": 1.0})

    weights = way(4, ks.CrossShard(make()))
    assert all(np.isfinite(w).all() for w in weights)
    model, update = made(make())
    reference = train(jax.jit(update), model, make_built(make, model))
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@pytest.mark.parametrize("name", some(["shard_map, local", "pmap"], 2))
@pytest.mark.exhaustive
def test_outside_of_cross_shard_the_check_is_made_global(name, monkeypatch):
    x, y = problem.data(num_steps=4)
    x[problem.BATCH_SIZE + 13, 2] = np.inf
    monkeypatch.setattr(problem, "data", lambda: (x, y))
    scaler = ("Backoff", {"scale_max": 1.0})
    inside = WAYS[name](4, ks.CrossShard(ks.LossScaling(problem.sgd_momentum(), *scaler)))
    outside = WAYS[name](4, ks.LossScaling(ks.CrossShard(problem.sgd_momentum()), *scaler))
    assert problem.relative_difference(outside, inside) <= problem.TOLERANCE


@pytest.mark.parametrize("check_vma", [True, False])
def test_outside_of_cross_shard_the_check_heeds_how_gradients_are_said_to_arrive(check_vma):
    """Of two gradients one is local, and NaN on the last replica; the other one the loop has reduced."""
    weights = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    optimizer = ks.LossScaling(ks.CrossShard(keras.optimizers.SGD(1.0), gradients="local"), "Backoff")
    optimizer.build(weights)

    def step(values, state, local):
        grads = [local[0] * 2.0**14, jax.lax.pmean(local[0, :1] * 0 + 2.0**14, "batch")]
        return optimizer.stateless_apply(state, grads, values)

    specs = dict(in_specs=(P(), P(), P("batch")), out_specs=(P(), P()))
    step = jax.jit(jax.shard_map(step, mesh=mesh(2), check_vma=check_vma, **specs))
    values, state = [v.value for v in weights], [v.value for v in optimizer.variables]
    rows = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    values, state = step(values, state, rows)
    for found, expected in zip(values, ([-1.0, -1.0], [2.0])):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    skipped, _ = step(values, state, np.where(rows > 3.5, np.nan, rows))
    for found, before in zip(skipped, values):
        assert all((np.asarray(shard.data) == before).all() for shard in found.addressable_shards)


def make_built(make, model):
    optimizer = make()
    optimizer.build(model.trainable_variables)
    return optimizer


@two_ways
def test_the_sum_is_that_many_times_the_mean(way):
    weights = way(4, ks.CrossShard(problem.sgd_momentum(), reduction="sum"))
    assert problem.relative_difference(weights, summed_in_numpy()) <= problem.TOLERANCE


def summed_in_numpy(num_micro_batches=1):
    """SGD with momentum on the sum over four replicas of the gradients of their mean losses."""
    held = []

    def update(step, weights, grads):
        held.append([4 * grad for grad in grads])  # the whole batch's gradient is the mean of the replicas'
        if len(held) == num_micro_batches:
            for velocity, weight, *window in zip(velocities, weights, *held):
                velocity *= 0.9
                velocity -= 0.1 * sum(window) / num_micro_batches
                weight += velocity
            held.clear()

    velocities = [np.zeros_like(w, "float64") for w in problem.start_weights()]
    return problem.trained_in_numpy(update)


# Halving the bits of what travels: each gradient, and each of their partial sums, is off by 2**-8 of itself.
COMPRESSED = 4 * 2**-8

SUMS = {
    "plain": ({}, False, problem.TOLERANCE),
    "divided state": ({"shard_state": True}, False, problem.TOLERANCE),
    "accumulates": ({"gradient_accumulation_steps": 2, "gradients": "global"}, False, problem.TOLERANCE),
    "prepared": ({}, True, problem.TOLERANCE),
    "prepared, accumulates, divided state": (
        {"gradient_accumulation_steps": 2, "shard_state": True},
        True,
        problem.TOLERANCE,
    ),
    "prepared, clipped": ({"replica_clipnorm": 1e9, "shard_state": True}, True, problem.TOLERANCE),
    "prepared, compressed": ({"compression": "bfloat16"}, True, COMPRESSED),
    "prepared, compressed, accumulates": (
        {"compression": "bfloat16", "gradient_accumulation_steps": 2, "shard_state": True},
        True,
        COMPRESSED,
    ),
}


@pytest.mark.filterwarnings("ignore:.*accumulates gradients that are already averaged")
@pytest.mark.parametrize(
    "case", some(SUMS, ["divided state", "prepared, clipped", "prepared, compressed, accumulates"])
)
def test_the_sum_in_fit_is_that_of_numpy(case):
    """Gradients are global there, so the sum over N replicas is N times what arrives."""
    arguments, prepares, tolerance = SUMS[case]
    x, y = problem.data()
    with ks.data_parallel(4, prepare=False) as replicas:
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), "sum", **arguments), "mse")
        if prepares:
            ks.prepare(model)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    replicas.close()
    expected = summed_in_numpy(arguments.get("gradient_accumulation_steps", 1))
    assert problem.relative_difference(model.get_weights(), expected) <= tolerance


# With micro-batches `pmap` alone: each replica's own sums do not leave a `shard_map` that returns one copy for all.
LOCAL_SUMS = [("shard_map, local", 1), ("shard_map, cast to varying", 1), ("pmap", 1), ("pmap", 2)]
LOCAL_SUMS = [(way, compression, num_steps) for way, num_steps in LOCAL_SUMS for compression in (None, "bfloat16")]


@pytest.mark.parametrize(
    ("way", "compression", "num_micro_batches"),
    some(LOCAL_SUMS, [("shard_map, local", "bfloat16", 1), ("pmap", None, 2)]),
)
def test_the_sum_of_local_gradients_is_that_of_numpy(way, compression, num_micro_batches):
    given = {} if num_micro_batches == 1 else {"gradient_accumulation_steps": num_micro_batches}
    weights = WAYS[way](4, ks.CrossShard(problem.sgd_momentum(), "sum", compression=compression, **given))
    tolerance = problem.TOLERANCE if compression is None else COMPRESSED
    assert problem.relative_difference(weights, summed_in_numpy(num_micro_batches)) <= tolerance


@by_local
@pytest.mark.exhaustive
def test_a_dropped_reduction_turns_the_check_red(way, one_device, monkeypatch):
    plant(monkeypatch, lambda grads, *_: grads)
    # Where JAX knows what varies, it refuses weights that differ between replicas; elsewhere the numbers tell.
    with pytest.raises((AssertionError, ValueError)):
        weights = way(4, ks.CrossShard(problem.sgd_momentum()))
        assert problem.relative_difference(weights, one_device) <= problem.TOLERANCE


@pytest.mark.parametrize("op", some(["sum", "mean"], ["mean"]))
@pytest.mark.exhaustive
def test_a_second_reduction_turns_the_check_red(one_device, monkeypatch, op):
    def wrong(grads, variables, replicas, reduction="mean", gradient_state=None, trained=None):
        once = replicas.all_reduce(grads, "sum")
        return once if op == "sum" else [g / 16 for g in once]

    plant(monkeypatch, wrong)
    weights = WAYS["shard_map, local"](4, ks.CrossShard(problem.sgd_momentum()))
    assert problem.relative_difference(weights, one_device) > 1000 * problem.TOLERANCE


def test_an_axis_of_another_name_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"axis_name='data'"):
        trained_in_shard_map(2, ks.CrossShard(problem.sgd_momentum()), check_vma=False, axis="data")
    trained_in_shard_map(2, ks.CrossShard(problem.sgd_momentum(), axis_name="data"), check_vma=False, axis="data")


def test_gradients_that_arrive_differently_are_an_error_that_names_them():
    optimizer = ks.CrossShard(problem.sgd_momentum())
    model, update = made(optimizer)

    def step(weights, state, x, y):
        def cast(weights):
            return [jax.lax.pcast(weights[0], ("batch",), to="varying"), *weights[1:]]

        return update(weights, state, x, y, cast)

    step = jax.shard_map(
        step, mesh=mesh(2), in_specs=(P(), P(), P("batch"), P("batch")), out_specs=(P(), P()), check_vma=True
    )
    with pytest.raises(ValueError, match="hidden/kernel"):
        train(jax.jit(step), model, optimizer)


def test_local_gradients_cannot_be_under_a_distribution():
    x, y = problem.data(num_steps=1)
    with ks.data_parallel(2) as replicas:
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), gradients="local"), "mse")
        with pytest.raises(ValueError, match="gradients='auto'"):
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    replicas.close()


@pytest.mark.parametrize("wrapped", some([True, False], [True]))
def test_an_optimizer_made_before_the_distribution_is_repaired(wrapped, one_device):
    optimizer = problem.sgd_momentum()
    optimizer = ks.CrossShard(ks.CrossShard(optimizer) if wrapped else optimizer)
    x, y = problem.data()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:4]))
    model = problem.model()
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(model.get_weights(), one_device) <= problem.TOLERANCE
    assert all(v.value.sharding.is_fully_replicated and len(v.value.devices()) == 4 for v in optimizer.variables)


def compiled_step(optimizer):
    """The optimised HLO of the step that `fit` runs under DataParallel on four devices."""
    x, y = problem.data(num_steps=1)
    with ks.data_parallel(4) as replicas:
        model = problem.model()
        model.compile(optimizer(), "mse")
        model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
        state = model._get_jax_state(
            trainable_variables=True, non_trainable_variables=True, optimizer_variables=True, metrics_variables=True
        )
        from keras.src.backend.jax.trainer import _distribute_data

        step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, model._get_state_sharding_spec()))
        text = step.lower(state, _distribute_data((x, y))).compile().as_text()
    replicas.close()
    return text


def collectives(text):
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    return {name: len(re.findall(rf"(?<![%\w-]){name}(?:-start)?\(", text)) for name in names}


def copies(text):
    """How many arrays are copied, and how many results lie in the memory of an argument that was given away."""
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", text)
    return len(re.findall(r" copy\(", text)), aliases[1].count("may-alias") + aliases[1].count("must-alias")


def test_fit_compiles_to_the_collectives_and_copies_of_plain_keras():
    """One fused all-reduce, and none of ours; state is updated in place."""
    plain = compiled_step(lambda: problem.sgd_momentum())
    wrapped = compiled_step(lambda: ks.CrossShard(problem.sgd_momentum()))
    assert collectives(wrapped) == collectives(plain)
    assert collectives(wrapped)["all-reduce"] == 1
    assert copies(wrapped) == copies(plain)
    assert copies(wrapped)[1] >= 4 + 4  # weights and momentums


def test_a_mapped_axis_compiles_to_one_all_reduce():
    optimizer = ks.CrossShard(problem.sgd_momentum())
    model, update = made(optimizer)
    step = jax.shard_map(
        update, mesh=mesh(4), in_specs=(P(), P(), P("batch"), P("batch")), out_specs=(P(), P()), check_vma=False
    )
    x, y = problem.data(num_steps=1)
    weights, state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    text = jax.jit(step).lower(weights, state, x, y).compile().as_text()
    assert collectives(text)["all-reduce"] == 1


# -- each replica's own gradients ------------------------------------------------------------------------------------


def clipping():
    return ks.CrossShard(problem.sgd_momentum(), replica_clipnorm=problem.CLIPNORM)


LOCAL_WAYS = [name for name in WAYS if name != "shard_map, summed"]


@pytest.mark.parametrize("way", some(LOCAL_WAYS, ["shard_map, local"]))
def test_each_replica_is_clipped_by_itself(way):
    weights = WAYS[way](4, clipping())
    reference = problem.replicas_in_numpy(4, problem.CLIPNORM)[0]
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


@pytest.mark.exhaustive
def test_clipping_in_units_of_the_loss_that_is_scaled_inside():
    inner = keras.optimizers.LossScaleOptimizer(problem.sgd_momentum(), initial_scale=4096.0)
    optimizer = ks.CrossShard(inner, replica_clipnorm=problem.CLIPNORM)
    model = problem.model()
    optimizer.build(model.trainable_variables)

    def update(weights, state, x, y):
        def loss(weights):
            outputs, _ = model.stateless_call(weights, [], x)
            with keras.StatelessScope(zip(optimizer.variables, state)):
                return optimizer.scale_loss(keras.ops.mean(keras.ops.square(outputs - y)))

        return optimizer.stateless_apply(state, jax.grad(loss)(weights), weights)

    specs = dict(in_specs=(P(), P(), P("batch"), P("batch")), out_specs=(P(), P()))
    weights = train(jax.jit(jax.shard_map(update, mesh=mesh(4), check_vma=False, **specs)), model, optimizer)
    reference = problem.replicas_in_numpy(4, problem.CLIPNORM)[0]
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


def test_summed_gradients_cannot_be_clipped_by_replica():
    with pytest.raises(ValueError, match=r"`replica_clipnorm` needs.*check_vma=False"):
        WAYS["shard_map, summed"](2, clipping())


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ({"replica_clipnorm": 1.0}, r"keras_shardopt\.prepare\(model\)"),
        ({"replica_transform": lambda grads, variables: grads}, r"keras_shardopt\.prepare\(model\)"),
        ({"group_assignment": [[0, 1], [2, 3]]}, r"jax\.shard_map"),
    ],
)
def test_fit_alone_cannot_tell_replicas_apart(arguments, call):
    x, y = problem.data(num_steps=1)
    with ks.data_parallel(4, prepare=False) as replicas:
        model = problem.model()
        model.compile(ks.CrossShard(problem.sgd_momentum(), **arguments), "mse")
        with pytest.raises(ValueError, match=call):
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
    replicas.close()


GROUPS = [[0, 3], [1, 2]]


def trained_in_groups(way, optimizer, num_replicas=4):
    """Every replica's weights. Each has weights and state of its own, along a leading axis."""
    model, update = made(optimizer)

    def on_replica(weights, state, x, y):
        weights, state = jax.tree.map(lambda value: value[0], (weights, state))
        return jax.tree.map(lambda value: value[None], update(weights, state, x, y))

    if way == "pmap":
        step = jax.pmap(update, axis_name="batch")
    else:
        specs = dict(in_specs=(P("batch"),) * 4, out_specs=P("batch"))
        step = jax.jit(jax.shard_map(on_replica, mesh=mesh(num_replicas), check_vma=way == "check_vma", **specs))
    weights, state = (
        [np.stack([v.value] * num_replicas) for v in variables]
        for variables in (model.trainable_variables, optimizer.variables)
    )
    x, y = problem.data()
    for start in range(0, len(x), problem.BATCH_SIZE):
        rows = slice(start, start + problem.BATCH_SIZE)
        batch = x[rows], y[rows]
        if way == "pmap":
            batch = [array.reshape(num_replicas, -1, array.shape[1]) for array in batch]
        weights, state = step(weights, state, *batch)
    return [[np.asarray(w[r]) for w in weights] for r in range(num_replicas)]


@pytest.mark.parametrize("way", some(["shard_map", "check_vma", "pmap"], ["shard_map", "check_vma"]))
@pytest.mark.parametrize("clipnorm", some([None, problem.CLIPNORM], [problem.CLIPNORM]))
def test_groups_drift_apart(way, clipnorm):
    optimizer = ks.CrossShard(problem.sgd_momentum(), group_assignment=GROUPS, replica_clipnorm=clipnorm)
    found = trained_in_groups(way, optimizer)
    for mine, expected in zip(found, problem.replicas_in_numpy(4, clipnorm, GROUPS)):
        assert problem.relative_difference(mine, expected) <= problem.TOLERANCE
    assert problem.relative_difference(found[0], found[1]) > 1e-2


def test_replicas_are_counted_within_their_groups():
    from keras_shardopt.backends.jax.communicator import MappedAxis

    def on_replica(_):
        return MappedAxis("batch").split(GROUPS).replica_id[None]

    run = jax.shard_map(on_replica, mesh=mesh(4), in_specs=P("batch"), out_specs=P("batch"), check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(np.zeros(4)), [0, 0, 1, 1])


def test_where_jax_knows_what_varies_groups_reduce_their_own():
    from keras_shardopt.backends.jax.communicator import MappedAxis

    def on_replica(mine):
        group = MappedAxis("batch").split(GROUPS)
        return {op: group.all_reduce([mine], op)[0] for op in ("sum", "mean", "max")}

    run = jax.shard_map(on_replica, mesh=mesh(4), in_specs=P("batch"), out_specs=P("batch"), check_vma=True)
    found = jax.jit(run)(np.array([1.0, 2.0, 4.0, 8.0]))
    np.testing.assert_array_equal(found["sum"], [9, 6, 6, 9])
    np.testing.assert_array_equal(found["mean"], [4.5, 3, 3, 4.5])
    np.testing.assert_array_equal(found["max"], [8, 4, 4, 8])


@pytest.mark.exhaustive
def test_forgotten_groups_turn_the_check_red(monkeypatch):
    real = global_gradients
    plant(
        monkeypatch,
        lambda grads, variables, group, *rest: real(grads, variables, group.world, *rest),
    )
    with pytest.raises(AssertionError):
        test_groups_drift_apart("shard_map", None)


# -- two phases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", some([True, False], [True]))
def test_minimize_computes_local_gradients_in_shard_map(check_vma):
    """Also where `shard_map` would sum them, so that each replica can be clipped."""
    optimizer = clipping()
    model = problem.model()
    optimizer.build(model.trainable_variables)

    def step(weights, state, x, y):
        held = [*model.trainable_variables, *optimizer.variables]
        with keras.StatelessScope(zip(held, [*weights, *state])) as scope:
            optimizer.minimize(lambda: keras.ops.mean(keras.ops.square(model(x) - y)))
        values = [scope.get_current_value(v) for v in held]
        return values[: len(weights)], values[len(weights) :]

    specs = dict(in_specs=(P(), P(), P("batch"), P("batch")), out_specs=(P(), P()))
    weights = train(jax.jit(jax.shard_map(step, mesh=mesh(4), check_vma=check_vma, **specs)), model, optimizer)
    reference = problem.replicas_in_numpy(4, problem.CLIPNORM)[0]
    assert problem.relative_difference(weights, reference) <= problem.TOLERANCE


def test_minimize_under_a_distribution(one_device):
    x, y = problem.data()
    with ks.data_parallel(4) as replicas:
        model = problem.model()
        optimizer = ks.CrossShard(problem.sgd_momentum())
        layout = keras.distribution.distribution().get_data_layout((problem.BATCH_SIZE, 1))
        for start in range(0, len(x), problem.BATCH_SIZE):
            rows = slice(start, start + problem.BATCH_SIZE)
            batch = [keras.distribution.distribute_tensor(array[rows], layout) for array in (x, y)]

            def loss(batch=batch):
                return keras.ops.mean(keras.ops.square(model(batch[0]) - batch[1]))

            optimizer.minimize(loss, model.trainable_variables)
        assert replicas.largest_difference(model) == 0
        assert problem.relative_difference(model.get_weights(), one_device) <= problem.TOLERANCE
    replicas.close()


def test_the_moves():
    from keras_shardopt.backends.active import runtime

    def on_replica():
        replicas = runtime.communicator("batch")
        mine = jax.numpy.arange(4.0) + 10.0 * replicas.replica_id
        found = problem.moves(replicas, mine)
        return {name: value[None] for name, value in found.items()}

    mapped = jax.shard_map(on_replica, mesh=mesh(4), in_specs=(), out_specs=P("batch"), check_vma=False)
    problem.check_moves({name: np.asarray(value) for name, value in jax.jit(mapped)().items()})
