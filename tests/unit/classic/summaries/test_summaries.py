import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops
from support import events, problem

import keras_shardopt as ks
from keras_shardopt.classic.summaries.tags import SUMMARIES

P = "Loss_Optimization/"
OF_ONE_REPLICA = [name for name in SUMMARIES if name != "gradient_noise_scale"]


def fit(callbacks, optimizer=None, num_steps=6, epochs=1, model=None, **arguments):
    x, y = (array[: num_steps * 16] for array in problem.data())
    model = problem.model() if model is None else model
    if optimizer is not None:
        model.compile(optimizer, "mse")
    arguments = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": epochs, **arguments}
    return model, model.fit(x, y, callbacks=callbacks, **arguments)


def states_in_numpy(num_steps, rate, clip):
    """For each step: the weights before it, and the gradients before and after clipping."""
    seen = []

    def update(step, weights, grads):
        norm = np.sqrt(sum(np.sum(g**2) for g in grads))
        clipped = [g * min(1.0, clip / norm) for g in grads]
        seen.append(([w.copy() for w in weights], grads, clipped))
        for weight, grad in zip(weights, clipped):
            weight -= rate * grad

    problem.trained_in_numpy(update)
    return seen[:num_steps]


@pytest.mark.exhaustive("jax")
def test_numbers_of_fit_as_tensorboard_reads_them(tmp_path):
    optimizer = ks.build_optimizer("SGD", {}, 0.1, clip_gradients=0.3, loss_scaling="Backoff", cross_shard=True)
    model, _ = fit([ks.callbacks.TrainingSummaries(tmp_path, OF_ONE_REPLICA, every=2)], optimizer)
    found = events.read(tmp_path)
    paths = [v.path for v in model.trainable_variables]
    by_variable = ("gradients", "gradient_norm", "variables", "variable_norm")
    tags = {"learning_rate", f"{P}global_gradient_norm", f"{P}global_clipped_gradient_norm", f"{P}loss_scale"}
    assert set(found) == tags | {f"{P}{name}/{path}" for name in by_variable for path in paths} | {"train_loss"}
    assert all([step for step, _ in values] == [2, 4, 6] for values in found.values())
    norm = np.linalg.norm
    for k, (weights, grads, clipped) in enumerate(states_in_numpy(6, 0.1, 0.3)[1::2]):
        expected = {
            "learning_rate": 0.1,
            f"{P}global_gradient_norm": norm([norm(g) for g in grads]),
            f"{P}global_clipped_gradient_norm": norm([norm(g) for g in clipped]),
            f"{P}loss_scale": 2.0**14,
            **{f"{P}gradient_norm/{path}": norm(g) for path, g in zip(paths, clipped)},
            **{f"{P}variable_norm/{path}": norm(w) for path, w in zip(paths, weights)},
        }
        for tag, value in expected.items():
            assert found[tag][k][1] == pytest.approx(value, rel=1e-4), tag
        for name, arrays in (("gradients", clipped), ("variables", weights)):
            for path, array in zip(paths, arrays):
                size, smallest, largest = found[f"{P}{name}/{path}"][k][1]
                assert (size, smallest) == (array.size, pytest.approx(array.min(), rel=1e-4))
                assert largest == pytest.approx(array.max(), rel=1e-4)


@pytest.mark.exhaustive("jax", "tensorflow")
def test_larc(tmp_path):
    for mode, tags in (("clip", ("larc_clip_on", "larc_grad_update", "larc_final_lr")), ("scale", ())):
        larc = ks.LARC(keras.optimizers.SGD(0.1), larc_eta=0.02, larc_mode=mode)
        folder = tmp_path / mode
        model, _ = fit([ks.callbacks.TrainingSummaries(folder, ["larc_summaries"], every=1)], larc, num_steps=1)
        found = events.read(folder)
        weights, grads, _ = states_in_numpy(1, 0.1, 1e9)[0]
        for v, w, g in zip(model.trainable_variables, weights, grads):
            ratio = 0.02 * np.linalg.norm(w) / np.linalg.norm(g) / (0.1 if mode == "clip" else 1.0)
            ratio = min(ratio, 1.0) if mode == "clip" else ratio
            assert found[f"{P}larc_grad_update/{v.path}"] == [(1, pytest.approx(ratio, rel=1e-4))]
            assert found[f"{P}larc_final_lr/{v.path}"] == [(1, pytest.approx(0.1 * ratio, rel=1e-4))]
            if tags:
                assert found[f"{P}larc_clip_on/{v.path}"] == [(1, float(ratio < 1))]
            else:
                assert f"{P}larc_clip_on/{v.path}" not in found


