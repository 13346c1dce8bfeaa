"""The class that `prepare` mixes into a model: what Keras, files and users see of it."""

import contextlib
import copy
import gc
import pickle
import types
import weakref

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends import models
from keras_shardopt.fit.prepared import PreparedModel

X, Y = problem.data(num_steps=2)


@keras.saving.register_keras_serializable("prepared")
class Own(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(problem.NUM_OUTPUTS)
        self.calls = []

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


@keras.saving.register_keras_serializable("prepared")
class WithStep(Own):
    def train_step(self, *args, **kwargs):
        self.calls.append("train_step")
        return super().train_step(*args, **kwargs)

    def fit(self, x, y, silent=False):
        self.calls.append("fit")
        return super().fit(x, y, batch_size=problem.BATCH_SIZE, verbose=0)


def functional():
    inputs = keras.Input((problem.NUM_FEATURES,))
    return keras.Model(inputs, keras.layers.Dense(problem.NUM_OUTPUTS)(inputs))


def built(make):
    def model():
        made = make()
        made.build((None, problem.NUM_FEATURES))
        return made

    return model


KINDS = {"sequential": problem.model, "functional": functional, "own": built(Own), "step": built(WithStep)}


@pytest.fixture
def scope():
    with contextlib.ExitStack() as stack:
        number = None if keras.config.backend() == "torch" else 2
        yield stack.enter_context(ks.data_parallel(number))


def compiled(model):
    model.compile(ks.CrossShard(problem.sgd_momentum()), "mse")
    return ks.prepare(model)


@pytest.mark.parametrize("kind", some(KINDS, ["sequential", "step"], "jax", "tensorflow"))
def test_everybody_but_type_sees_the_class_of_the_user(scope, tmp_path, kind):
    plain, model = KINDS[kind](), compiled(KINDS[kind]())
    cls = type(plain)
    assert isinstance(model, PreparedModel) and isinstance(model, cls) and not isinstance(plain, PreparedModel)
    assert model.__class__ is cls and type(model) is not cls
    assert (type(model).__name__, type(model).__module__) == (cls.__name__, cls.__module__)
    assert type(ks.prepare(model)) is type(model) is type(compiled(KINDS[kind]()))
    model.fit(X, Y)
    before = {name for name in vars(plain) if callable(getattr(cls, name, None))}
    assert {name for name in vars(model) if callable(getattr(cls, name, None))} <= before | {"loss"}
    model.save(tmp_path / "model.keras")
    file = tmp_path / "a.weights.h5"
    model.save_weights(file)
    model.load_weights(file)
    assert model.__reduce__()[0] == cls._unpickle_model
    with problem.alone():
        others = [
            keras.saving.load_model(tmp_path / "model.keras"),
            pickle.loads(pickle.dumps(model)),
            copy.deepcopy(model),
            keras.models.model_from_json(model.to_json()),
        ]
        if kind in ("sequential", "functional"):
            others.append(keras.models.clone_model(model))
    assert [type(other) for other in others] == [cls] * len(others)
    for other in others[:3]:
        np.testing.assert_allclose(other.predict_on_batch(X), model.predict_on_batch(X), rtol=1e-6)
    nested = keras.Sequential([keras.Input((problem.NUM_FEATURES,)), model])
    np.testing.assert_allclose(nested.predict_on_batch(X), model.predict_on_batch(X), rtol=1e-6)


@pytest.mark.exhaustive("tensorflow")
def test_methods_of_the_user_run_inside(scope):
    model = compiled(KINDS["step"]())
    model.fit(X, Y, silent=True)
    assert model.calls[0] == "fit" and "train_step" in model.calls
    assert not models.has_built_in_step(model) and models.has_built_in_step(compiled(functional()))


def test_methods_that_were_set_on_the_model_run_inside_and_later_ones_instead(scope):
    calls, model = [], problem.model()
    real = model.train_step
    model.train_step = lambda *args: calls.append("before") or real(*args)
    compiled(model)
    assert "train_step" not in vars(model)
    assert type(model) is not type(compiled(problem.model()))
    model.fit(X, Y, batch_size=problem.BATCH_SIZE, verbose=0)
    assert calls and set(calls) == {"before"}
    assert model.optimizer.built
    inside = model.train_step
    model.train_step = lambda *args: calls.append("after") or inside(*args)
    with pytest.raises(ValueError, match="`train_step` must not be set after `compile` or `keras_shardopt.prepare`"):
        ks.prepare(model)


def test_another_class_that_is_set_keeps_what_was_mixed_in(scope):
    class Other(keras.Sequential):
        pass

    model = compiled(problem.model())
    model.__class__ = Other
    assert model.__class__ is Other and isinstance(model, PreparedModel)


@pytest.mark.neutral
def test_made_classes_live_as_long_as_their_models():
    class Short(keras.Model):
        pass

    model = Short()
    models.mix_in(model, models.Prepared)
    made, cls = weakref.ref(type(model)), weakref.ref(Short)
    assert issubclass(made(), Short)
    del model, Short
    gc.collect()
    gc.collect()  # what the first one leaves behind: keys of the table
    assert made() is None and cls() is None
    assert all(kind is not None for kind in models._made.values())


@pytest.mark.backends("jax")
def test_jax_traces_the_step_again_after_another_compile(scope):
    model = compiled(problem.model())
    model.fit(X, Y, batch_size=problem.BATCH_SIZE, verbose=0)
    held = model.train_function  # with it JAX would find the old trace
    model.compile(ks.CrossShard(problem.sgd_momentum()), lambda y, p: 0.0 * keras.ops.mean(p, axis=-1))
    before = model.get_weights()
    model.fit(X, Y, batch_size=problem.BATCH_SIZE, verbose=0)
    for mine, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, value)
    assert held is not model.train_function and not {"train_step", "test_step"} & vars(model).keys()


