"""TensorFlow: state that the replicas of a `MirroredStrategy` divide, each with slices of its own."""

import shutil

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.sharding import even_slices as even_shards

pytestmark = pytest.mark.backends("tensorflow")
tf = pytest.importorskip("tensorflow", reason="about TensorFlow, which is not installed")

# Of sizes that divide by nothing, one of them with most of the elements.
SHAPES = {"table/embeddings": (29, 7), "hidden/kernel": (7, 5), "hidden/bias": (5,), "gain": ()}
ROWS = [0, 3, 3, 28]


def mirrored(num_replicas):
    tf.distribute.MirroredStrategy._collective_key_base += 100_000  # as `data_parallel` does
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])


def variables(dtype="float32"):
    random = np.random.default_rng(3)
    made = []
    for path, shape in SHAPES.items():
        *scopes, name = path.split("/")
        with keras.name_scope(scopes[0] if scopes else "top"):
            made.append(keras.Variable(random.normal(size=shape).astype("float32"), dtype=dtype, name=name))
    return made


def gradients(replica, step):
    """Multiples of 1/64, larger on some replicas than on others."""
    random = np.random.default_rng(1000 * step + replica)
    return [(random.integers(-64, 64, size=s) * (replica + 1) / 64).astype("float32") for s in SHAPES.values()]


def trained(make, num_replicas=2, shard_state=True, num_steps=3, traced=False, change=None, prepare=None, **given):
    """An optimizer and its weights after updates with each replica's own gradients; `change` may spoil those."""
    dtype, sparse, build = given.pop("dtype", "float32"), given.pop("sparse", False), given.pop("build", True)
    strategy = mirrored(num_replicas)
    with strategy.scope():
        weights = variables(dtype)
        optimizer = ks.CrossShard(make(), shard_state=shard_state, gradients="local", **given)
        if prepare is not None:
            prepare(optimizer, weights)
        if build:
            optimizer.build(weights)

    def on_replica(grads):
        grads = [tf.cast(grad, weight.dtype) for grad, weight in zip(grads, weights)]
        if sparse:
            grads[0] = tf.IndexedSlices(tf.gather(grads[0], ROWS), tf.constant(ROWS), tf.constant((29, 7)))
        optimizer.apply(grads, weights)

    def step(grads):
        strategy.run(on_replica, args=(grads,))

    step = tf.function(step) if traced else step
    for number in range(num_steps):
        rows = [gradients(replica, number) for replica in range(num_replicas)]
        if change is not None:
            change(number, rows)
        columns = [
            strategy.experimental_distribute_values_from_function(
                lambda context, column=column: tf.constant(column[context.replica_id_in_sync_group])
            )
            for column in zip(*rows)
        ]
        step(columns)
    optimizer.finalize_variable_values(weights)
    return optimizer, weights


