import keras
import numpy as np
import pytest
from keras import ops
from support import golden, problem
from support.golden import TF1Momentum
from support.suites import some

import keras_shardopt as ks
from keras_shardopt import numerics

FILE = golden.load("tower_optimizer")
CASES = golden.cases("tower_optimizer")
BACKEND = keras.config.backend()

LEFT_OUT = {
    "plain_optimizer_one_tower": "needs no Tower; test_one_tower_runs_the_step_unchanged",
    "optimizer_calls_per_tower/[3, 1]": "the original loses two calls in silence; here an error",
}


def inner_of(name):
    arguments = FILE["inner"][name]
    if name == "adam":
        return keras.optimizers.Adam(arguments["learning_rate"], epsilon=arguments["epsilon"])
    return keras.optimizers.SGD(arguments["learning_rate"], momentum=arguments.get("momentum", 0.0))


def gradients_of(case, tower, v, rows):
    """Loss and gradients of v and u, by hand, for a tower's rows."""
    value, rows = ops.convert_to_numpy(v), np.asarray(rows)
    none_in = case["options"].get("none_in")
    if case["loss_kind"] == "gather":
        listed, total = [1, 0, 1], rows.sum(axis=0)
        values, loss = total[listed], np.sum(value[listed] * total[listed])
        # Keras' Adam squares rows that are listed twice one by one, where TensorFlow 1 summed them first.
        if BACKEND == "tensorflow" and case["inner"] == "sgd":
            import tensorflow as tf

            slices = tf.IndexedSlices(tf.constant(values), tf.constant(listed), tf.constant([2, 2]))
            return loss, [slices, None]
        dense = np.zeros_like(value)
        np.add.at(dense, listed, values)
        return loss, [ops.convert_to_tensor(dense), None]
    loss, grad_v, grad_u = np.sum(value * rows), rows.sum(axis=0), None
    if none_in is not None:
        grad_u = ops.full((1,), 0.5 if tower in none_in else 0.25)
    if none_in is not None and tower in none_in:
        return None, [None, grad_u]
    return loss, [ops.convert_to_tensor(grad_v), grad_u]


@pytest.mark.parametrize("id", CASES)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_golden(id):
    case = CASES[id]
    v = keras.Variable(np.array(FILE["v_start"], "float32"), name="v")
    u = keras.Variable(np.array(FILE["u_start"], "float32"), name="u")
    optimizer = ks.Tower(inner_of(case["inner"]))
    optimizer.build([v, u])
    towers = []

    def step(rows):
        tower = len(towers)
        towers.append(tower)
        loss, grads = gradients_of(case, tower, v, rows)
        if case["options"].get("none_in") is not None:
            loss = (loss or 0.0) + float((0.5 if loss is None else 0.25) * ops.convert_to_numpy(u).sum())
        optimizer.apply(grads, [v, u])
        return float(loss)

    # The original's default averages.
    reduction = case["loss_reduction"] or "weighted_sum_by_nonzero_weights"
    replicated = ks.replicate(step, case["number_of_towers"], reduction)
    for batch, expected in zip(case["batches"], case["result"]["steps"], strict=True):
        towers.clear()
        loss = replicated(np.array(batch, "float32"))
        golden.assert_close(loss, expected["loss"], rtol=1e-4)
        golden.assert_close(v, expected["v"])
        golden.assert_close(ops.convert_to_numpy(u), expected["u"])
        assert int(ops.convert_to_numpy(optimizer.iterations)) == expected["global_step"]
        slots = expected.get("slots_of_v", {})
        if "momentum" in slots:  # Keras has the rate inside
            golden.assert_close(-10 * ops.convert_to_numpy(optimizer.get_slot(v, "momentum")), slots["momentum"])
        if "m" in slots:
            golden.assert_close(optimizer.get_slot(v, "momentum"), slots["m"])
            golden.assert_close(optimizer.get_slot(v, "velocity"), slots["v"])


