"""What is done with each replica's own gradients (clipping, transforms, groups), on replicas in threads."""

import keras
import numpy as np
import pytest
from keras import ops
from support import problem
from support.reducing import global_gradients, plant
from support.worlds import FakeWorld, reduced

import keras_shardopt as ks
from keras_shardopt.backends.communicator import GradientState
from keras_shardopt.numerics import clipped_to, global_norm
from keras_shardopt.update import replica_transform

SHAPES = [(3, 2), (5,), ()]
CLIPNORM = 2.0
LOCAL_STATES = [GradientState.LOCAL, GradientState.LOCAL_PRESCALED]
each_local_state = pytest.mark.parametrize("gradient_state", LOCAL_STATES)


def local_gradients(num_replicas):
    """`[replica][variable]`, of very different norms: some are clipped and some are not."""
    random = np.random.default_rng(5)
    return [
        [(0.2 * 3**r * random.normal(size=shape)).astype("float32") for shape in SHAPES] for r in range(num_replicas)
    ]


def clipped(grads, limit=CLIPNORM):
    norm = np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in grads))
    return [g * min(1.0, limit / norm) for g in grads]


def expected_in_numpy(local, groups=None, reduction="mean", clipnorm=None):
    groups = [list(range(len(local)))] if groups is None else groups
    local = local if clipnorm is None else [clipped(grads, clipnorm) for grads in local]
    group_of = {r: group for group in groups for r in group}
    return [
        [getattr(np, reduction)([local[p][i] for p in group_of[r]], axis=0) for i in range(len(SHAPES))]
        for r in range(len(local))
    ]


def variables():
    return [keras.Variable(np.zeros(shape, "float32"), name=f"v{i}") for i, shape in enumerate(SHAPES)]


def seen_by_the_inner_optimizer(local, gradient_state, monkeypatch, inner_arguments=None, is_spmd=True, **arguments):
    """What the inner optimizer of each replica gets, as a decrease of weights that start at zero."""
    num_replicas = len(local)
    world = FakeWorld(num_replicas, gradient_state, is_spmd).hold(monkeypatch)
    weights = [variables() for _ in range(num_replicas)]
    optimizers = [
        ks.CrossShard(keras.optimizers.SGD(1.0, **(inner_arguments or {})), **arguments) for _ in range(num_replicas)
    ]
    unit = optimizers[0].loss_scale / (num_replicas if gradient_state is GradientState.LOCAL_PRESCALED else 1)

    def step(replicas):
        r = replicas.replica_id
        optimizers[r].build(weights[r])
        optimizers[r].apply([ops.convert_to_tensor(np.asarray(g * unit, "float32")) for g in local[r]], weights[r])

    world.run(step)
    return [[-ops.convert_to_numpy(v) for v in mine] for mine in weights]


def assert_close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


GROUPS = [
    (1, None),
    (1, [[0]]),
    (2, None),
    (3, None),
    (4, [[0, 1], [2, 3]]),
    (4, [[3, 0], [1, 2]]),
    (4, [[0], [1], [2], [3]]),
    (4, [[0, 1, 2, 3]]),
    (6, [[0, 2, 4], [1, 3, 5]]),
]


