"""TensorFlow's own files, `tf.train.Checkpoint` and SavedModels, of models and optimizers with wrappers."""

import inspect

import keras
import numpy as np
import pytest
from support import catalogue, problem
from support.suites import some

import keras_shardopt as ks

pytestmark = pytest.mark.backends("tensorflow")
tf = pytest.importorskip("tensorflow", reason="about TensorFlow, which is not installed")

PAIRS = [
    *((wrapper, "Adam") for wrapper in [*catalogue.WRAPPERS, "nested"]),
    *(("CrossShard", inner) for inner in catalogue.REPRESENTATIVE),
    *(("LossScaling", inner) for inner in ("SGD momentum", "Adam ema")),
]
SEVERAL = {
    "one": lambda: ks.CrossShard(problem.sgd_momentum()),
    "several": lambda: ks.CrossShard(ks.LossScaling(ks.GradientClipping(keras.optimizers.Adam(0.01), 1.0))),
    "divided": lambda: ks.CrossShard(problem.sgd_momentum(), shard_state=True),
    "divided inside": lambda: ks.CrossShard(ks.LossScaling(keras.optimizers.Adam(0.01)), shard_state=True),
}
# Those of which files, too, do not hold all that a step leaves for the next.
LEAVING_OUT = {
    "window": lambda: ks.CrossShard(problem.sgd_momentum(), gradient_accumulation_steps=3),
    "local updates": lambda: ks.CrossShard(problem.sgd_momentum(), sync_every=3),
    "coded": lambda: ks.CrossShard(problem.sgd_momentum(), compression="int8"),
}


def nested(inner):
    """Everything around one optimizer, with state of its own in two places."""
    clipped = ks.GradientClipping(ks.LARC(ks.VariableClipping(inner, {".*": [0]}, max_norm=1e6), 1e6), 1e6)
    return ks.Tower(ks.CrossShard(ks.LossScaling(clipped, "Backoff", {"scale_max": 1.0}), on_nonfinite="skip"))


def make(wrapper, inner):
    """The optimizer called `inner`, in the wrapper of that name or in None."""
    around = {"nested": nested, None: lambda optimizer: optimizer, **catalogue.WRAPPERS}
    return around[wrapper](catalogue.plain(inner))


def compiled(optimizer, build=True):
    model = problem.model()
    model.compile(optimizer, "mse", run_eagerly=True)
    if build:
        optimizer.build(model.trainable_variables)
    return model


def update(model, steps):
    for step in steps:
        random = np.random.default_rng(step)
        variables = model.trainable_variables
        grads = [tf.constant(random.normal(size=v.shape).astype("float32")) for v in variables]
        model.optimizer.apply(grads, variables)
    return model


def assert_equal(some, others):
    for a, b in zip(some, others, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_alike(model, other, num_state=None):
    assert_equal(model.get_weights(), other.get_weights())
    states = (catalogue.state_of(each.optimizer)[:num_state] for each in (model, other))
    assert_equal(*states)


@pytest.mark.parametrize(("wrapper", "inner"), some(dict.fromkeys(PAIRS), 3))
def test_training_goes_on_from_a_checkpoint(wrapper, inner, tmp_path):
    trained = update(compiled(make(wrapper, inner)), range(3))
    path = tf.train.Checkpoint(model=trained).save(tmp_path / "model")
    alone = tf.train.Checkpoint(optimizer=trained.optimizer).save(tmp_path / "optimizer")
    at_once = compiled(make(wrapper, inner))
    tf.train.Checkpoint(model=at_once).restore(path).assert_consumed()
    assert_alike(at_once, trained)
    later = compiled(make(wrapper, inner), build=False)
    tf.train.Checkpoint(model=later).restore(path)
    later.optimizer.build(later.trainable_variables)
    assert_alike(later, trained)
    update(trained, range(3, 5))
    assert_alike(update(at_once, range(3, 5)), trained)
    assert_alike(update(later, range(3, 5)), trained)
    tf.train.Checkpoint(optimizer=later.optimizer).restore(alone).assert_consumed()
    assert int(later.optimizer.iterations) == 3


@pytest.mark.parametrize("wrapper", some([*catalogue.ONE_OF_EACH_CLASS, "nested"], 3))
def test_a_checkpoint_moves_between_a_wrapper_and_its_inner_optimizer(wrapper, tmp_path):
    wrapped, plain = (update(compiled(make(w, "Adam")), range(3)) for w in (wrapper, None))
    num_state = len(plain.optimizer.variables)
    for source, name, target in ((wrapped, None, wrapped), (plain, wrapper, plain)):
        path = tf.train.Checkpoint(model=source).save(tmp_path / str(name))
        for build in (True, False):
            model = compiled(make(name, "Adam"), build)
            tf.train.Checkpoint(model=model).restore(path)
            model.optimizer.build(model.trainable_variables)
            assert_alike(model, target, num_state)


def test_a_leaf_of_this_package_is_stored(tmp_path):
    trained = update(compiled(catalogue.plain("NovoGrad")), range(3))
    path = tf.train.Checkpoint(model=trained).save(tmp_path / "model")
    model = compiled(catalogue.plain("NovoGrad"))
    tf.train.Checkpoint(model=model).restore(path).assert_consumed()
    assert_alike(model, trained)
    assert "get_slot_names" in dir(model.optimizer)


@pytest.mark.parametrize("wrapper", some([*catalogue.WRAPPERS, "nested"], ["nested"]))
def test_a_trained_model_is_exported(wrapper, tmp_path):
    x, y = problem.data(num_steps=2)
    model = compiled(make(wrapper, "Adam"), build=False)
    for is_trained in (False, True):
        if is_trained:
            model.fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)
        model.export(tmp_path / "exported", verbose=False)
        tf.saved_model.save(model, tmp_path / "saved")
        for name in ("exported", "saved"):
            loaded = tf.saved_model.load(tmp_path / name)
            predict = loaded.serve if name == "exported" else loaded.signatures["serving_default"]
            (found,) = tf.nest.flatten(predict(tf.constant(x[:2])))
            np.testing.assert_allclose(found, model(x[:2]), rtol=1e-6)