def calls_per_tower(counts):
    v = keras.Variable([10.0])
    optimizer = ks.Tower(keras.optimizers.SGD(0.1))
    optimizer.build([v])

    def step(tower):
        for _ in range(counts[int(tower[0])]):
            optimizer.apply([ops.convert_to_tensor([float(tower[0]) + 1])], [v])

    ks.replicate(step, len(counts), "sum")(np.arange(len(counts)))
    return v


COUNTS = {case["id"]: case for case in FILE["call_count_cases"]}


@pytest.mark.parametrize("id", [id for id in COUNTS if id not in LEFT_OUT])
def test_golden_call_counts(id):
    counts = eval(id.partition("/")[2])
    if COUNTS[id]["error"]:
        with pytest.raises(ValueError, match=r"Tower` optimizer"):
            calls_per_tower(counts)
    else:
        golden.assert_close(calls_per_tower(counts), COUNTS[id]["v_after_one_step"])


@pytest.mark.parametrize("counts", [[3, 1], [1, 3], [1, 2], [2, 1, 0], [0, 1], [1, 1, 2]])
def test_calls_that_do_not_match_are_an_error(counts):
    with pytest.raises(ValueError, match=r"the same number of times|called no `Tower`"):
        calls_per_tower(counts)


def test_several_calls_per_tower_are_matched_in_order():
    # 2 * (1 + 2) for each of two calls, applied one after the other.
    golden.assert_close(calls_per_tower([2, 2]), [10.0 - 2 * 0.1 * 3])


@pytest.mark.parametrize("reduction", ["weighted_sum", "weighted_mean"])
def test_golden_two_optimizers_two_losses(reduction):
    v, w = keras.Variable([10.0], name="v"), keras.Variable([2.0], name="w")
    for_v, for_w = ks.Tower(keras.optimizers.SGD(0.1)), ks.Tower(TF1Momentum(1.0, 0.9))

    def step(x):
        for_v.apply([ops.convert_to_tensor(x)], [v])
        for_w.apply([ops.convert_to_tensor(2 * x)], [w])

    replicated = ks.replicate(step, 2, reduction)
    for expected_v, expected_w in FILE["two_optimizers_two_losses"]["result"][reduction]:
        replicated(np.array([1.0, 2.0], "float32"))
        golden.assert_close(v, expected_v)
        golden.assert_close(w, expected_w)


@pytest.mark.backends("tensorflow")
def test_golden_sparse_sums():
    import tensorflow as tf

    v = keras.Variable(np.zeros((4, 1)))
    slices = [
        tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([0, 3]), tf.constant([4, 1])),
        tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([0, 1], tf.int64), tf.constant([4, 1])),
    ]
    joined = numerics.add(*slices, v)
    expected = FILE["sum_of_indexed_slices"]["result"]
    assert list(joined.indices.numpy()) == expected["indices"]
    golden.assert_close(joined.values[:, 0], expected["values"])
    golden.assert_close(numerics.dense(joined, v)[:, 0], expected["dense"])
    # The original fails where the sparse one is first.
    ones = tf.ones((4, 1))
    dense_first = FILE["dense_and_sparse_towers"][0]["result"][1]
    assert numerics.add(ones, slices[0], v).shape == (4, 1) and len(dense_first) == 4
    golden.assert_close(numerics.add(ones, slices[0], v)[:, 0], [2.0, 1.0, 1.0, 3.0])
    golden.assert_close(numerics.add(slices[0], ones, v)[:, 0], [2.0, 1.0, 1.0, 3.0])


@pytest.fixture
def nobody_has_used_a_tower():
    keras.utils.clear_session(free_memory=False)


def test_has_been_used_without_replicate(nobody_has_used_a_tower):
    assert not ks.Tower.has_been_used()
    v = keras.Variable([1.0])
    optimizer = ks.Tower(keras.optimizers.SGD(0.1))
    assert not ks.Tower.has_been_used()
    optimizer.apply([ops.ones(1)], [v])
    assert ks.Tower.has_been_used()
    keras.utils.clear_session(free_memory=False)
    assert not ks.Tower.has_been_used()