@each_local_state
@pytest.mark.parametrize(("num_replicas", "groups"), GROUPS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clipnorm", [None, CLIPNORM])
@pytest.mark.exhaustive("jax", "tensorflow")
def test_every_way_of_arriving_with_groups_and_clipping(
    gradient_state, num_replicas, groups, reduction, clipnorm, monkeypatch
):
    local = local_gradients(num_replicas)
    found = seen_by_the_inner_optimizer(
        local, gradient_state, monkeypatch, reduction=reduction, group_assignment=groups, replica_clipnorm=clipnorm
    )
    assert_close(found, expected_in_numpy(local, groups, reduction, clipnorm))


@each_local_state
@pytest.mark.parametrize("is_spmd", [True, False])
def test_the_limit_is_in_units_of_the_loss_also_if_it_is_scaled_inside(gradient_state, is_spmd, monkeypatch):
    local = local_gradients(3)
    scaled = {"loss_scale_factor": 1024.0}
    found = seen_by_the_inner_optimizer(local, gradient_state, monkeypatch, scaled, is_spmd, replica_clipnorm=CLIPNORM)
    assert_close(found, expected_in_numpy(local, clipnorm=CLIPNORM))


# -- planted faults: each turns a check above red ------------------------------------------------------------------

real_unit, real_global = replica_transform.unit_of, global_gradients


def _prescaling_forgotten(step, *rest):
    return real_unit(step.replace(gradient_state=GradientState.LOCAL), *rest)


def _clipped_after_the_reduction(grads, variables, replicas, reduction, gradient_state, *_):
    reduced = real_global(grads, variables, replicas, reduction, gradient_state)
    return clipped_to(reduced, CLIPNORM, global_norm(reduced))


def _divided_by_all_instead_of_the_group(grads, variables, replicas, reduction, gradient_state, *_):
    reduced = real_global(grads, variables, replicas, reduction, gradient_state)
    return [g * (replicas.num_replicas / replicas.world.num_replicas) for g in reduced]


def _groups_forgotten(grads, variables, replicas, reduction, gradient_state, *_):
    return real_global(grads, variables, replicas.world, reduction, gradient_state)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("unit_of", _prescaling_forgotten),
        ("clipped_to", lambda grads, *_: grads),
        ("global_gradients", _divided_by_all_instead_of_the_group),
        ("global_gradients", _groups_forgotten),
    ],
)
def test_a_planted_fault_turns_the_checks_red(name, fault, monkeypatch):
    if name == "global_gradients":
        plant(monkeypatch, fault)
    else:
        monkeypatch.setattr(replica_transform, name, fault)
    with pytest.raises(AssertionError):
        test_every_way_of_arriving_with_groups_and_clipping(
            GradientState.LOCAL_PRESCALED, 4, [[0, 1], [2, 3]], "mean", CLIPNORM, monkeypatch
        )


def test_clipping_after_the_reduction_turns_the_checks_red(monkeypatch):
    monkeypatch.setattr(replica_transform, "clipped_to", lambda grads, *_: grads)
    plant(monkeypatch, _clipped_after_the_reduction)
    with pytest.raises(AssertionError):
        test_every_way_of_arriving_with_groups_and_clipping(
            GradientState.LOCAL_PRESCALED, 4, [[0, 1], [2, 3]], "mean", CLIPNORM, monkeypatch
        )


# -- what cannot be done -------------------------------------------------------------------------------------------

NEEDS_LOCAL = {
    "replica_clipnorm": 1.0,
    "replica_transform": lambda grads, variables: grads,
    "group_assignment": [[0, 1], [2, 3]],
}


@pytest.mark.parametrize("argument", NEEDS_LOCAL)
@pytest.mark.parametrize("gradient_state", [GradientState.SUMMED, GradientState.GLOBAL])
def test_gradients_that_are_reduced_already_are_refused_with_the_right_call(argument, gradient_state, monkeypatch):
    advice = r"keras_shardopt\.prepare\(model\)"
    if argument == "group_assignment":
        advice = r"jax\.shard_map\(\.\.\., check_vma=False\)"
    if gradient_state is GradientState.SUMMED:
        advice = r"shard_map\(\.\.\., check_vma=False\).*pcast"
    with pytest.raises(ValueError, match=rf"`{argument}` needs the gradients of each replica.*Received: .*{advice}"):
        seen_by_the_inner_optimizer(
            local_gradients(4), gradient_state, monkeypatch, **{argument: NEEDS_LOCAL[argument]}
        )


@pytest.mark.parametrize("gradient_state", [GradientState.SUMMED, GradientState.GLOBAL])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_one_group_of_all_is_no_groups(gradient_state, num_replicas, monkeypatch):
    local = local_gradients(num_replicas)
    groups = [list(range(num_replicas))]
    found = seen_by_the_inner_optimizer(local, gradient_state, monkeypatch, reduction="mean", group_assignment=groups)
    factor = 1 / num_replicas if gradient_state is GradientState.SUMMED else 1
    assert_close(found, [[g * factor for g in grads] for grads in local])


@pytest.mark.parametrize("gradient_state", GradientState)
def test_alone_a_replica_is_clipped_however_its_gradients_arrive(gradient_state, monkeypatch):
    local = [[9 * g for g in local_gradients(1)[0]]]
    found = seen_by_the_inner_optimizer(local, gradient_state, monkeypatch, replica_clipnorm=CLIPNORM)
    assert_close(found, [clipped(local[0])])
    assert np.sqrt(sum(np.sum(g**2) for g in found[0])) == pytest.approx(CLIPNORM, rel=1e-5)


