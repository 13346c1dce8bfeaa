"""A model with two optimizers of its own and a training step of its own: replicas train as one process does."""

import keras
import numpy as np
import pytest
from support import catalogue, gan, problem

import keras_shardopt as ks


@pytest.mark.backends("tensorflow", "jax")
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


def test_a_prepared_model_needs_a_reducing_optimizer_where_it_trains():
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(gan.compiled())
    # Keras' own step uses the optimizer of `compile` and no other.
    model = problem.model()
    model.compile("sgd", "mse")
    model.another = ks.CrossShard("sgd")
    with pytest.raises(ValueError, match="compiled with a `CrossShard`"):
        ks.prepare(model)