def saved(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def arrays(variables):
    return [np.asarray(v.numpy(), "float64") for v in variables]


def largest(some, others):
    """The largest difference, in units of the array where it is larger than 1."""
    pairs = [(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in zip(some, others, strict=True)]
    return max(float(np.max(np.abs(a - b), initial=0.0) / np.max(np.abs(b), initial=1.0)) for a, b in pairs)


def check_equal(divided, whole, tolerance=0.0):
    (optimizer, weights), (reference, expected) = divided, whole
    assert optimizer._shards is not None
    assert largest(arrays(weights), arrays(expected)) <= tolerance
    assert largest(arrays(weights), arrays(variables())) > 1e-3  # it did train
    for weight in weights:
        copies = [np.asarray(copy) for copy in weight.value.values]
        assert all((copy == copies[0]).all() for copy in copies)
    mine, theirs = saved(optimizer), saved(reference)
    assert list(mine) == list(theirs)
    assert [(a.shape, a.dtype) for a in mine.values()] == [(a.shape, a.dtype) for a in theirs.values()]
    assert largest(mine.values(), theirs.values()) <= tolerance
    assert int(optimizer.iterations.numpy()) == int(reference.iterations.numpy())


def both(make, tolerance=0.0, **given):
    check_equal(trained(make, **given), trained(make, shard_state=False, **given), tolerance)


# Of Ftrl a difference of powers magnifies their last digits, which depend on the place in a tensor.
MUST_SEE_WHOLE = ("Adafactor", "Ftrl", "Lamb", "Muon")


@pytest.mark.parametrize("name", some([n for n in problem.keras_optimizers() if n not in MUST_SEE_WHOLE], ["AdamW"]))
def test_updates_are_those_of_whole_state(name):
    both(problem.keras_optimizers()[name], num_steps=2)


@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has no ScheduleFreeAdamW")
def test_state_that_starts_with_the_weights_does_so_in_parts():
    found, expected = (
        saved(trained(keras.optimizers.ScheduleFreeAdamW, shard_state=divided, num_steps=0)[0])
        for divided in (True, False)
    )
    assert list(found) == list(expected) and largest(found.values(), expected.values()) == 0
    assert any(np.ptp(array) for array in found.values() if array.size)


def spoiled(number, rows):
    if number == 1:
        rows[-1][1][0, 0] = np.inf


def excluded(optimizer, weights):
    optimizer.exclude_from_weight_decay(var_list=weights[:1], var_names=["bias"])


CASES = {
    "four replicas": (problem.sgd_momentum, {"num_replicas": 4}),
    "average": (
        lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
        {"traced": True},
    ),
    "exclusions": (lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5), {"prepare": excluded}),
    "schedule, clipvalue": (
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipvalue=0.25),
        {},
    ),
    "accumulates, skips": (
        problem.sgd_momentum,
        {"gradient_accumulation_steps": 2, "on_nonfinite": "skip", "num_steps": 4, "change": spoiled, "traced": True},
    ),
    "replicas clipped": (problem.sgd_momentum, {"replica_clipnorm": 0.5, "reduction": "sum"}),
    "scaled, clipped": (
        lambda: ks.LossScaling(ks.GradientClipping(problem.sgd_momentum(), 0.5), "Backoff", {"scale_max": 4.0}),
        {"change": spoiled, "traced": True, "tolerance": 1e-6},  # squares add up in another order
    ),
    "masters": (lambda: ks.MixedPrecision(keras.optimizers.Adam(0.01)), {"dtype": "bfloat16"}),
}


def test_excluded_masters_do_not_decay():
    starts = [w.astype("float64") for w in arrays(variables("bfloat16"))]
    zeros = lambda number, rows: [row.__setitem__(slice(None), [0 * g for g in row]) for row in rows]  # noqa: E731
    make = lambda: ks.MixedPrecision(keras.optimizers.AdamW(0.1, weight_decay=0.5))  # noqa: E731
    optimizer, weights = trained(make, dtype="bfloat16", num_steps=1, prepare=excluded, change=zeros)
    masters = {}  # without gradients nothing but decay moves a weight
    optimizer.wrapper_state.save_own_variables(masters)
    for i, (weight, start) in enumerate(zip(weights, starts)):
        expected = start if i in (0, 2) else start * (1 - 0.1 * 0.5)
        np.testing.assert_allclose(masters[str(i)], expected, rtol=1e-6)
        np.testing.assert_array_equal(weight.numpy(), masters[str(i)].astype(weight.numpy().dtype))


@pytest.mark.parametrize("window", some([1, 2], [2]))
@pytest.mark.exhaustive
def test_next_values_are_the_largest_of_all_replicas(window):
    """As float8 scales are: neither averaged, nor unscaled, nor cut into slices, nor updated."""
    strategy = mirrored(2)
    with strategy.scope():
        weight, scale = keras.Variable(np.ones(5), name="kernel"), keras.Variable(np.zeros(3), name="scale")
        scale.overwrite_with_gradient = True
        inner = ks.LossScaling(keras.optimizers.SGD(0.5), 8.0)
        steps = None if window == 1 else window
        optimizer = ks.CrossShard(inner, shard_state=True, gradients="local", gradient_accumulation_steps=steps)
        optimizer.build([weight, scale])

    def on_replica(call):
        rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, "float32")
        value = (tf.constant([2.0, 3.0, 1.0]) + rank * tf.constant([1.0, -1.0, 0.0])) / (1 + tf.cast(call, "float32"))
        optimizer.apply([8 * (1 + rank) * tf.ones(5), value], [weight, scale])

    step = tf.function(lambda call: strategy.run(on_replica, args=(call,)))
    for call in range(2 * window):
        step(tf.constant(call))
    np.testing.assert_array_equal(weight.numpy(), np.full(5, 1 - 2 * 0.5 * 1.5))
    np.testing.assert_array_equal(scale.numpy(), (np.array([3, 3, 1], "float32") / np.float32(1 + window)))


