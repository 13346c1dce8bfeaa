"""A model with two optimizers of its own and a training step of its own: replicas train as one process does."""

import keras
import numpy as np
import pytest
from promises.problems import gan
from support import catalogue, events, problem

import keras_shardopt as ks


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.exhaustive("tensorflow")
def test_replicas_train_as_one_process(tmp_path):
    alone = gan.fit(gan.compiled())
    with ks.data_parallel(2) as replicas:
        model = ks.prepare(gan.compiled(gan.one_divided))
        again = gan.built(gan.compiled(gan.one_divided))
    gan.fit(model, callbacks=[ks.callbacks.CheckReplicas(every=2), ks.callbacks.StopOnNonFinite()])
    assert gan.difference(model, alone) <= problem.TOLERANCE
    assert replicas.largest_difference(model) == 0
    ks.save_weights(model, tmp_path / "gan.weights.h5")
    for one in (again, gan.built(gan.compiled())):
        one.load_weights(tmp_path / "gan.weights.h5")
        assert gan.difference(one, model) == 0
    replicas.close()


@pytest.mark.exhaustive("jax", "tensorflow")
def test_backups_hold_every_optimizer(tmp_path):
    class Interrupted(Exception):
        pass

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise Interrupted

    def trained(folder, *callbacks):
        model = gan.compiled(gan.one_divided)
        backup = ks.callbacks.BackupAndRestore(tmp_path / folder)
        return gan.fit(model, epochs=4, callbacks=[backup, *callbacks])

    alone = trained("alone")
    with pytest.raises(Interrupted):
        trained("backup", Stop())
    resumed = trained("backup")
    for one, other in zip(gan.weights(resumed), gan.weights(alone)):
        np.testing.assert_array_equal(one, other)
    for name in ("d_optimizer", "g_optimizer"):
        states = [catalogue.state_of(getattr(model, name)) for model in (resumed, alone)]
        for one, other in zip(*states):
            np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive("tensorflow")
def test_a_prepared_model_needs_a_reducing_optimizer_where_it_trains():
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(gan.compiled())
    # Keras' own step uses the optimizer of `compile` and no other.
    model = problem.model()
    model.compile("sgd", "mse")
    model.another = ks.CrossShard("sgd")
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(model)


def reducing(inner, of_discriminator):
    return ks.CrossShard(inner)


@pytest.mark.exhaustive("tensorflow")
def test_summaries_are_of_every_optimizer(tmp_path):
    def trained(summaries):
        model = gan.built(gan.compiled(reducing))
        folder = tmp_path / str(summaries)
        gan.fit(model, callbacks=[ks.callbacks.TrainingSummaries(folder, summaries, every=2)], epochs=2)
        return events.read(folder), model

    found, model = trained(None)
    logs = {name: values for name, values in model.history.history.items() if "learning_rate" in name}
    rates = {"d_optimizer/learning_rate": 0.1, "g_optimizer/learning_rate": 0.2}
    assert logs == {name: pytest.approx([rate] * 2) for name, rate in rates.items()}
    assert all("_optimizer/" in tag for tag in found)  # neither that of `compile`, nor a loss that no step keeps
    steps = [2, 4, 6, 8, 10]
    for name, rate in rates.items():
        assert [step for step, _ in found[name] if step % 2 == 0] == steps
        assert all(value == pytest.approx(rate) for _, value in found[name])
    if keras.config.backend() == "jax":
        with pytest.raises(ValueError, match=r"summaries=\['gradient_norm'\], and the optimizer `d_optimizer`"):
            trained(["gradient_norm"])
        return
    found, model = trained(["gradient_norm"])
    for part, name in (("discriminator", "d_optimizer"), ("generator", "g_optimizer")):
        paths = [variable.path for variable in getattr(model, part).trainable_variables]
        for path in paths:
            values = found.pop(f"{name}/Loss_Optimization/gradient_norm/{path}")
            assert [step for step, _ in values] == steps and all(value > 0 for _, value in values)
    assert not found


@pytest.mark.backends("torch")
def test_an_optimizer_that_its_first_update_builds_is_watched_from_then_on(tmp_path):
    model = gan.compiled(reducing)
    gan.fit(model, callbacks=[ks.callbacks.TrainingSummaries(tmp_path, ["global_gradient_norm"], every=1)])
    found = events.read(tmp_path)
    assert len(found) == 2 and all("global_gradient_norm" in tag for tag in found)
    assert all([step for step, _ in values] == [2, 3, 4, 5] for values in found.values())
