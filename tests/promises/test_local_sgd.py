"""With `sync_every` each replica trains by itself, and all join their weights in rounds, as NumPy does it."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from promises.problems import apart, uneven
from support import problem
from support.suites import some
from support.worlds import FakeWorld

import keras_shardopt as ks
from keras_shardopt.backends.active import placement, processes
from keras_shardopt.backends.communicator import SingleReplica
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.extensions.local_sgd.sync import check_counts

pytestmark = pytest.mark.xdist_group("test_local_sgd")  # which looks at the same runs in many tests

NUM_REPLICAS = (2, 4)
# On TensorFlow each device traces a step of its own.
ON_FOUR = ("every 2", "every 5 in 3 fragments") if BACKEND == "tensorflow" else apart.CASES
KNOWN = {}


def run(world, job, num_replicas, name, of):
    """What `world.run` returns, once for all tests; where replicas are ranks, `world` remembers it by itself."""
    key = job, num_replicas, name
    if key not in KNOWN:
        KNOWN[key] = world.run(job, num_replicas, name, of=of)
    return KNOWN[key]


OFTEN = ["every 3", "every 5 in 3 fragments"] if BACKEND != "tensorflow" else ["every 3"]


TRAINED = [(name, 2) for name in apart.CASES] + [(name, 4) for name in ON_FOUR]


@pytest.mark.parametrize(
    ("name", "num_replicas"),
    some(TRAINED, lambda case: case[1] == 2 and (BACKEND == "torch" or case[0] in OFTEN)),
)
def test_weights_are_those_of_replicas_in_numpy(world, num_replicas, name):
    found = run(world, apart.trained, num_replicas, name, of=apart.CASES)
    assert found["updates"] == apart.NUM_UPDATES
    means = apart.in_numpy(num_replicas, name)
    assert problem.relative_difference(found["weights"], means[-1]) < problem.TOLERANCE
    assert found["differ"] == 0


@pytest.mark.exhaustive("tensorflow")
@pytest.mark.parametrize("name", apart.VALIDATED)
def test_validation_sees_the_mean_of_all_replicas(world, name):
    found = run(world, apart.trained, 2, name, of=apart.CASES)
    x, y = (array[:16].astype("float64") for array in uneven.data())
    for mean, loss in zip(apart.in_numpy(2, name), found["val_loss"], strict=True):
        kernel1, bias1, kernel2, bias2 = mean
        expected = np.mean((np.tanh(x @ kernel1 + bias1) @ kernel2 + bias2 - y) ** 2)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(found["evaluated"], found["val_loss"][-1], rtol=1e-6)


@pytest.mark.parametrize("num_replicas", some(NUM_REPLICAS, 4) if BACKEND != "tensorflow" else [2])
@pytest.mark.exhaustive("tensorflow")
def test_a_round_at_each_update_is_synchronous_training(world, num_replicas):
    found = run(world, apart.trained, num_replicas, "every update", of=apart.CASES)
    weights = [w.astype("float64") for w in problem.start_weights()]
    x, y = (array.astype("float64") for array in uneven.data())
    for _ in range(apart.EPOCHS):
        for begin in range(0, len(x), uneven.BATCH_SIZE):
            batch = slice(begin, begin + uneven.BATCH_SIZE)
            grads = problem.gradients_in_numpy(weights, x[batch], y[batch])
            weights = [w - apart.RATE * g for w, g in zip(weights, grads)]
    assert problem.relative_difference(found["weights"], weights) < problem.TOLERANCE


LIVES = ("looked at and killed", "in two calls", "interrupted")


@pytest.mark.parametrize("name", LIVES)
@pytest.mark.exhaustive("jax", "tensorflow")
def test_training_is_the_same_bit_for_bit_whoever_looks_at_it(world, name):
    found = run(world, apart.lived, 2, name, of=apart.LIVES)
    if name == "looked at and killed":
        whole, _ = run(world, apart.lived, 2, "whole", of=apart.LIVES)
        found, seen = found
        assert len(seen) == 3
        for evaluated, saved in seen:  # a file has the mean, too
            np.testing.assert_allclose(saved, evaluated, rtol=1e-5)
    else:
        whole = run(world, apart.lived, 2, "without averages", of=apart.LIVES)
        found = found[0] if name == "interrupted" else found
    assert len(found) == len(whole) > 25
    for one, other in zip(found, whole):
        np.testing.assert_array_equal(one, other)
    # Replicas have something of their own, or nothing was tried.
    assert any(not np.array_equal(each[0], each[1]) for each in whole[2:6])


def test_statistics_that_somebody_has_set_begin_no_round(world):
    """Between two calls. Replicas go on from weights and state of their own, and from the statistics that were set."""
    expected = run(world, apart.lived, 2, "without averages", of=apart.LIVES)
    found = run(world, apart.lived, 2, "with other statistics", of=apart.LIVES)
    differing = [i for i, each in enumerate(zip(found, expected, strict=True)) if not np.array_equal(*each)]
    # Each replica's moving mean, and what the model has of it.
    assert [found[i].shape for i in differing] == [(2, problem.NUM_FEATURES), (problem.NUM_FEATURES,)]


@pytest.mark.exhaustive("tensorflow")
def test_files_have_the_mean_and_how_far_rounds_are(world):
    _, (kept, theirs, start, end, differ, _) = run(world, apart.lived, 2, "whole", of=apart.LIVES)
    for one, other in zip(kept, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert max(np.max(np.abs(s - e)) for s, e in zip(start, end)) > 1e-3
    assert differ == 0


@pytest.mark.exhaustive("tensorflow")
@pytest.mark.parametrize("when", ["when interrupted", "after a call"])
def test_rounds_begin_from_weights_that_somebody_has_set(world, when):
    _, found = run(world, apart.lived, 2, "interrupted", of=apart.LIVES)
    for anchor, weight in zip(*found[when], strict=True):
        np.testing.assert_array_equal(anchor, weight)


def test_a_round_that_is_not_finite_is_left_out(world):
    found = world.run(apart.with_nan, 2, "ignore", of=NONFINITE)
    assert (found["left_out"], found["count"]) == (1, 8)
    assert all(np.all(np.isfinite(weight)) for weight in found["weights"])
    assert len(found["warned"]) == 1 and "1 such" in found["warned"][0]
    # The first round was made, and the weights are no longer those of the start.
    assert not np.allclose(found["weights"][0], problem.start_weights()[0], atol=1e-3)
    # On no replica is anything left of it, so that the next rounds are made.
    assert found["left_out_later"] == 1 and found["differ"] == 0
    assert not any(np.array_equal(*both) for both in zip(found["weights"], found["later"]))


NONFINITE = ("ignore", "skip", "scaling")


# Twins, below, skip as well.
@pytest.mark.exhaustive("tensorflow", "jax")
@pytest.mark.parametrize("name", ["skip", "scaling"])
def test_each_replica_skips_its_own_updates(world, name):
    found = world.run(apart.with_nan, 2, name, of=NONFINITE)
    assert (found["skipped"], found["left_out"], found["count"]) == (1, 0, 8)
    assert all(np.all(np.isfinite(weight)) for weight in found["weights"])


SKIPPING = ["scaling, statistics and accumulation", "statistics before a round"]


@pytest.mark.parametrize("name", some(apart.SKIPPING, SKIPPING, "tensorflow", "jax"))
def test_replicas_that_leave_out_updates_are_twins(world, name):
    """One of which has a NaN, or both: weights, moving statistics, counters and scales are as if each were alone."""
    found = world.run(apart.skipping, 2, name, of=apart.SKIPPING)
    expected = apart.skipping_twins(name)
    assert found["iterations"] == expected["iterations"]
    assert found["skipped"] == expected["skipped"] and sum(found["skipped"]) >= 2
    assert found["left_out"] == 0
    assert found["count"] == apart.NUM_MICRO // apart.SKIPPING[name][1].get("gradient_accumulation_steps", 1)
    assert found["scale"] is None or (found["scale"] == expected["scale"] and len(set(found["scale"])) == 2)
    # Where one program runs all replicas, the largest count of any; else each rank's own.
    assert max(found["counted"]) == max(found["skipped"])
    movement = max(np.max(np.abs(a - b)) for a, b in zip(expected["weights"], found["start"]))
    for weight, theirs in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, theirs, atol=1e-5 * movement)
    for mine, theirs in zip(found["statistics"], expected["statistics"]):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert found["differ"] == 0


def test_seeds_of_updates_that_are_left_out_are_drawn_again(world):
    first, second = world.run(apart.seeds, 2, "")
    assert (first[1], second[1]) == (4, 3)


# On TensorFlow, windows whose last batch leaves a replica without rows were not tried.
NORMALIZED = [name for name in apart.NORMALIZED if BACKEND != "tensorflow" or "windows" not in name]


@pytest.mark.parametrize("name", some(NORMALIZED, ("2", "2 windows")))
def test_moving_statistics_are_the_mean_of_all_replicas(world, name):
    """Before a round, too, and in the middle of an epoch: whoever looks sees it."""
    found = world.run(apart.normalized, 2, name, of=NORMALIZED)
    every, window = apart.NORMALIZED[name]
    x, _ = uneven.data()
    each = [(np.zeros(problem.NUM_FEATURES), np.ones(problem.NUM_FEATURES))] * 2
    expected = []
    for begin in range(0, apart.FEW, 16):
        for replica, part in enumerate(apart.parts_of(x[begin : min(begin + 16, apart.FEW)].astype("float64"), 2)):
            if len(part):
                mean, variance = each[replica]
                each[replica] = 0.5 * mean + 0.5 * np.mean(part, axis=0), 0.5 * variance + 0.5 * np.var(part, axis=0)
        expected.append([np.mean(both, axis=0) for both in zip(*each)])
        # Where one alone has rows of the last round's update, both keep their own.
        if len(expected) % (every * (window or 1)) == 0 and (window or begin + 16 < apart.FEW):
            each = [expected[-1]] * 2
    means = [np.mean(part, axis=0) for part in apart.parts_of(x[:16].astype("float64"), 2)]
    np.testing.assert_allclose(found["set"], 0.5 * 5 + 0.5 * np.mean(means, axis=0), rtol=1e-6)
    np.testing.assert_allclose(found["each"], each, rtol=1e-5, atol=1e-6)
    for seen, both in zip(found["seen"], [*expected, expected[-1]], strict=True):
        np.testing.assert_allclose(seen, both, rtol=1e-5, atol=1e-6)
    assert found["differ"] == 0


@pytest.mark.parametrize("name", apart.COMBINED)
@pytest.mark.exhaustive("jax", "tensorflow")
def test_with_more_in_the_optimizer_replicas_are_twins(world, name):
    """As many models in one process, each with an optimizer of its own, whose weights NumPy joins."""
    found = world.run(apart.combined, 2, name, of=apart.COMBINED)
    expected, joined = apart.twins(2, name)
    movement = max(np.max(np.abs(a - b)) for a, b in zip(expected, found["start"]))
    for weight, theirs in zip(found["weights"], expected, strict=True):
        np.testing.assert_allclose(weight, theirs, atol=apart.COMBINED[name][2] * movement)
    assert [batch for batch, is_equal in enumerate(found["equal"]) if is_equal] == joined
    np.testing.assert_allclose(found["predicted"], found["evaluated"], rtol=1e-2 if name == "half precision" else 1e-5)
    assert found["differ"] == 0


@pytest.mark.exhaustive("tensorflow")
def test_dropout_leaves_other_elements_on_each_replica(world):
    first, second = world.run(apart.dropping, 2, "")
    assert np.all(np.any(first != second)) and not np.array_equal(first, second)


@pytest.mark.parametrize("num_replicas", some((1, 4), (1,)))
@pytest.mark.exhaustive("tensorflow")
def test_files_load_with_any_number_of_replicas(world, num_replicas, tmp_path):
    _, (kept, *_, file) = run(world, apart.lived, 2, "whole", of=apart.LIVES)
    path = tmp_path / "model.keras"
    path.write_bytes(file)
    if num_replicas == 1:
        with ks.data_parallel(1) as replicas:
            found = apart.moved(replicas, str(path))
    else:
        found = world.run(apart.moved, num_replicas, str(path))
    for one, other in zip(kept, found["kept"], strict=True):
        np.testing.assert_array_equal(one, other)
    before, after = found["losses"]
    assert after < before
    assert found["differ"] == 0


@pytest.mark.backends("torch", "tensorflow")
def test_nothing_is_sent_between_rounds(world):
    found = world.run(apart.sent, 2, "every 5", of=("synchronous", "every 5"))
    whole = world.run(apart.sent, 2, "synchronous", of=("synchronous", "every 5"))
    num_bytes = 4 * apart.LARGE
    # Gradients travel with some numbers that say whose they are.
    assert [num_bytes <= size < 1.01 * num_bytes for size in whole["reductions"]] == [True] * 10
    assert found["reductions"] == [num_bytes] * 2
    # With all that the trainer says about rows and logs.
    assert found["bytes"] <= 1.02 / 5 * whole["bytes"]


@pytest.mark.backends("jax")
def test_a_compiled_step_sends_something_in_a_round_only(world):
    with ks.data_parallel(2):
        always, in_rounds = apart.compiled_collectives("every 5")
        whole, nothing = apart.compiled_collectives("synchronous")
    num_bytes = 4 * apart.LARGE
    assert in_rounds == [num_bytes] and not nothing
    assert sum(whole) >= num_bytes
    # The loss, and the number of rows.
    assert sum(always) + num_bytes / 5 <= 1.02 / 5 * sum(whole)


@pytest.mark.parametrize("name", some(apart.REPORTED, ("every 5", "fragments", "warm-up"), "jax"))
@pytest.mark.exhaustive("tensorflow")
def test_the_report_counts_a_round_once(world, name):
    """And not in each update, where steps are compiled; in a warm-up it counts gradients."""
    found = world.run(apart.reported, 2, name, of=apart.REPORTED)
    arguments, ratio = apart.REPORTED[name]
    # What says whose gradients they are travels along in a warm-up; statistics have a count for each variable.
    assert 0.999 * ratio <= found["ratio"] <= 1.02 * ratio
    assert found["updates"] == {"fragments": 4, "longer and longer": 6, "warm-up": 1}.get(name, 5)
    if name not in ("averages", "warm-up"):
        assert found["number"] == arguments.get("sync_fragments", 1)


def test_with_one_replica_nothing_changes():
    def trained(**more):
        model = problem.model()
        model.compile(ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9), **more), "mse")
        model.fit(*uneven.data(), batch_size=16, shuffle=False, verbose=0)
        return model.get_weights()

    for one, other in zip(trained(), trained(sync_every=2, outer_optimizer="sgd", sync_warmup=1)):
        np.testing.assert_array_equal(one, other)


def _without_decay_of(name):
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=[name])
    return optimizer


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sync_every": 0}, "`every` must be at least 1"),
        ({"sync_every": 2.5}, "`every` must be an int"),
        ({"sync_fragments": 2}, "without `sync_every`"),
        ({"outer_optimizer": "sgd"}, "without `sync_every`"),
        ({"sync_warmup": 3}, "without `sync_every`"),
        ({"sync_every": 2, "sync_fragments": 3}, "at most `every`"),
        ({"sync_every": 2, "sync_warmup": -1}, "`warmup` must be at least 0"),
        ({"sync_every": 2, "shard_state": True}, "shard_state"),
        ({"sync_every": 2, "group_assignment": [[0], [1]]}, "group_assignment"),
        ({"sync_every": 2, "virtual_replicas": 4}, "with another extension"),
        ({"sync_every": 2, "reduction": "sum"}, "reduction"),
        ({"sync_every": 2, "on_nonfinite": "raise"}, "on_nonfinite"),
        ({"sync_every": 2, "gradients": "global"}, "gradients"),
        ({"sync_every": 2, "outer_optimizer": "nothing"}, "`outer_optimizer` must be"),
        ({"sync_every": 2, "outer_optimizer": lambda: ks.CrossShard("sgd")}, "`outer_optimizer` must be"),
        ({"sync_every": 2, "outer_optimizer": lambda: keras.optimizers.SGD(use_ema=True)}, "ignores `use_ema`"),
        ({"sync_every": 2, "outer_optimizer": lambda: keras.optimizers.SGD(loss_scale_factor=2.0)}, "`loss_scale_f"),
        ({"sync_every": 2, "outer_optimizer": lambda: _without_decay_of("bias")}, "`exclude_from_weight_decay`"),
        ({"sync_every": 2, "stages": lambda: [ks.GradientNoise()]}, "`GradientNoise` needs"),
    ],
)
def test_what_cannot_be_combined_is_refused(arguments, words):
    made = {name: value() if callable(value) else value for name, value in arguments.items()}
    with pytest.raises((TypeError, ValueError), match=words):
        ks.CrossShard("sgd", **made)


@pytest.mark.neutral
def test_arguments_are_those_of_a_file():
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    optimizer = ks.CrossShard("adam", sync_every=5, outer_optimizer=outer, sync_fragments=2, sync_warmup=3)
    loaded = ks.CrossShard.from_config(optimizer.get_config())
    assert repr(loaded) == repr(optimizer)
    assert loaded.outer_optimizer.get_config() == outer.get_config()
    assert not {"extensions", "sync_every", "outer_optimizer"} & ks.CrossShard("adam").get_config().keys()


@pytest.mark.parametrize("is_new", [True, False])
def test_rounds_that_were_left_out_before_a_file_was_written_are_warned_of_once(is_new, tmp_path):
    model = problem.model()
    model.compile(ks.CrossShard("sgd", sync_every=2), "mse")
    model.optimizer.build(model.trainable_variables)
    apart.local_of(model).sync.num_skipped.assign(3)
    with pytest.warns(UserWarning, match="Received: 3 such"):
        ks.save_model(model, tmp_path / "model.keras")
    if is_new:
        model = keras.saving.load_model(tmp_path / "model.keras")
    local = apart.local_of(model)
    assert int(keras.ops.convert_to_numpy(local.sync.num_skipped)) == 3
    local.before_reading()  # warnings are errors
    local.sync.num_skipped.assign(4)
    with pytest.warns(UserWarning, match="Received: 1 such"):
        local.before_reading()
    local.before_reading()


@pytest.mark.backends("torch")
def test_rounds_may_become_longer(monkeypatch):
    """On threads: `sync_every` as a function of the number of updates."""
    world = FakeWorld(2).hold(monkeypatch)

    def work(replicas):
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), sync_every=lambda count: 1 if count < 2 else 3)
        weight = keras.Variable([0.0])
        seen = []
        optimizer.build([weight])
        for _ in range(8):
            optimizer.apply([keras.ops.convert_to_tensor([float(replicas.replica_id)])], [weight])
            seen.append(float(keras.ops.convert_to_numpy(weight)[0]))
        return seen

    first, second = world.run(work)
    assert [a == b for a, b in zip(first, second)] == [True, True, False, False, True, False, False, True]
    assert first[-1] == -4


@pytest.mark.backends("torch")
def test_a_function_is_asked_for_rounds_that_begin_after_the_start(monkeypatch):
    """Fragments' first rounds are shorter, as if they had begun before."""
    world = FakeWorld(2).hold(monkeypatch)

    def every(count):
        assert count >= 0
        return 4

    def work(replicas):
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), sync_every=every, sync_fragments=2)
        weights = [keras.Variable([0.0]), keras.Variable([0.0])]
        optimizer.build(weights)
        seen = []
        for _ in range(6):
            grad = keras.ops.convert_to_tensor([float(replicas.replica_id)])
            optimizer.apply([grad, grad], weights)
            seen.append([float(keras.ops.convert_to_numpy(weight)[0]) for weight in weights])
        return np.array(seen)

    first, second = world.run(work)
    np.testing.assert_array_equal(first == second, [[i in (1, 5), i == 3] for i in range(6)])


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("made", "shape", "words"),
    [
        (lambda: ks.CrossShard("sgd", sync_every=4, sync_fragments=3), [(2,), (3,)], "number of trainable variables"),
        (lambda: ks.CrossShard("sgd", sync_every=4), "float8", "float8"),
    ],
)
def test_variables_that_cannot_take_part_are_refused(made, shape, words):
    variables = [keras.Variable(np.zeros(each)) for each in (shape if isinstance(shape, list) else [(2,)])]
    if shape == "float8":
        variables[0].overwrite_with_gradient = True
    with pytest.raises(ValueError, match=words):
        made().build(variables)


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("name", some(apart.REFUSED, 3))
def test_what_needs_ranks_is_refused_elsewhere(name):
    with ks.data_parallel(2) as replicas, pytest.raises(ValueError, match=apart.REFUSED[name][2]):
        apart.refused(replicas, name)