@pytest.mark.parametrize("query", [lambda o: o.get_name(), lambda o: o.get_slot_names(), lambda o: o.variables])
def test_a_mere_query_is_a_use(query, nobody_has_used_a_tower):
    optimizer = ks.Tower(keras.optimizers.SGD(0.1))
    query(optimizer)
    assert ks.Tower.has_been_used()


def test_has_been_used_with_replicate(nobody_has_used_a_tower):
    v, seen = keras.Variable([1.0]), []
    optimizer = ks.Tower(keras.optimizers.SGD(0.1))

    def step(rows):
        seen.append(ks.Tower.has_been_used())
        optimizer.apply([ops.ones(1)], [v])
        seen.append(ks.Tower.has_been_used())

    ks.replicate(step, 2)(np.ones(2))
    recorded = FILE["has_been_used_with_replication"]["result"]
    assert seen == [recorded[f"tower{k}_{when}"] for k in (0, 1) for when in ("before", "after")]
    assert ks.Tower.has_been_used() == recorded["asked_after_build"]


def test_a_function_makes_the_optimizer_once_when_it_is_needed():
    made = []

    def make():
        made.append(keras.optimizers.SGD(0.1, momentum=0.9))
        return made[-1]

    optimizer = ks.Tower(make)
    assert made == []
    v = keras.Variable([1.0])
    optimizer.apply([ops.ones(1)], [v])
    optimizer.apply([ops.ones(1)], [v])
    assert len(made) == 1
    assert optimizer.get_name() == "SGD" or optimizer.get_name() == made[0].name
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_slot(v, "momentum") is made[0].momentums[0]
    assert int(ops.convert_to_numpy(optimizer.iterations)) == 2
    assert ks.Tower(keras.optimizers.Adam).learning_rate is not None
    with pytest.raises(TypeError, match="`optimizer_or_optimizer_fn` must be"):
        ks.Tower(lambda: 3).build([v])


def trained(optimizer, num_towers=None, reduction="mean", loss="mse", num_steps=6, **compile_arguments):
    x, y = problem.data(num_steps=num_steps)
    model = problem.model()
    model.compile(optimizer, loss, **compile_arguments)
    if num_towers:
        model.train_step = ks.replicate(model.train_step, num_towers, reduction)
    history = model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model, history.history["loss"]


def assert_same(model, reference, num_times=1):
    difference = problem.relative_difference(model.get_weights(), reference.get_weights())
    assert difference <= num_times * problem.TOLERANCE


@pytest.mark.parametrize("num_towers", some([1, 2, 4], [2], "jax", "tensorflow"))
def test_fit_with_towers_equals_the_whole_batch(num_towers):
    model, losses = trained(ks.Tower(problem.sgd_momentum()), num_towers)
    reference, expected = trained(problem.sgd_momentum())
    assert_same(model, reference)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert int(ops.convert_to_numpy(model.optimizer.iterations)) == 6


@pytest.mark.parametrize(
    "compile_arguments",
    some([{"run_eagerly": True}, {"jit_compile": True}], [{"run_eagerly": True}], "jax", "tensorflow"),
)
def test_fit_eager_and_compiled(compile_arguments):
    if BACKEND == "torch" and compile_arguments.get("jit_compile"):
        pytest.skip("slow; test_torch_compile")
    model, _ = trained(ks.Tower(problem.sgd_momentum()), 4, **compile_arguments)
    assert_same(model, trained(problem.sgd_momentum())[0])


@pytest.mark.exhaustive("jax", "tensorflow")
def test_fit_sums():
    model, _ = trained(ks.Tower(keras.optimizers.SGD(0.02, momentum=0.9)), 4, "sum")
    assert_same(model, trained(keras.optimizers.SGD(0.08, momentum=0.9))[0])


@pytest.mark.exhaustive("jax", "tensorflow")
def test_fit_with_adam_in_cross_shard_saves_and_continues(tmp_path):
    model, _ = trained(ks.Tower(ks.CrossShard(keras.optimizers.Adam(0.01))), 2)
    assert_same(model, trained(keras.optimizers.Adam(0.01))[0], num_times=20)
    del model.train_step
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is ks.Tower
    for got, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(got), ops.convert_to_numpy(expected))