@pytest.mark.parametrize("case", some(CASES, ["accumulates, skips", "average"]))
def test_around_it_everything_means_the_same(case):
    make, given = CASES[case]
    both(make, **given)


@pytest.mark.exhaustive
def test_rows_of_an_embedding_are_summed_first():
    whole = trained(problem.sgd_momentum, shard_state=False, sparse=True, num_steps=2)
    # Keras multiplies the listed rows by the rate before it adds them up.
    check_equal(trained(problem.sgd_momentum, sparse=True, num_steps=2), whole, 1e-6)


def test_it_may_be_built_by_the_first_update():
    how = {"num_steps": 2}
    check_equal(trained(problem.sgd_momentum, build=False, **how), trained(problem.sgd_momentum, 2, False, **how))


@pytest.mark.exhaustive
def test_the_checks_can_fail(monkeypatch):
    expected = arrays(trained(problem.sgd_momentum, shard_state=False, num_steps=1)[1])
    real = even_shards.PaddedShards._slice
    monkeypatch.setattr(even_shards.PaddedShards, "_slice", lambda self, i, whole, replica_id: real(self, i, whole, 0))
    assert largest(arrays(trained(problem.sgd_momentum, num_steps=1)[1]), expected) > 1e-2
    monkeypatch.setattr(even_shards.PaddedShards, "_slice", real)
    make, given = CASES["exclusions"]
    expected = arrays(trained(make, **given, num_steps=1)[1])
    monkeypatch.setattr(even_shards, "keep_exclusions", lambda *args: None)
    assert largest(arrays(trained(make, **given, num_steps=1)[1]), expected) > 1e-3


def test_files_are_those_of_whole_state_for_any_number_of_replicas():
    def make():
        return keras.optimizers.Adam(0.01, use_ema=True)

    optimizer, _ = trained(make, num_replicas=2, num_steps=1)
    store = saved(optimizer)
    plain = make()
    plain.build(variables())
    plain.load_own_variables(store)
    assert all((v.numpy() == store[str(i)]).all() for i, v in enumerate(plain.variables))
    with mirrored(4).scope():
        again = ks.CrossShard(make(), shard_state=True)
        again.load_own_variables(store)  # before it is built
        again.build(variables())
    found = saved(again)
    assert list(found) == list(store) and largest(found.values(), store.values()) == 0
    again.set_weights([2 * array for array in store.values()])
    assert largest(saved(again).values(), [2 * array for array in store.values()]) == 0
    with pytest.raises(ValueError, match="must have shape"):
        again.load_own_variables({**store, "2": np.zeros((3, 3), "float32")})
    with pytest.raises(ValueError, match="its own slices"):
        again.get_slot(again._trainable_variables[0], "momentum")


@pytest.fixture
def moved(monkeypatch):
    """How many elements each replica has sent into each all-reduce and all-gather."""
    from keras_shardopt.backends.tensorflow.communicator import ReplicaContext

    calls = []
    for move in ("all_reduce", "all_gather"):
        real = getattr(ReplicaContext, move)

        def counting(self, tensors, *args, move=move, real=real):
            if tensors:
                calls.append((move, sum(int(tf.size(tensor)) for tensor in tensors)))
            return real(self, tensors, *args)

        monkeypatch.setattr(ReplicaContext, move, counting)
    return calls