@pytest.mark.backends("tensorflow", "jax")
def test_several_processes_are_refused(monkeypatch):
    """Both where the optimizer is built and where JAX' `fit` is prepared."""
    model = problem.model()
    model.compile(ks.CrossShard("sgd", sync_every=2), "mse")
    if keras.backend.backend() == "jax":
        from keras_shardopt.extensions.local_sgd import jax as local_sgd

        monkeypatch.setattr(local_sgd.jax, "process_count", lambda: 2)
        with pytest.raises(ValueError, match="2 processes. Use the devices of one process"):
            local_sgd._check(model, model.optimizer)
        monkeypatch.undo()
    monkeypatch.setattr(processes, "process", lambda: (2, 0))
    with pytest.raises(ValueError, match="2 processes.*Use the devices of one process"):
        model.optimizer.build(model.trainable_variables)


@pytest.mark.backends("torch")
def test_what_a_round_cannot_send_it_sends_later(monkeypatch):
    """On threads: a step of int8 is four times as large as what the second weight moves in a round."""
    world = FakeWorld(2).hold(monkeypatch)
    grads = np.array([[1.0, 0.001], [1.0, 0.003]], "float32")

    def work(replicas):
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), sync_every=2, compression="int8")
        weight = keras.Variable([0.0, 0.0])
        optimizer.build([weight])
        for _ in range(40):
            optimizer.apply([keras.ops.convert_to_tensor(grads[replicas.replica_id])], [weight])
        return keras.ops.convert_to_numpy(weight)

    first, second = world.run(work)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, -40 * grads.mean(axis=0), atol=2 * 2 * 1.004 / 127)