@pytest.mark.exhaustive("jax", "tensorflow")
def test_seen_by_what_is_inside_is_the_sum():
    clipped = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)
    model, _ = trained(ks.Tower(ks.GradientClipping(problem.sgd_momentum(), 0.1)), 4)
    assert_same(model, trained(clipped)[0], num_times=3)


@pytest.mark.exhaustive("jax", "tensorflow")
def test_one_tower_runs_the_step_unchanged():
    def step(batch):
        return batch

    batch = {"x": np.ones(3)}
    assert ks.replicate(step, 1)(batch) is batch
    model, _ = trained(problem.sgd_momentum(), 1)
    assert_same(model, trained(problem.sgd_momentum())[0])


@pytest.mark.backends("jax")
def test_a_jitted_loop_of_ones_own():
    import jax

    model = problem.model()
    optimizer = ks.Tower(problem.sgd_momentum())
    optimizer.build(model.trainable_variables)

    def step(state, batch):
        weights, slots = state
        x, y = batch

        def loss_of(weights):
            outputs, _ = model.stateless_call(weights, [], x)
            return ops.mean(ops.square(outputs - y))

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return loss, optimizer.stateless_apply(slots, grads, weights)

    replicated = jax.jit(ks.replicate(step, 4, "mean"))
    state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    x, y = problem.data(num_steps=6)
    for i in range(0, len(x), problem.BATCH_SIZE):
        _, state = replicated(state, (x[i : i + problem.BATCH_SIZE], y[i : i + problem.BATCH_SIZE]))
    for variable, value in zip(model.trainable_variables, state[0]):
        variable.assign(value)
    assert_same(model, trained(problem.sgd_momentum())[0])
    # A step that is compiled itself updates only while it is traced, which is noticed.
    with pytest.raises(ValueError, match=r"compile the result of `replicate`"):
        ks.replicate(jax.jit(step), 4, "mean")(state, (x[:16], y[:16]))


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("devices", [None, ["CPU:1", "CPU:2"]])
@pytest.mark.exhaustive
def test_a_tf_function_loop_of_ones_own(devices):
    import tensorflow as tf

    model = problem.model()
    optimizer = ks.Tower(problem.sgd_momentum())
    used = set()

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = model(x)
            loss = tf.reduce_mean(tf.square(outputs - y))
        used.add(outputs.device[-5:])
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    replicated = tf.function(ks.replicate(step, 4, "mean", devices=devices))
    x, y = problem.data(num_steps=6)
    for i in range(0, len(x), problem.BATCH_SIZE):
        replicated((tf.constant(x[i : i + problem.BATCH_SIZE]), tf.constant(y[i : i + problem.BATCH_SIZE])))
    assert_same(model, trained(problem.sgd_momentum())[0])
    if devices:
        assert used == set(devices)


@pytest.mark.backends("torch")
@pytest.mark.parametrize("zero", ["to none", "in place"])
def test_a_torch_loop_of_ones_own(zero):
    model = problem.model()
    optimizer = ks.Tower(problem.sgd_momentum())

    def step(batch):
        x, y = batch
        model.zero_grad(set_to_none=zero == "to none")
        loss = ops.mean(ops.square(model(x) - ops.convert_to_tensor(y)))
        loss.backward()
        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        return loss

    replicated = ks.replicate(step, 4, "sum")
    optimizer.learning_rate = 0.1 / 4
    x, y = problem.data(num_steps=6)
    for i in range(0, len(x), problem.BATCH_SIZE):
        replicated((x[i : i + problem.BATCH_SIZE], y[i : i + problem.BATCH_SIZE]))
    assert_same(model, trained(problem.sgd_momentum())[0])


@pytest.mark.exhaustive  # by default the contract of the wrappers compiles a Tower's update
@pytest.mark.backends("torch")
def test_torch_compile():
    import torch

    model, _ = trained(ks.Tower(problem.sgd_momentum()), 2, num_steps=3, jit_compile=True)
    torch._dynamo.reset()
    assert_same(model, trained(problem.sgd_momentum(), num_steps=3)[0])


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match=r"Received: num_towers=3, a batch of 16"):
        trained(ks.Tower(problem.sgd_momentum()), 3)