@pytest.mark.parametrize("argument", NEEDS_LOCAL)
def test_inside_another_cross_shard_it_is_refused(argument):
    inner = ks.CrossShard("sgd", **{argument: NEEDS_LOCAL[argument]})
    assert inner.state_finder.needs_local_gradients
    around = [inner]
    if hasattr(keras.optimizers, "MultiOptimizer"):
        around.append(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner, {})))
    for optimizer in around:
        with pytest.raises(ValueError, match="Pass these arguments to the outer `CrossShard`"):
            ks.CrossShard(optimizer)
    assert not ks.CrossShard("sgd").state_finder.needs_local_gradients


def test_inside_another_cross_shard_one_group_of_all_is_refused_too():
    inner = ks.CrossShard("sgd", group_assignment=[[0, 1]])
    with pytest.raises(ValueError, match="Pass these arguments to the outer `CrossShard`"):
        ks.CrossShard(inner)


def test_gradients_pass_where_the_reduction_is_claimed():
    """As in a training step that has called `_reduce_gradients` itself."""
    weight = keras.Variable([0.0, 0.0])
    optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), replica_clipnorm=1.0)
    with optimizer._scope.reduced():
        optimizer.apply([ops.convert_to_tensor([3.0, 4.0])], [weight])
    np.testing.assert_array_equal(ops.convert_to_numpy(weight), [-3.0, -4.0])


# -- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "rule"),
    [
        ([0, 1], "list of lists"),
        (((0, 1), (2, 3)), "list of lists"),
        ([(0, 1), (2, 3)], "list of lists"),
        ([[0, 1], 2], "list of lists"),
        (7, "list of lists"),
        ("01", "list of lists"),
        ([["0"], ["1"]], "integer"),
        ([[[0]], [[1]]], "integer"),
        ([[None]], "integer"),
        ([[0, 0], [1, 1]], r"once.*\[0, 1\] more than once"),
        ([[0, 1], [0, 1]], r"once.*\[0, 1\] more than once"),
        ([[0, 1], [2, 4]], r"from 0 to.*but without \[3\]"),
        ([[1, 2]], r"but without \[0\]"),
        ([[0.5, 0]], r"but without \[1\]"),
        ([[-1, 0]], r"but without \[1\]"),
        ([[0, 1], [2]], r"equal size.*\[2, 1\]"),
        ([[0], []], r"equal size.*\[1, 0\]"),
    ],
)
def test_groups_are_checked_in_the_constructor(groups, rule):
    with pytest.raises(ValueError, match=f"`group_assignment` must .*{rule}") as caught:
        ks.CrossShard("sgd", group_assignment=groups)
    assert f"group_assignment={groups!r}" in str(caught.value)


def test_an_array_is_no_list_of_lists():
    with pytest.raises(ValueError, match="list of lists"):
        ks.CrossShard("sgd", group_assignment=np.array([[0, 1], [2, 3]]))


def test_the_rules_are_checked_in_the_originals_order():
    # The original looked at the shape first, then at the ids, then at the sizes.
    with pytest.raises(ValueError, match="list of lists"):
        ks.CrossShard("sgd", group_assignment=[(0, 0), [5]])
    with pytest.raises(ValueError, match="from 0 to"):
        ks.CrossShard("sgd", group_assignment=[[0, 7], [5]])


@pytest.mark.parametrize("groups", [None, [], ()])
def test_no_groups(groups):
    assert ks.CrossShard("sgd", group_assignment=groups).group_assignment is None


def test_ids_become_ints():
    optimizer = ks.CrossShard("sgd", group_assignment=[[np.int64(1), 0.0]])
    assert optimizer.group_assignment == [[1, 0]]
    assert [type(i) for i in optimizer.group_assignment[0]] == [int, int]


@pytest.mark.parametrize(("num_replicas", "groups"), [(1, [[0, 1]]), (4, [[0, 1]]), (2, [[0], [1], [2], [3]])])
def test_groups_of_another_number_of_replicas_are_refused_on_every_replica(num_replicas, groups, monkeypatch):
    world = FakeWorld(num_replicas).hold(monkeypatch)
    refused = []

    def step(replicas):
        with pytest.raises(ValueError, match=rf"{sum(map(len, groups))} replicas, but the program has {num_replicas}"):
            ks.CrossShard("sgd", group_assignment=groups).apply([ops.ones(2)], [keras.Variable([0.0, 0.0])])
        refused.append(replicas.replica_id)

    world.run(step)
    assert sorted(refused) == list(range(num_replicas))