@pytest.mark.backends("torch")
def test_rounds_begin_from_weights_within_their_constraints(monkeypatch):
    """The outer optimizer doubles what replicas move, so the first round ends beyond the limit of 0.75."""
    world = FakeWorld(2).hold(monkeypatch)

    def work(replicas):
        outer = keras.optimizers.SGD(2.0)
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), sync_every=2, outer_optimizer=outer, sync_warmup=0)
        weight = keras.Variable([0.0, 0.0])
        weight.constraint = keras.constraints.MaxNorm(0.75)
        optimizer.build([weight])
        (local,) = LocalUpdates.found_in([optimizer])
        for first in (-0.25, -0.25, *[0.1 + 0.1 * replicas.replica_id] * 2):
            optimizer.apply([keras.ops.convert_to_tensor([first, 0.0])], [weight])
        return [keras.ops.convert_to_numpy(each) for each in (weight, *local.sync.references)]

    for found in np.reshape(world.run(work), (4, 2)):
        np.testing.assert_allclose(found, [0.75 - 2 * 0.3, 0.0], atol=1e-6)


@pytest.mark.backends("torch")
def test_rounds_begin_from_weights_that_were_set_between_epochs_where_all_replicas_are_equal(monkeypatch):
    world = FakeWorld(2).hold(monkeypatch)

    def work(replicas):
        rounds = ks.LocalSGD(every=1, outer_optimizer=keras.optimizers.SGD(2.0), warmup=0)
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), extensions=[rounds])
        weight = keras.Variable([0.0])
        optimizer.build([weight])
        (local,) = LocalUpdates.found_in([optimizer])
        optimizer.apply([keras.ops.convert_to_tensor([1.0])], [weight])
        weight.assign([5.0])
        local.resume(begins_epoch=True)
        optimizer.apply([keras.ops.convert_to_tensor([1.0 + replicas.replica_id])], [weight])
        return keras.ops.convert_to_numpy(weight)

    np.testing.assert_allclose(world.run(work), [[5.0 - 2 * 1.5]] * 2)