@pytest.mark.backends("tensorflow")
def test_a_batch_of_unknown_size_is_checked_when_it_runs():
    import tensorflow as tf

    v = keras.Variable([0.0])
    optimizer = ks.Tower(keras.optimizers.SGD(1.0))
    optimizer.build([v])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(batch):
        return ks.replicate(lambda rows: optimizer.apply([tf.reduce_sum(rows)[None]], [v]), 2, "sum")(batch)

    step(tf.ones(4))
    golden.assert_close(v, [-4.0])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"`num_towers` must divide the batch.*=2, a batch of\] \[3\]"
    ):
        step(tf.ones(3))
    golden.assert_close(v, [-4.0])


@pytest.mark.parametrize("jit_compile", some([False, True], 2, "jax", "tensorflow"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_smaller_last_batch_is_refused_before_anything_moves(jit_compile):
    if BACKEND == "torch" and jit_compile:
        pytest.skip("slow; test_torch_compile")
    layers = [keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(ks.Tower(keras.optimizers.Adam(0.1)), "mse", metrics=["mae"], jit_compile=jit_compile)
    model.train_step = ks.replicate(model.train_step, 4)
    states = []

    def state():
        if BACKEND == "jax":
            model.jax_state_sync()
        everything = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        return [ops.convert_to_numpy(variable).copy() for variable in everything]

    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: states.append(state()))
    error, message = ValueError, "`num_towers` must divide the batch. Received: num_towers=4, a batch of 6. Choose"
    if BACKEND == "tensorflow":
        import tensorflow as tf

        error = tf.errors.InvalidArgumentError
        message = r"`num_towers` must divide the batch\. Received: num_towers=4, a batch of\] \[6\] \[Choose"
        if jit_compile:
            message = "num_towers_must_divide_the_batch"
    with pytest.raises(error, match=message):
        model.fit(np.ones((14, 2)), np.ones((14, 1)), batch_size=8, shuffle=False, verbose=0, callbacks=[note])
    assert len(states) == 1
    for after, before in zip(state(), states[0], strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.backends("tensorflow")
def test_sparse_and_ragged_batches_are_divided():
    import tensorflow as tf

    v, seen = keras.Variable([0.0]), []
    optimizer = ks.Tower(keras.optimizers.SGD(1.0))
    optimizer.build([v])

    def step(batch):
        sparse, ragged = batch
        seen.append((tf.sparse.to_dense(sparse), ragged.to_tensor(shape=(2, 2))))
        optimizer.apply([tf.reduce_sum(seen[-1][0])[None]], [v])

    rows = np.array([[1, 0], [0, 2], [0, 0], [0, 4]], "int32")
    ragged = tf.ragged.constant([[1], [0, 2], [], [0, 4]])
    batch = (tf.sparse.from_dense(tf.cast(rows, "float32")), ragged)
    replicated = ks.replicate(step, 2, "sum")
    compiled = tf.function(
        lambda *batch: replicated(batch),
        input_signature=[tf.SparseTensorSpec([None, 2], tf.float32), tf.RaggedTensorSpec([None, None], tf.int32)],
    )
    for call in (lambda s, r: replicated((s, r)), compiled):
        seen.clear()
        call(*batch)
        assert len(seen) == 2
    golden.assert_close(v, [-14.0])
    seen.clear()
    replicated(batch)
    for tower in range(2):
        np.testing.assert_array_equal(seen[tower][0], rows[2 * tower : 2 * tower + 2])
        np.testing.assert_array_equal(seen[tower][1], rows[2 * tower : 2 * tower + 2])
    three = tf.sparse.slice(batch[0], [0, 0], [3, 2]), ragged[:3]
    with pytest.raises(ValueError, match="a batch of 3"):
        replicated(three)
    with pytest.raises(tf.errors.InvalidArgumentError, match="`num_towers` must divide"):
        compiled(*three)
    golden.assert_close(v, [-21.0])


@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_step_assigned_after_a_first_fit_is_used_when_keras_is_told():
    x, y = problem.data(num_steps=1)
    model, sizes = problem.model(), []
    model.compile(ks.Tower(problem.sgd_momentum()), "mse")
    step = model.train_step

    def counting(*arguments):
        sizes.append(arguments[-1][0].shape[0] if hasattr(arguments[-1][0], "shape") else None)
        return step(*arguments)

    arguments = {"batch_size": problem.BATCH_SIZE, "shuffle": False, "verbose": 0}
    model.fit(x, y, **arguments)
    model.train_step = ks.replicate(counting, 4)
    model.fit(x, y, **arguments)
    if BACKEND != "torch":
        assert sizes == []  # Keras keeps what it has compiled
    model.make_train_function(force=True)
    model.fit(x, y, **arguments)
    assert len(sizes) % 4 == 0 and set(sizes) <= {problem.BATCH_SIZE // 4, None} and sizes
    reference = problem.model()
    reference.compile(problem.sgd_momentum(), "mse")
    reference.fit(x, y, epochs=3, **arguments)
    assert_same(model, reference)


def test_next_values_of_float8_scales_take_the_largest():
    scale, weight = keras.Variable([1.0, 1.0]), keras.Variable([1.0, 1.0])
    scale.overwrite_with_gradient = True
    optimizer = ks.Tower(keras.optimizers.SGD(1.0))
    optimizer.build([scale, weight])

    def step(rows):
        rows = ops.convert_to_tensor(rows)
        optimizer.apply([rows[0], rows[0]], [scale, weight])

    ks.replicate(step, 3, "mean")(np.array([[1.0, 9.0], [7.0, 2.0], [4.0, 1.0]], "float32"))
    golden.assert_close(scale, [7.0, 9.0])
    golden.assert_close(weight, [-3.0, -3.0])


@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_default_averages():
    model, _ = trained(ks.Tower(problem.sgd_momentum()))
    x, y = problem.data(num_steps=6)
    towers = problem.model()
    towers.compile(ks.Tower(problem.sgd_momentum()), "mse")
    towers.train_step = ks.replicate(towers.train_step, 4)
    towers.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert_same(towers, model)


@pytest.mark.parametrize(
    "returned",
    [
        lambda x, y: ops.sum(y),
        lambda x, y: (ops.sum(y), y),
        lambda x, y: (ops.sum(y), y, x),
        lambda x, y: [ops.sum(y), x],
        lambda x, y: (ops.sum(y), [x, x]),
        lambda x, y: None,
    ],
)
def test_two_arguments_must_be_a_state_and_a_batch(returned):
    v, x = keras.Variable([0.0]), ops.ones((4, 2))
    optimizer = ks.Tower(keras.optimizers.SGD(1.0))

    def step(x, y):
        optimizer.apply([ops.ones(1)], [v])
        return returned(x, y)

    with pytest.raises(TypeError, match=r"`step\(state, batch\) -> .*`step\(\(x, y\)\)`"):
        ks.replicate(step, 2)(x, ops.ones((4, 2)))
    golden.assert_close(v, [0.0])
    assert int(ops.convert_to_numpy(optimizer.iterations)) == 0


@pytest.mark.parametrize(("dtype", "expected"), [("int32", 6), ("bool", True), ("float32", 4.0)])
def test_scalar_outputs_are_losses_if_they_are_floats(dtype, expected):
    v = keras.Variable([0.0])
    optimizer = ks.Tower(keras.optimizers.SGD(1.0))

    def step(rows):
        optimizer.apply([ops.ones(1)], [v])
        return ops.cast(ops.sum(rows), dtype)

    returned = ks.replicate(step, 2)(ops.convert_to_tensor([2.0, 6.0]))
    assert keras.backend.standardize_dtype(returned.dtype) == dtype
    assert ops.convert_to_numpy(returned) == expected


@pytest.mark.backends("torch")
def test_towers_that_overflow_say_where_loss_scaling_belongs():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(ks.Tower(keras.optimizers.SGD(0.1)), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.train_step = ks.replicate(model.train_step, 2)
    with pytest.raises(ValueError, match=r"Tower\(LossScaleOptimizer\(optimizer\)\), ..., auto_scale_loss=False"):
        model.fit(np.full((4, 2), 1e4), np.zeros((4, 1)), batch_size=4, verbose=0)


def test_none_and_scalars_go_to_every_tower():
    v, seen = keras.Variable([0.0]), []
    optimizer = ks.Tower(keras.optimizers.SGD(1.0))

    def step(batch):
        seen.append(batch)
        optimizer.apply([ops.ones(1)], [v])
        return {"last": len(seen)}

    assert ks.replicate(step, 2)({"x": np.arange(4), "none": None, "scale": 3.0}) == {"last": 2}
    assert [list(batch["x"]) for batch in seen] == [[0, 1], [2, 3]]
    assert all(batch["none"] is None and batch["scale"] == 3.0 for batch in seen)


def test_a_failed_step_leaves_nothing_behind():
    v = keras.Variable([0.0])
    optimizer = ks.Tower(keras.optimizers.SGD(1.0))
    optimizer.build([v])

    def step(rows):
        optimizer.apply([ops.ones(1)], [v])
        raise RuntimeError("a fault of the step")

    with pytest.raises(RuntimeError, match="a fault of the step"):
        ks.replicate(step, 2)(np.ones(2))
    optimizer.apply([ops.ones(1)], [v])
    golden.assert_close(v, [-1.0])


def test_replicated_steps_do_not_nest():
    with pytest.raises(ValueError, match="inside a replicated step"):
        ks.replicate(ks.replicate(lambda rows: None, 2), 2)(np.ones(4))


@pytest.mark.exhaustive("jax", "tensorflow")
def test_what_belongs_inside_is_refused_outside():
    v = keras.Variable([0.0])
    for wrap in (ks.CrossShard, keras.optimizers.LossScaleOptimizer):
        optimizer = wrap(ks.Tower(keras.optimizers.SGD(1.0)))
        optimizer.build([v])

        def step(rows, optimizer=optimizer):
            if BACKEND == "jax":
                optimizer.stateless_apply([s.value for s in optimizer.variables], [ops.ones(1)], [v.value])
            else:
                optimizer.apply([ops.ones(1)], [v])

        with pytest.raises(ValueError, match=rf"Use `Tower\({wrap.__name__}"):
            ks.replicate(step, 2)(np.ones(2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 2), TypeError, "`step` must be a function"),
        ((print, 2.0), TypeError, "`num_towers` must be an int"),
        ((print, 0), ValueError, "`num_towers` must be at least 1"),
        ((print, 2, "none"), ValueError, "`loss_reduction` must be"),
        ((print, 2, None), ValueError, "`loss_reduction` must be"),
        ((print, 2, "sum", []), ValueError, "`devices`"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ks.replicate(*arguments)
    with pytest.raises(TypeError, match="3 arguments"):
        ks.replicate(print, 2)(1, 2, 3)


@pytest.mark.backends("jax", "torch")
def test_devices_are_for_tensorflow():
    with pytest.raises(ValueError, match=r"TensorFlow only.*data_parallel"):
        ks.replicate(print, 2, devices=["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: ks.GradientClipping(inner, 1.0),
        lambda inner: ks.LARC(inner, larc_eta=0.1),
        lambda inner: ks.VariableClipping(inner, {".*": [0]}, 1.0),
    ],
)
def test_what_looks_at_whole_gradients_may_not_be_around_a_tower(wrap):
    with pytest.raises(ValueError, match="must be inside `Tower`"):
        wrap(ks.Tower(keras.optimizers.SGD()))


def test_a_factory_that_fails_is_asked_again():
    answers = [None, keras.optimizers.SGD()]
    tower = ks.Tower(lambda: answers.pop(0))
    with pytest.raises(TypeError, match="`optimizer_or_optimizer_fn`"):
        tower.inner  # noqa: B018
    assert isinstance(tower.inner, keras.optimizers.SGD)


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match="must have rows"):
        ks.replicate(lambda batch: None, 2)([1.0, 2.0])