def test_presence_of_gradients_counts_within_the_group(monkeypatch):
    world = FakeWorld(4, is_spmd=False).hold(monkeypatch)
    weights = [keras.Variable(np.zeros(2, "float32")), keras.Variable(np.zeros(1, "float32"))]
    optimizer = ks.CrossShard("sgd", group_assignment=[[0, 1], [2, 3]])

    def of_replica(replicas):
        some = ops.ones(1) if replicas.replica_id == 1 else None
        return reduced(optimizer, [ops.ones(2), some], weights)

    results = world.run(of_replica)
    for r in (0, 1):
        np.testing.assert_array_equal(ops.convert_to_numpy(results[r][1]), [0.5])
    assert results[2][1] is None and results[3][1] is None


# -- clipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_must_be_positive(limit):
    with pytest.raises(
        ValueError, match=r"`replica_clipnorm` must be > 0\..* Omit `replica_clipnorm` to train without clipping"
    ):
        ks.CrossShard("sgd", replica_clipnorm=limit)


@pytest.mark.parametrize("limit", ["1", True, [1.0]])
def test_a_limit_must_be_a_number(limit):
    with pytest.raises(TypeError, match="`replica_clipnorm` must be a float"):
        ks.CrossShard("sgd", replica_clipnorm=limit)


def reduced_by(optimizer, grads_of, weights, num_replicas, gradient_state, monkeypatch):
    world = FakeWorld(num_replicas, gradient_state).hold(monkeypatch)
    return world.run(lambda replicas: reduced(optimizer, grads_of(replicas.replica_id), weights))


@each_local_state
def test_gradients_within_the_limit_keep_every_bit(gradient_state, monkeypatch):
    value = np.random.default_rng(0).normal(size=7).astype("float32")
    optimizer = ks.CrossShard("sgd", replica_clipnorm=1e6)
    grads = reduced_by(
        optimizer,
        lambda r: [ops.convert_to_tensor(value)],
        [keras.Variable(np.zeros(7))],
        2,
        gradient_state,
        monkeypatch,
    )
    expected = value if gradient_state is GradientState.LOCAL else value + value
    np.testing.assert_array_equal(ops.convert_to_numpy(grads[0][0]), expected)


def test_none_and_next_values_are_not_in_the_norm(monkeypatch):
    weights = [keras.Variable([0.0, 0.0]), keras.Variable([0.0]), keras.Variable([0.0])]
    weights[2].overwrite_with_gradient = True
    optimizer = ks.CrossShard("sgd", replica_clipnorm=1.0)
    results = reduced_by(
        optimizer,
        lambda r: [ops.convert_to_tensor([3.0, 4.0]), None, ops.convert_to_tensor([100.0 + r])],
        weights,
        2,
        GradientState.LOCAL_PRESCALED,  # of a gradient [6, 8]
        monkeypatch,
    )
    for grad, none, next_value in results:
        np.testing.assert_allclose(ops.convert_to_numpy(grad), [0.6, 0.8], rtol=1e-6)
        assert none is None
        np.testing.assert_array_equal(ops.convert_to_numpy(next_value), [101.0])


@pytest.mark.parametrize("transform", [None, lambda grads, variables: list(grads)])
def test_half_precision_does_not_overflow(transform, monkeypatch):
    weights = [keras.Variable(np.zeros(2), dtype="float16")]
    optimizer = ks.CrossShard("sgd", replica_clipnorm=500.0, replica_transform=transform)
    results = reduced_by(
        optimizer,
        # Squares overflow, and so would the whole gradient: 4 times 20000.
        lambda r: [ops.convert_to_tensor(np.array([15000.0, 20000.0], "float16"))],
        weights,
        4,
        GradientState.LOCAL_PRESCALED,
        monkeypatch,
    )
    for (grad,) in results:
        assert keras.backend.standardize_dtype(grad.dtype) == "float16"
        np.testing.assert_allclose(ops.convert_to_numpy(grad), [300.0, 400.0], rtol=2e-3)