@pytest.mark.backends("torch")
def test_a_round_that_is_left_out_changes_nothing_of_what_was_not_sent(monkeypatch):
    world = FakeWorld(2).hold(monkeypatch)

    def work(replicas):
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), sync_every=2, compression="int8")
        weight = keras.Variable([0.0, 0.0])
        optimizer.build([weight])
        (local,) = LocalUpdates.found_in([optimizer])
        (residual,) = local.sync.transport.residuals
        found = []
        for first in (1.0, 1.0, 1.0, np.nan if replicas.replica_id else 1.0):
            optimizer.apply([keras.ops.convert_to_tensor([first, 0.001])], [weight])
            found.append(np.array(keras.ops.convert_to_numpy(residual)))
        return found[1], found[3], int(local.sync.num_skipped)

    for before, after, left_out in world.run(work):
        assert left_out == 1 and np.any(before)
        np.testing.assert_array_equal(after, before)


@pytest.mark.backends("torch")
def test_ranks_with_other_numbers_of_updates_find_it(monkeypatch):
    world = FakeWorld(2, is_spmd=False).hold(monkeypatch)
    monkeypatch.setattr(placement, "broadcast_state", lambda *given: 1.0)

    def work(replicas):
        optimizer = ks.CrossShard(keras.optimizers.SGD(1.0), sync_every=2)
        weight = keras.Variable([0.0])
        optimizer.build([weight])
        LocalUpdates.found_in([optimizer])[0].schedule.count.assign(replicas.replica_id * 2)
        for _ in range(2):
            optimizer.apply([keras.ops.ones((1,))], [weight])

    with pytest.raises(ValueError, match="same number of updates"):
        world.run(work)


