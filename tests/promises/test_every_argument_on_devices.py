"""All arguments of `CrossShard` with each other, on the replicas of TensorFlow and JAX, against NumPy.

Fewer levels than test_every_argument.py has on replicas in threads; PyTorch's ranks are in rank_checks.py.
"""

import keras
import numpy as np
import pytest
from keras import ops
from promises.problems import every_argument
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.active import runtime
from keras_shardopt.update.trainer_context import BatchShare, batch_shared

BACKEND = keras.config.backend()
FEW = {
    "inner_optimizer": ["momentum", "adam clipnorm", "scaled", "masters"],
    "program": ["one"],
    "dtypes": ["float32", "and float16"],
    "rows": ["even", "uneven", "some idle"],
    "missing": ["none", "always"],
    "bucket_mib": [25.0],
    "name": [None],
}
FEWER = {  # compiling, and replicas that take turns, take seconds for what runs in milliseconds
    **FEW,
    "inner_optimizer": ["momentum", "adam clipnorm", "scaled"],
    "bad": ["none", "NaN", "idle"],
    "gradient_accumulation_steps": [None, 3],
    "compression": [None, "bfloat16"],
    "fused": ["auto"],
    "overlap": ["auto"],
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of gradients that do not exist


def each_row(backend, **limits):
    """A row for each pair of what is left of the levels, on one backend; by default a few of these rows.

    On JAX also of the threesomes those that no other contains: replicas in threads have them all.
    """
    few = [None]
    if backend == BACKEND:
        more = every_argument.threesomes(**limits) if backend == "jax" else []
        parts = [set(every_argument.not_default(row)) for row in more]
        few = every_argument.rows(**limits)
        few += [row for row, mine in zip(more, parts) if not any(mine < others for others in parts)]
    return pytest.mark.parametrize("row", some(few, 4), ids=lambda row: row and every_argument.told(row))


def of_all(row):
    """`(rows, gradients)` of each micro-batch: of the gradients an array of all replicas', or None."""
    for rows, step in zip(every_argument.num_rows(row), every_argument.before_transform(row)):
        yield rows, [None if column[0] is None else np.stack(column).astype("float32") for column in zip(*step)]


def applied(row, optimizer, mine, own, rows):
    """One micro-batch with the gradients and the number of rows of this replica."""
    scale = optimizer.scale_loss(ops.ones(()))
    own = [None if g is None else ops.cast(ops.multiply(g, scale), v.dtype) for g, v in zip(own, mine)]
    if row["rows"] == "even":
        optimizer.apply(own, mine)
        return
    replicas = runtime.communicator(row["axis_name"])
    whole = ops.convert_to_tensor(every_argument.ROWS_OF_ALL)
    with batch_shared(BatchShare(rows, whole, replicas, losses_are_divided=row["gradients"][1] == "prescaled")):
        optimizer.apply(own, mine)


@pytest.mark.exhaustive
@pytest.mark.backends("tensorflow")
@each_row(
    "tensorflow",
    **{**FEWER, "inner_optimizer": ["momentum", "scaled"]},
    gradients=[("auto", "prescaled"), ("local", "local"), ("summed", "summed")],
)
def test_under_a_strategy(row):
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy([f"CPU:{r}" for r in range(every_argument.NUM_REPLICAS)])
    errors = []
    with strategy.scope():
        mine = every_argument.variables(row)
        optimizer = every_argument.cross_shard(row)
        optimizer.build(mine)
    for s, (rows, grads) in enumerate(of_all(row)):

        def on_replica():
            r = tf.distribute.get_replica_context().replica_id_in_sync_group
            if row["gradients"][1] == "prescaled":
                assert strategy.num_replicas_in_sync > 1  # a step that divides by it reads it
            own = [None if g is None else tf.gather(g, r) for g in grads]  # noqa: B023
            applied(row, optimizer, mine, own, tf.gather(rows, r))  # noqa: B023

        try:
            strategy.run(on_replica)
        except FloatingPointError as error:
            errors.append((s // every_argument.num_steps(row), str(error)))
    copies = zip(*[strategy.experimental_local_results(v.value) for v in mine])
    for replica, weights in enumerate(copies):
        every_argument.check(row, replica, [w.numpy() for w in weights], optimizer, errors)


def scanned(row, optimizer, mine):
    """A function of state, weights, gradients and rows for all micro-batches."""
    import jax

    def step(carry, given):
        state, weights = carry
        grads, rows = given
        grads = iter(grads)
        own = [None if is_missing else next(grads)[0] for is_missing in missing]
        variables = list(zip([*optimizer.variables, *mine], [*state, *weights]))
        with keras.StatelessScope(state_mapping=variables) as scope:
            applied(row, optimizer, mine, own, rows[0])
        values = [scope.get_current_value(v) for v, _ in variables]
        values = [before if after is None else after for after, (_, before) in zip(values, variables)]
        return (values[: len(state)], values[len(state) :]), None

    missing = [g is None for g in next(of_all(row))[1]]
    return lambda state, weights, grads, rows: jax.lax.scan(step, (state, weights), (grads, rows))[0]


def stacked(row):
    """Gradients and rows of all micro-batches, `[micro-batch, replica, ...]`."""
    steps = list(of_all(row))
    grads = [np.stack(column) for column in zip(*[grads for _, grads in steps]) if column[0] is not None]
    return grads, np.array([rows for rows, _ in steps], "int32")


def check_jax(row, replica, optimizer, mine, state, weights):
    for variable, value in zip(optimizer.variables, state):
        variable.assign(value)
    every_argument.check(row, replica, [np.asarray(w) for w in weights], optimizer)
    if replica:
        return
    if every_argument.expected(row)[replica].bad_updates and row["on_nonfinite"] == "raise":
        with pytest.raises(FloatingPointError, match="all gradients must be finite"):
            optimizer.check_finite()
    else:
        optimizer.check_finite()


@pytest.mark.backends("jax")
@each_row(
    "jax",
    **FEWER,
    gradients=[("auto", "local"), ("prescaled", "prescaled"), ("summed", "summed")],
    shard_state=[False],
)
def test_in_shard_map(row):
    import jax

    P = jax.sharding.PartitionSpec
    axis = row["axis_name"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: every_argument.NUM_REPLICAS]), (axis,))
    mine = every_argument.variables(row)
    optimizer = every_argument.cross_shard(row)
    optimizer.build(mine)
    run = scanned(row, optimizer, mine)

    def on_replica(*given):
        # Groups differ.
        return jax.tree.map(lambda value: value[None], run(*given))

    specs = dict(in_specs=(P(), P(), P(None, axis), P(None, axis)), out_specs=P(axis))
    run_all = jax.jit(jax.shard_map(on_replica, mesh=mesh, check_vma=False, **specs))
    state, weights = run_all([v.value for v in optimizer.variables], [v.value for v in mine], *stacked(row))
    for replica in range(every_argument.NUM_REPLICAS):
        own = [[value[replica] for value in values] for values in (state, weights)]
        check_jax(row, replica, optimizer, mine, *own)


@pytest.mark.backends("jax")
@each_row(
    "jax",
    **{**FEWER, "rows": ["even"], "bad": ["none", "NaN"], "compression": [None]},
    gradients=[("auto", "global"), ("global", "global")],
    group_assignment=[None],
    replica_clipnorm=[None],
    replica_transform=[None],
)
def test_under_a_distribution(row):
    import jax

    with ks.data_parallel(every_argument.NUM_REPLICAS):
        mine = every_argument.variables(row)
        optimizer = every_argument.cross_shard(row)
        optimizer.build(mine)
        run = jax.jit(scanned(row, optimizer, mine))
        state, weights = run([v.value for v in optimizer.variables], [v.value for v in mine], *stacked(row))
        check_jax(row, 0, optimizer, mine, state, weights)