@pytest.mark.neutral
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("is_spmd", [True, False])
def test_where_the_sum_of_one_group_overflows_all_groups_skip(is_spmd, monkeypatch):
    world = FakeWorld(4, is_spmd=is_spmd).hold(monkeypatch)

    def work(replicas):
        weight = keras.Variable([1.0, 1.0], name="weight")
        optimizer = ks.CrossShard(
            "sgd", reduction="sum", group_assignment=[[0, 1], [2, 3]], on_nonfinite="skip", gradients="local"
        )
        optimizer.build([weight])
        for grad in ([1.0, 1.0], [1.0, 3e38 if replicas.replica_id >= 2 else 1.0]):  # each finite by itself
            optimizer.apply([ops.convert_to_tensor(grad)], [weight])
        return int(ops.convert_to_numpy(optimizer.iterations)), int(optimizer.skipped_steps), optimizer.last_nonfinite

    assert world.run(work) == [(1, 1, (None, "weight"))] * 4


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_so_on_every_replica(bad, monkeypatch):
    optimizer = ks.CrossShard("sgd", replica_clipnorm=1.0)
    results = reduced_by(
        optimizer,
        lambda r: [ops.convert_to_tensor(np.array([bad if r == 1 else 0.5, 0.5], "float32"))],
        [keras.Variable([0.0, 0.0])],
        2,
        GradientState.LOCAL,
        monkeypatch,
    )
    for (grad,) in results:
        assert np.isnan(ops.convert_to_numpy(grad)[0])


@pytest.mark.backends("tensorflow")
@each_local_state
def test_sparse_gradients(gradient_state, monkeypatch):
    import tensorflow as tf

    def grads_of(replica):
        size = (1.0 if replica else 10.0) / (2 if gradient_state is GradientState.LOCAL_PRESCALED else 1)
        return [tf.IndexedSlices(tf.constant([[3.0, 4.0]]) * size, tf.constant([1]), tf.constant([3, 2]))]

    seen = []

    def halved(grads, variables):
        seen.append(float(tf.norm(grads[0].values)))
        return [tf.IndexedSlices(grads[0].values * 0.5, grads[0].indices, grads[0].dense_shape)]

    optimizer = ks.CrossShard("sgd", replica_clipnorm=5.0, replica_transform=halved)
    weights = [keras.Variable(np.zeros((3, 2)))]
    world = FakeWorld(2, gradient_state).hold(monkeypatch)
    plant(monkeypatch, lambda grads, variables, replicas, *_: [grads[0], replicas.num_replicas])
    (first, _), (second, _) = world.run(lambda r: reduced(optimizer, grads_of(r.replica_id), weights))
    unit = 2 if gradient_state is GradientState.LOCAL_PRESCALED else 1
    np.testing.assert_allclose(first.values * unit, [[3.0, 4.0]], rtol=1e-6)  # 25 clipped to 5
    np.testing.assert_allclose(second.values * unit, [[1.5, 2.0]], rtol=1e-6)
    assert sorted(seen) == pytest.approx([5.0, 50.0])


# -- transforms ----------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="tests")
def signs(grads, variables):
    return [None if g is None else ops.sign(g) for g in grads]


@each_local_state
def test_a_transform_sees_the_gradient_of_the_replicas_own_mean_loss(gradient_state, monkeypatch):
    local, seen = local_gradients(3), {}

    def keep(grads, variables):
        seen[float(ops.convert_to_numpy(grads[2]))] = [ops.convert_to_numpy(g) for g in grads]
        assert len(grads) == len(variables) == 3
        return signs(grads, variables)

    found = seen_by_the_inner_optimizer(
        local, gradient_state, monkeypatch, {"loss_scale_factor": 64.0}, replica_transform=keep
    )
    for grads, (_, mine) in zip(sorted(local, key=lambda grads: grads[2]), sorted(seen.items()), strict=True):
        for a, b in zip(mine, grads):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert_close(found, expected_in_numpy([[np.sign(g) for g in grads] for grads in local]))


@each_local_state
def test_the_transform_comes_before_the_clipping(gradient_state, monkeypatch):
    local = local_gradients(2)
    found = seen_by_the_inner_optimizer(
        local, gradient_state, monkeypatch, replica_transform=signs, replica_clipnorm=0.5
    )
    assert_close(found, expected_in_numpy([[np.sign(g) for g in grads] for grads in local], clipnorm=0.5))