@pytest.mark.neutral
@pytest.mark.parametrize("behind", [0, 1])
def test_numbers_of_updates_are_compared_among_thousands_of_replicas(behind):
    class Many(SingleReplica):
        num_replicas, is_spmd = 4096, False

        def all_reduce(self, tensors, op):
            """This replica's, and 4,095 others', as int32 adds up."""
            count = keras.ops.convert_to_numpy(tensors[0])[0] - behind
            others = [np.array([count, count**2], "int32")] * 4095
            return [keras.ops.convert_to_tensor(np.sum([*others, *tensors], axis=0, dtype="int32"))]

    with pytest.raises(ValueError, match="same number") if behind else contextlib.nullcontext():
        check_counts(Many(), 8191)


def small(num_devices, optimizer, dtype="float32", **more):
    """A model for a number of devices, and rows for it."""
    x = np.random.RandomState(0).rand(32, 4).astype("float32")
    keras.utils.set_random_seed(1)
    with ks.data_parallel(num_devices) as replicas:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype=dtype)])
        model.compile(ks.CrossShard(optimizer, **more), "mse")
    return replicas, model, functools.partial(model.fit, batch_size=4, shuffle=False, verbose=0), x


@pytest.mark.backends("jax")
def test_weights_of_the_last_round_can_be_set_within_the_next_one():
    replicas, model, fit, x = small(2, keras.optimizers.SGD(0.1), sync_every=8)
    fit(x, x[:, :1])
    after_round = model.get_weights()
    fit(x[:16], x[:16, :1])
    assert np.abs(model.get_weights()[0] - after_round[0]).max() > 1e-3
    model.set_weights(after_round)
    model.optimizer.learning_rate = 0.0
    fit(x[:4], x[:4, :1])
    found = model.get_weights()
    replicas.close()
    for array, expected in zip(found, after_round):
        np.testing.assert_allclose(array, expected, rtol=1e-6)


