"""Who is calling, as the frames of the call stack say it."""

import functools
import threading

import keras
import pytest

from keras_shardopt.backends import keras_callers


class Step:
    def __init__(self, number=0):
        self.number = number

    def run(self, function):
        return function()

    def other(self, function):
        return function()


@pytest.mark.neutral
def test_the_module_and_the_function_of_a_caller():
    def asking():
        return keras_callers.caller_module(), keras_callers.caller_function()

    assert asking() == (__name__, "test_the_module_and_the_function_of_a_caller")
    assert Step().run(asking) == (__name__, "run")
    elsewhere = {"__name__": "somewhere.else", "asking": asking}
    assert eval("asking()", elsewhere)[0] == "somewhere.else"


@pytest.mark.neutral
def test_the_instance_of_a_caller():
    def asking():
        return keras_callers.caller_instance()

    def asking_further_out():
        def inside():
            return keras_callers.caller_instance(further_out=1)

        return inside()

    step = Step()
    assert step.run(asking) is step
    assert asking() is None
    assert step.run(asking_further_out) is step
    assert step.run(lambda: asking_further_out()) is None
    assert step.run(lambda: asking()) is None

    def asking_of(code):
        return lambda: keras_callers.caller_instance(code=code)

    assert step.run(asking_of(Step.run.__code__)) is step
    assert step.other(asking_of(Step.run.__code__)) is None


@pytest.mark.neutral
def test_the_innermost_instance_of_which_a_method_is_running():
    def asking(*args, **kwargs):
        return keras_callers.running_instance(Step, *args, **kwargs)

    one, two = Step(1), Step(2)
    assert asking() is None
    assert one.run(asking) is one
    assert one.run(lambda: two.other(asking)) is two
    assert one.run(lambda: two.other(lambda: asking("run"))) is one
    assert one.run(lambda: two.other(lambda: asking(condition=lambda step: step.number == 1))) is one
    assert one.run(lambda: asking("other")) is None
    assert one.run(lambda: keras_callers.running_instance((), "run")) is None
    assert one.run(lambda: keras_callers.running_instance((keras.Model, Step), "run")) is one


@pytest.mark.neutral
def test_whether_a_function_of_a_module_is_running():
    step = Step()
    assert step.run(lambda: keras_callers.is_running("run", __name__))
    assert not step.run(lambda: keras_callers.is_running("other", __name__))
    assert not step.run(lambda: keras_callers.is_running("run", "keras"))


class Asks(keras.callbacks.Callback):
    """Notes what each method of it that Keras calls finds out."""

    def __init__(self):
        super().__init__()
        self.lists, self.models = [], []

    def _ask(self):
        self.lists.append(keras_callers.running_instance(keras.callbacks.CallbackList))
        self.models.append(keras_callers.running_instance(keras.Model))

    def on_train_begin(self, logs=None):
        self._ask()

    def on_epoch_end(self, epoch, logs=None):
        self._ask()


def test_a_callback_finds_the_list_that_it_is_in_and_the_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before, callback = keras.callbacks.Callback(), Asks()
    model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), callbacks=[before, callback], verbose=0)
    assert all(found.callbacks[:2] == [before, callback] for found in callback.lists) and len(callback.lists) == 2
    assert all(found is model for found in callback.models)


def test_constructors_and_builds_of_keras_are_seen_from_inside():
    seen = {}

    class Inner(keras.optimizers.SGD):
        def __setattr__(self, name, value):
            if name == "loss_scale_factor":
                seen["__init__"] = keras_callers.running_instance(keras.optimizers.LossScaleOptimizer, "__init__")
            super().__setattr__(name, value)

        def build(self, variables):
            seen["build"] = [
                keras_callers.running_instance(kind, "build")
                for kind in (keras.optimizers.LossScaleOptimizer, getattr(keras.optimizers, "MultiOptimizer", ()))
            ]
            super().build(variables)

    scaling = keras.optimizers.LossScaleOptimizer(Inner())
    assert seen["__init__"] is scaling
    scaling.build([keras.Variable(1.0)])
    assert seen["build"] == [scaling, None]


@pytest.mark.backends("torch")
def test_the_step_of_keras_scales_the_loss_itself_and_fit_makes_the_iterator():
    from keras.src.backend.torch import trainer

    from keras_shardopt.backends.torch import overlap

    found, real = [], trainer.TorchEpochIterator

    class Optimizer(keras.optimizers.SGD):
        def scale_loss(self, loss):
            found.append(keras_callers.caller_instance(code=overlap._STEP))
            return super().scale_loss(loss)

    class Iterator(real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(keras_callers.caller_instance())

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Optimizer(), "mse", jit_compile=False)
    trainer.TorchEpochIterator = Iterator
    try:
        model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0)
    finally:
        trainer.TorchEpochIterator = real
    assert found == [model, model]


@pytest.mark.backends("jax")
def test_predict_asks_the_distribution():
    from keras_shardopt.backends.jax import processes

    asked = []

    class Distribution(keras.distribution.DataParallel):
        @property
        def auto_shard_dataset(self):
            asked.append(keras_callers.is_running("predict", processes._KERAS_TRAINER))
            return False

    x = keras.ops.ones((8, 2))
    distribution = Distribution(devices=keras.distribution.list_devices()[:1])
    distribution._is_multi_process = True  # as far as Keras asks further
    with distribution.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.predict(x, verbose=0)
        assert asked and all(asked)
        del asked[:]
        model.fit(x, keras.ops.ones((8, 1)), verbose=0)
        assert not any(asked)


def of_library(name, function):
    """Calls the function from code of that module."""
    return eval("function()", {"__name__": name, "function": function})


@pytest.mark.neutral
def test_a_warning_points_at_the_line_of_the_user():
    def warning():
        keras_callers.warn_user("words")

    through = functools.partial(
        of_library, "keras.src.trainers.trainer", functools.partial(of_library, "torch", warning)
    )
    with pytest.warns(UserWarning, match="words") as caught:
        through()
    # `warning` is the innermost function of this file.
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, warning.__code__.co_firstlineno + 1)]
    with pytest.warns(UserWarning) as caught:
        of_library(
            "keras_shardopt.fit", lambda: of_library("tensorflow", functools.partial(keras_callers.warn_user, "x"))
        )
    assert caught[0].filename == __file__


@pytest.mark.neutral
def test_a_warning_in_a_thread_of_a_framework_points_at_what_the_main_thread_waits_for():
    thread = threading.Thread(target=functools.partial(of_library, "tensorflow", lambda: None))
    thread.run = functools.partial(of_library, "tensorflow", functools.partial(keras_callers.warn_user, "words"))
    with pytest.warns(UserWarning) as caught:
        thread.start()
        thread.join()
    assert caught[0].filename == __file__