def test_a_transform_may_make_and_drop_gradients(monkeypatch):
    def swap(grads, variables):
        return [None if g is not None else ops.ones(v.shape) for g, v in zip(grads, variables)]

    weights = [keras.Variable([0.0, 0.0]), keras.Variable(np.zeros(3), dtype="float16")]
    optimizer = ks.CrossShard("sgd", replica_transform=swap)
    results = reduced_by(optimizer, lambda r: [ops.ones(2), None], weights, 2, GradientState.LOCAL, monkeypatch)
    for dropped, made in results:
        assert dropped is None
        assert keras.backend.standardize_dtype(made.dtype) == "float16"
        np.testing.assert_array_equal(ops.convert_to_numpy(made), np.ones(3))


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda grads, variables: None, "Received: None"),
        (lambda grads, variables: grads[0], "of type"),
        (lambda grads, variables: grads[:1], "1 gradients for 2 variables"),
        (lambda grads, variables: [ops.ones(3), *grads[1:]], r"shape \(3,\) for `first` of shape \(2,\)"),
    ],
)
def test_what_a_transform_returns_is_checked(transform, words):
    weights = [keras.Variable([0.0, 0.0], name="first"), keras.Variable([0.0], name="second")]
    optimizer = ks.CrossShard("sgd", replica_transform=transform)
    with pytest.raises(ValueError, match=rf"`replica_transform` must return.*{words}"):
        optimizer.apply([ops.ones(2), ops.ones(1)], weights)
    np.testing.assert_array_equal(ops.convert_to_numpy(weights[0]), [0.0, 0.0])


def test_a_transform_must_be_a_function():
    with pytest.raises(TypeError, match="`replica_transform` must be a function"):
        ks.CrossShard("sgd", replica_transform=1.0)


def test_config_and_files_hold_the_arguments(tmp_path):
    optimizer = ks.CrossShard("sgd", group_assignment=[[0]], replica_clipnorm=2, replica_transform=signs)
    config = keras.optimizers.serialize(optimizer)
    restored = keras.optimizers.deserialize(config)
    assert restored.replica_transform is signs
    assert restored.get_config() == optimizer.get_config()
    assert "group_assignment=[[0]], replica_clipnorm=2.0" in repr(restored)
    model = problem.model()
    model.compile(optimizer, "mse")
    x, y = problem.data(num_steps=1)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == optimizer.get_config()


# -- the weight of a replica ---------------------------------------------------------------------------------------


@each_local_state
@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_replica_counts_with_its_weight_after_it_is_clipped(gradient_state, as_tensor, monkeypatch):
    local, weights = local_gradients(3), [0.5, 0.0, 2.5]
    local[1] = [np.full_like(g, np.nan) for g in local[1]]  # as the mean over no rows
    optimizer = ks.CrossShard("sgd", replica_clipnorm=CLIPNORM)
    world = FakeWorld(3, gradient_state).hold(monkeypatch)
    scale = keras.Variable([0.0])
    scale.overwrite_with_gradient = True
    targets = [*variables(), scale]

    def of_replica(replicas):
        r = replicas.replica_id
        unit = 3 if gradient_state is GradientState.LOCAL_PRESCALED else 1
        weight = ops.convert_to_tensor(weights[r]) if as_tensor else weights[r]
        grads = [ops.convert_to_tensor(g / unit) for g in local[r]]
        return reduced(optimizer, [*grads, ops.convert_to_tensor([3.0 - r])], targets, weight)

    *found, next_values = zip(*[[ops.convert_to_numpy(g) for g in grads] for grads in world.run(of_replica)])
    assert next_values == ([3.0],) * 3  # those have no weight
    found = list(zip(*found))
    counted = [[w * g for g in clipped(local[r])] for r, w in ((0, 0.5), (2, 2.5))]
    assert_close(found, [[(a + b) / 3 for a, b in zip(*counted)]] * 3)


@pytest.mark.neutral
@pytest.mark.parametrize("bad", [2, 0])
@pytest.mark.parametrize("is_spmd", [True, False])
def test_a_bad_gradient_is_named_where_a_variable_is_left_out(bad, is_spmd, monkeypatch):
    """Ranks send zeros for it, so that positions on the way are others than those of what the optimizer is given."""
    world = FakeWorld(2, is_spmd=is_spmd).hold(monkeypatch)

    def step(replicas):
        weights = variables()
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), on_nonfinite="skip")
        optimizer.build(weights)
        grads = {i: np.ones(SHAPES[i], "float32") for i in (2, 0)}
        grads[bad] *= np.nan if replicas.replica_id == 1 else 1.0
        optimizer.apply([ops.convert_to_tensor(grad) for grad in grads.values()], [weights[i] for i in grads])
        return optimizer.last_nonfinite

    assert world.run(step) == [(1, f"v{bad}")] * 2