@pytest.mark.exhaustive("jax", "tensorflow")
def test_every_update_of_several_epochs_and_fits(tmp_path):
    callback = ks.callbacks.TrainingSummaries(tmp_path, ["global_gradient_norm"], every=3)
    model, _ = fit([callback], ks.CrossShard(keras.optimizers.Adam()), num_steps=4, epochs=2)
    fit([callback], num_steps=4, epochs=1, model=model)
    # At the end of an epoch nothing is lost, and nothing written twice.
    assert [step for step, _ in events.read(tmp_path)[f"{P}global_gradient_norm"]] == [3, 6, 9, 12]


def num_traces(callbacks_of_fits, factors):
    """How often the loss runs as Python in each `fit` of one step, and the weights in the end.

    `factors` are those of the loss, by the number of the `fit` before which the model is compiled.
    """
    traces = [0]
    model, counts = problem.model(), []
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.1, momentum=0.9))
    for number, callbacks in enumerate(callbacks_of_fits):
        if factor := factors.get(number):

            def loss(y, outputs, factor=factor):
                traces[0] += 1
                return factor * keras.losses.mean_squared_error(y, outputs)

            model.compile(optimizer, loss)
        before = traces[0]
        fit(callbacks, num_steps=1, model=model)
        counts.append(traces[0] - before)
    return counts, model.get_weights()


@pytest.mark.backends("jax", "tensorflow")
@pytest.mark.exhaustive("tensorflow")
def test_one_callback_compiles_in_its_first_fit_only(tmp_path):
    callback = ks.callbacks.TrainingSummaries(tmp_path, ["global_gradient_norm", "variables"], every=1)
    callbacks = [[callback], [callback], [], [callback], [], [callback]]
    counts, weights = num_traces(callbacks, {0: 1.0, 5: 2.0})
    assert [count > 0 for count in counts] == [True, False, True, False, False, True]
    assert [step for step, _ in events.read(tmp_path)[f"{P}global_gradient_norm"]] == [1, 2, 4, 6]
    _, expected = num_traces([[]] * len(callbacks), {0: 1.0, 5: 2.0})
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.backends("jax", "tensorflow")
@pytest.mark.exhaustive("tensorflow")
def test_a_callback_with_other_settings_or_after_a_failed_fit_compiles_again(tmp_path):
    callback = ks.callbacks.TrainingSummaries(tmp_path, ["variables"], every=1)

    class Failing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ArithmeticError

    class Changing(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            callback.summaries = ["global_gradient_norm"]

    model, _ = fit([callback], ks.CrossShard(keras.optimizers.SGD(0.1)), num_steps=1)
    fit([Changing(), callback], num_steps=1, model=model)
    with pytest.raises(ArithmeticError):
        fit([callback, Failing()], num_steps=1, model=model)
    fit([callback], num_steps=1, model=model)
    other = ks.callbacks.TrainingSummaries(tmp_path / "other", ["global_gradient_norm"], every=1)
    fit([other], num_steps=1, model=model)
    fit([callback], num_steps=1, model=model)
    steps = [step for step, _ in events.read(tmp_path)[f"{P}global_gradient_norm"]]
    # Another thread of `tensorboardX` writes the third, unless the failed training does not close the file in time.
    assert [step for step in steps if step != 3] == [2, 4, 6]
    assert [step for step, _ in events.read(tmp_path / "other")[f"{P}global_gradient_norm"]] == [5]
    assert len(model.optimizer.variables) == 2  # the count and the rate


@pytest.mark.exhaustive("jax", "tensorflow")
def test_micro_steps_are_not_updates(tmp_path):
    callback = ks.callbacks.TrainingSummaries(tmp_path, ["global_gradient_norm", "learning_rate"], every=2)
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 4, 0.0)
    optimizer = ks.build_optimizer("SGD", {}, schedule, iter_size=3)
    fit([callback], optimizer, num_steps=13)
    found = events.read(tmp_path)
    assert [step for step, _ in found[f"{P}global_gradient_norm"]] == [2, 4]
    assert [rate for _, rate in found["learning_rate"]] == pytest.approx([0.075, 0.025])