def test_each_replica_holds_and_sends_a_part(moved):
    optimizer, weights = trained(lambda: keras.optimizers.Adam(0.01), num_replicas=4, num_steps=1)
    slots = [v for v in optimizer.variables if len(v.shape)]
    assert len(slots) == 2 * len(weights)
    chunks = [-(-int(np.prod(shape)) // 4) for shape in SHAPES.values()]
    assert sum(int(np.prod(v.shape)) for v in slots) == 2 * sum(chunks)
    assert all(len({copy.numpy().tobytes() for copy in v.value.values}) > 1 for v in slots)  # no two alike
    report = optimizer.memory_report()
    numbers = sum(size for _, size, why in report.replicated if why == "a scalar")
    assert report.held == [2 * 4 * sum(chunks) + numbers] * 4
    assert report.whole == 2 * 4 * sum(int(np.prod(shape)) for shape in SHAPES.values()) + numbers
    assert not {id(v) for v in optimizer._shared_variables} & {id(v) for v in slots}
    everything = sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert sorted(moved) == [("all_gather", sum(chunks))] * 4 + [("all_reduce", everything)] * 4


def test_an_embedding_of_most_weights_is_balanced():
    with mirrored(4).scope():
        optimizer = ks.CrossShard("adam", shard_state=True)
        optimizer.build([keras.Variable(np.zeros((951, 16), "f4")), keras.Variable(np.zeros((53, 15), "f4"))])
    assert optimizer.memory_report().max_over_ideal <= 1.02


def fitted(model, folder, num_epochs=2):
    x, y = problem.data(num_steps=4)
    callbacks = [ks.callbacks.CheckReplicas(2)]
    if folder is not None:
        callbacks.append(ks.callbacks.BackupAndRestore(folder, delete_checkpoint=False))
    model.fit(x, y, batch_size=problem.BATCH_SIZE, epochs=num_epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


def compiled(optimizer):
    model = problem.model()
    model.compile(optimizer, "mse")
    return model


def test_fit_and_the_files_of_fit(tmp_path):
    expected = fitted(compiled(problem.sgd_momentum()), None)
    with mirrored(2).scope():
        model = compiled(ks.CrossShard(problem.sgd_momentum(), shard_state=True))
        fitted(model, tmp_path / "backup", num_epochs=1)
        half = saved(model.optimizer)
        ks.save_model(model, tmp_path / "saved.keras")
        # Interrupted here: one goes on from the backup, one from the file.
        restored = compiled(ks.CrossShard(problem.sgd_momentum(), shard_state=True))
        backup = shutil.copytree(tmp_path / "backup", tmp_path / "again")
        assert problem.relative_difference(fitted(restored, tmp_path / "backup"), expected) <= problem.TOLERANCE
        model.save(tmp_path / "plain.keras")
    alone = compiled(ks.CrossShard(problem.sgd_momentum(), shard_state=True))  # started again, on fewer
    assert problem.relative_difference(fitted(alone, backup), expected) <= problem.TOLERANCE
    with mirrored(4).scope():
        for name in ("saved", "plain"):
            loaded = keras.saving.load_model(tmp_path / f"{name}.keras")
            assert loaded.optimizer._shards is not None
            assert largest(saved(loaded.optimizer).values(), half.values()) == 0
        assert problem.relative_difference(fitted(loaded, None, 1), expected) <= problem.TOLERANCE


def test_what_cannot_be_right_is_refused(monkeypatch):
    with mirrored(2).scope():
        weights = variables()
        for inner, words in (
            (keras.optimizers.Lamb(), "which needs"),
            (keras.optimizers.Adam(clipnorm=1.0), "which needs"),
            (ks.LARC(keras.optimizers.SGD(), 0.1), "which needs"),
            (keras.optimizers.Adam(global_clipnorm=1.0), "GradientClipping"),
        ):
            with pytest.raises(ValueError, match=words):
                ks.CrossShard(inner, shard_state=True).build(weights)
        weights[0].constraint = keras.constraints.MaxNorm(1.0)
        with pytest.raises(ValueError, match="constraints of"):
            ks.CrossShard("sgd", shard_state=True).build(weights)
        optimizer = ks.CrossShard("sgd", shard_state=True)
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", tf.distribute.OneDeviceStrategy)
        with pytest.raises(ValueError, match="needs a `MirroredStrategy`"):
            optimizer.build(weights)