@pytest.mark.backends("jax")
def test_weights_with_copies_in_lower_precision_can_be_set():
    replicas, model, fit, x = small(2, ks.MixedPrecision(keras.optimizers.SGD(0.1)), "bfloat16", sync_every=3)
    fit(x, x[:, :1])
    model.set_weights([np.full(weight.shape, 0.5) for weight in model.weights])
    fit(x[:16], x[:16, :1])
    found = [keras.ops.convert_to_numpy(keras.ops.cast(weight, "float32")) for weight in model.weights]
    replicas.close()
    assert all(np.isfinite(array).all() for array in found)


@pytest.mark.backends("jax")
@pytest.mark.parametrize("then", [1, 4])
def test_a_backup_of_two_devices_goes_on_with_others(then, tmp_path):
    class Ending(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    updates = []
    for num_devices, more in ((2, [Ending()]), (then, [])):
        replicas, model, fit, x = small(num_devices, keras.optimizers.Adam(0.1), sync_every=4)
        backup = ks.callbacks.BackupAndRestore(tmp_path)
        with contextlib.suppress(KeyboardInterrupt):
            fit(x[:8], x[:8, :1], epochs=4, callbacks=[backup, *more])
        updates.append(int(keras.ops.convert_to_numpy(model.optimizer.iterations)))
        replicas.close()
    assert updates == [4, 8]


def test_powersgd_of_rounds_does_not_warn_of_adam():
    """Warnings are errors: what is coded are movements of weights, and not gradients that Adam divides."""
    optimizer = ks.CrossShard(keras.optimizers.Adam(), sync_every=50, compression="powersgd")
    (local,) = LocalUpdates.found_in([optimizer])
    assert isinstance(local.sync.transport.codec, ks.compression.PowerSGD)
    with pytest.warns(UserWarning, match="made for SGD with momentum"):
        ks.CrossShard(keras.optimizers.Adam(), compression="powersgd")