@pytest.mark.exhaustive("jax", "tensorflow")  # a compiled step itself counts updates
@pytest.mark.parametrize("num_steps", [12, 15])
def test_micro_steps_of_several_fits_are_not_updates(num_steps, tmp_path):
    callback = ks.callbacks.TrainingSummaries(tmp_path, ["global_gradient_norm"], every=2)
    model, _ = fit(
        [callback], ks.CrossShard(keras.optimizers.SGD(), gradient_accumulation_steps=3), num_steps=num_steps
    )
    fit([callback], num_steps=6, model=model)
    assert [step for step, _ in events.read(tmp_path)[f"{P}global_gradient_norm"]] == [2, 4, 6]


@pytest.mark.exhaustive("tensorflow")
def test_it_changes_nothing_but_the_logs(tmp_path):
    def optimizer():
        return ks.build_optimizer("Adam", {}, 0.01, clip_gradients=0.1, loss_scaling="Backoff", cross_shard=True)

    plain, _ = fit([], optimizer())
    num_variables = len(plain.optimizer.variables)
    plain.save(tmp_path / "plain.keras")

    class SaveInTheMiddle(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.num_variables = len(self.model.optimizer.variables)
            self.model.save(tmp_path / "watched.keras")

    saving = SaveInTheMiddle()
    watched, history = fit([ks.callbacks.TrainingSummaries(tmp_path, OF_ONE_REPLICA, every=2), saving], optimizer())
    assert saving.num_variables > num_variables == len(watched.optimizer.variables)
    for a, b in zip(plain.get_weights(), watched.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    loaded = keras.saving.load_model(tmp_path / "watched.keras")
    for a, b in zip(loaded.optimizer.variables, watched.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(a), ops.convert_to_numpy(b))
    assert list(history.history) == ["loss", "learning_rate", "loss_scale"]


@pytest.mark.exhaustive("jax", "tensorflow")
def test_verbose_shows_rate_and_scale(capsys):
    optimizer = ks.LossScaling(keras.optimizers.SGD(0.125), "Backoff", {"scale_max": 64.0})
    _, history = fit([ks.callbacks.TrainingSummaries()], optimizer, num_steps=2, verbose=2)
    printed = capsys.readouterr().out
    assert "learning_rate: 0.1250" in printed and "loss_scale: 64.0000" in printed
    assert history.history["loss_scale"] == [64.0]
    _, history = fit([ks.callbacks.TrainingSummaries()], keras.optimizers.SGD(0.125), num_steps=2)
    assert history.history["learning_rate"] == [0.125] and "loss_scale" not in history.history


@pytest.mark.exhaustive("tensorflow")
def test_a_skipped_update_leaves_no_trace(tmp_path):
    weight = keras.Variable([1.0, 2.0], name="weight")
    arguments = dict(loss_scaling="Backoff", log_dir=tmp_path, every=1, summaries=["gradient_norm", "loss_scale"])
    step = ks.optimize_loss(lambda x: ops.sum(weight * x), "SGD", {}, 0.1, var_list=[weight], **arguments)
    for value in ([3.0, 4.0], [np.inf, 1.0], [6.0, 8.0]):
        step(np.array(value, "float32"))
    step.close()
    found = events.read(tmp_path)
    assert found[f"{P}gradient_norm/weight"] == [(1, pytest.approx(5.0)), (2, pytest.approx(10.0))]
    assert found[f"{P}loss_scale"] == [(1, 2.0**14), (2, 2.0**13)]


@pytest.mark.exhaustive("jax", "tensorflow")
def test_steps_that_fail_or_are_skipped_do_not_count(tmp_path):
    weight = keras.Variable([1.0, 2.0], name="weight")
    arguments = dict(loss_scaling="Backoff", log_dir=tmp_path, every=3, summaries=["gradient_norm"], iter_size=2)
    step = ks.optimize_loss(lambda x: ops.sum(weight * x), "SGD", {}, 0.1, var_list=[weight], **arguments)
    for i, size in enumerate([0.0, np.inf, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]):  # the second window overflows
        with pytest.raises(TypeError, match="missing"):
            step()
        for _ in range(2):
            step(np.array([0.6 * size, 0.8 * size] if i != 1 else [size, 1.0], "float32"))
    step.close()
    found = events.read(tmp_path)
    assert found[f"{P}gradient_norm/weight"] == [(3, pytest.approx(2.0)), (6, pytest.approx(5.0))]
    last = [-0.1 * sum(range(k)) for k in (2, 5)]  # what the loss of each is made of
    losses = [k * (0.6 * (1 + 0.6 * w) + 0.8 * (2 + 0.8 * w)) for k, w in zip((2, 5), last)]
    assert found["train_loss"] == [(3, pytest.approx(losses[0])), (6, pytest.approx(losses[1]))]


@pytest.mark.exhaustive("jax", "tensorflow")
def test_other_optimizers_show_their_rate_only(tmp_path):
    fit([ks.callbacks.TrainingSummaries(tmp_path, every=2)], keras.optimizers.SGD(0.125))
    found = events.read(tmp_path)
    assert set(found) == {"learning_rate", "train_loss"}
    assert {rate for _, rate in found["learning_rate"]} == {0.125}
    with pytest.raises(ValueError, match="CrossShard"):
        fit([ks.callbacks.TrainingSummaries(tmp_path, ["gradients"])], keras.optimizers.SGD())


@pytest.mark.exhaustive("jax", "tensorflow")
def test_no_list_is_none_at_all(tmp_path):
    fit([ks.callbacks.TrainingSummaries(tmp_path, [], every=1)], ks.CrossShard("sgd"), num_steps=2)
    assert events.read(tmp_path) == {}


def test_mistakes():
    with pytest.raises(ValueError, match="'lr'"):
        ks.callbacks.TrainingSummaries(summaries=["lr"])
    with pytest.raises(TypeError, match="summaries"):
        ks.callbacks.TrainingSummaries(summaries="gradients")
    with pytest.raises(ValueError, match="every=0"):
        ks.callbacks.TrainingSummaries(every=0)
    with pytest.raises(TypeError, match="every"):
        ks.callbacks.TrainingSummaries(every=1.5)


def test_without_the_writer_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        fit([ks.callbacks.TrainingSummaries(tmp_path)], ks.CrossShard("sgd"), num_steps=1)


def test_only_the_chief_writes(tmp_path, monkeypatch):
    from keras_shardopt.backends.active import processes

    monkeypatch.setattr(processes, "process", lambda: (2, 1))
    fit([ks.callbacks.TrainingSummaries(tmp_path, every=1)], ks.CrossShard("sgd"), num_steps=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.neutral
@pytest.mark.exhaustive("torch")
def test_writing_loads_no_tensorflow(tmp_path):
    program = f"""
import sys
from tensorboardX import SummaryWriter
writer = SummaryWriter({str(tmp_path)!r})
writer.add_scalar("a", 1.0, 1)
writer.close()
print("tensorflow" in sys.modules, "jax" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.split() == ["False", "False"]