@pytest.mark.neutral
def test_a_callback_is_keras_again_for_a_model_that_is_not_prepared(monkeypatch):
    from keras_shardopt.fit import callbacks

    monkeypatch.setattr(callbacks, "_are_several", lambda: True)
    stops, model = keras.callbacks.TerminateOnNaN(), compiled(problem.model())
    keras.callbacks.CallbackList([stops], model=model)
    assert isinstance(stops, callbacks._StopsSilently) and stops.__class__ is keras.callbacks.TerminateOnNaN
    keras.callbacks.CallbackList([stops], model=functional())
    assert type(stops) is keras.callbacks.TerminateOnNaN


@pytest.mark.backends("torch")
@pytest.mark.parametrize(("auto_shard", "gather"), [(True, True), (True, False), (False, True)])
def test_ranks_predict_together_where_they_divide_batches_and_gather(auto_shard, gather, monkeypatch):
    from keras_shardopt.fit.torch.session import session_of

    model = problem.model()
    model.compile(ks.CrossShard("sgd"), "mse")
    session = session_of(ks.prepare(model, auto_shard=auto_shard, gather=gather))
    looks = []
    # Local SGD puts the mean of all ranks in place there.
    monkeypatch.setattr(session, "before_reading", lambda: looks.append(session))
    model.predict(X, verbose=0)
    assert looks == ([session] if auto_shard and gather else [])


class Reducing(keras.Model):
    """With its own pickles, and copies made by `type(self)`."""

    def __init__(self, units=2):
        super().__init__()
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)

    def twin(self):
        return type(self)(self.units)

    def __reduce__(self):
        return type(self), (self.units,)


@pytest.mark.exhaustive("tensorflow")
def test_what_a_prepared_model_makes_of_its_type_is_not_prepared(scope):
    model = compiled(Reducing())
    for other in (model.twin(), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other) is Reducing and not models.is_prepared(other) and other.units == 2
        assert other.predict(X, verbose=0).shape == (len(X), 2)


def test_a_class_that_registers_its_subclasses_registers_no_made_ones(scope):
    names = []

    class Registering(keras.Model):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            names.append(cls.__name__)

    class One(Registering):
        pass

    assert models.is_prepared(compiled(One())) and names == ["One"]


@pytest.mark.neutral
def test_callbacks_are_pickled_and_taken_out_with_methods_of_their_own():
    class Mixin(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            return "mixed", super().on_train_end(logs)

    callback = keras.callbacks.TerminateOnNaN()
    own = callback.on_train_end = lambda logs=None: "own"
    models.mix_in(callback, Mixin)
    assert callback.on_train_end() == ("mixed", "own")
    models.take_out(callback)
    assert callback.on_train_end is own and type(callback) is keras.callbacks.TerminateOnNaN
    plain = keras.callbacks.TerminateOnNaN()
    models.mix_in(plain, Mixin)
    assert type(pickle.loads(pickle.dumps(plain))) is keras.callbacks.TerminateOnNaN
    assert type(copy.deepcopy(plain)) is keras.callbacks.TerminateOnNaN


@pytest.mark.neutral
def test_a_model_with_a_method_of_its_own_can_be_freed():
    model = problem.model()
    model.save = types.MethodType(lambda self, path: path, model)
    models.mix_in(model, PreparedModel)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