def on_replicas(make, num_replicas):
    with ks.data_parallel(num_replicas):
        model = problem.model()
        model.compile(make(), "mse")
    return model


def fit(model):
    x, y = problem.data(num_steps=4)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("optimizer", some(SEVERAL, ["divided"]))
def test_replicas_go_on_from_a_checkpoint(optimizer, tmp_path):
    trained = fit(on_replicas(SEVERAL[optimizer], 2))
    path = tf.train.Checkpoint(model=trained).save(tmp_path / "model")
    model = on_replicas(SEVERAL[optimizer], 2)
    tf.train.Checkpoint(model=model).restore(path)
    # The same file is read by another number of replicas.
    alone = on_replicas(SEVERAL[optimizer], 1)
    tf.train.Checkpoint(model=alone).restore(path)
    alone.optimizer.build(alone.trainable_variables)
    stores: list[dict[str, object]] = [{}, {}]
    for each, store in zip((trained, alone), stores):
        each.optimizer.save_own_variables(store)
    assert_equal(stores[0].values(), stores[1].values())
    assert_equal(fit(model).get_weights(), fit(trained).get_weights())
    trained.export(tmp_path / "exported", verbose=False)
    tf.saved_model.save(trained, tmp_path / "saved")
    tf.saved_model.load(tmp_path / "saved")
    if trained.optimizer.shard_state:
        with ks.data_parallel(2):
            of_no_model = SEVERAL[optimizer]()
        with pytest.raises(ValueError, match="must be built before"):
            tf.train.Checkpoint(model=tf.train.Checkpoint(optimizer=of_no_model)).restore(path)
        # One replica has the whole state, so the values can wait until the optimizer is built.
        with ks.data_parallel(1):
            on_one = SEVERAL[optimizer]()
        tf.train.Checkpoint(model=tf.train.Checkpoint(optimizer=on_one)).restore(path)
        assert not on_one.built and int(on_one.iterations) == 4


@pytest.mark.parametrize("optimizer", LEAVING_OUT)
@pytest.mark.exhaustive
def test_a_checkpoint_leaves_out_what_files_do(optimizer, tmp_path):
    trained = fit(on_replicas(LEAVING_OUT[optimizer], 2))
    path = tf.train.Checkpoint(model=trained).save(tmp_path / "model")
    ks.save_weights(trained, tmp_path / "model.weights.h5")
    restored, loaded = (on_replicas(LEAVING_OUT[optimizer], 2) for _ in range(2))
    tf.train.Checkpoint(model=restored).restore(path)
    loaded.load_weights(tmp_path / "model.weights.h5")
    want = fit(loaded).get_weights()
    assert_equal(fit(restored).get_weights(), want)
    # Whatever has come since is no part of the next update.
    tf.train.Checkpoint(model=trained).restore(path)
    assert_equal(fit(trained).get_weights(), want)


def test_private_names_of_tensorflow():
    from tensorflow.python.checkpoint import restore, util
    from tensorflow.python.trackable import base
    from tensorflow.python.training.saving import saveable_object_util

    assert '"get_slot_names" in dir(trackable)' in inspect.getsource(util.serialize_slot_variables)
    source = inspect.getsource(restore._queue_children_for_restoration)
    assert "_lookup_dependency(child.local_name,\n" in source and "_deferred_dependencies.setdefault(" in source
    assert "self._lookup_dependency(name)" in inspect.getsource(base.Trackable._track_trackable)
    assert "_deferred_dependencies.pop(name" in inspect.getsource(base.Trackable._handle_deferred_dependencies)
    source = inspect.getsource(saveable_object_util.trackable_has_serialize_to_tensor)
    assert '"_serialize_to_tensors" in obj.__dict__' in source
    assert base.Trackable._trackable_children and base.Trackable._restore_from_tensors
