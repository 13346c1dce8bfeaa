"""Every private name of Keras that the package touches exists and does what the package expects of it."""

import inspect

import keras
import numpy as np
import pytest
from support import problem


def built_adam():
    optimizer = keras.optimizers.Adam(use_ema=True)
    model = problem.model()
    optimizer.build(model.trainable_variables)
    return model, optimizer


def test_dot_not_track_scope_hides_variables():
    from keras.src.utils.tracking import DotNotTrackScope

    optimizer = keras.optimizers.SGD()
    variable = keras.Variable(1.0)
    with DotNotTrackScope():
        optimizer.hidden = variable
    assert not any(v is variable for v in optimizer.variables)
    optimizer.tracked = variable
    assert any(v is variable for v in optimizer.variables)


def test_name_scope_stack_makes_variable_paths():
    from keras.src.backend.common import global_state

    with keras.name_scope("outer"):
        assert keras.Variable(1.0, name="v").path == "outer/v"
        stack = global_state.get_global_attribute("name_scope_stack")
        global_state.set_global_attribute("name_scope_stack", [])
        assert keras.Variable(1.0, name="v").path == "v"
        global_state.set_global_attribute("name_scope_stack", stack)


def test_own_variables_can_be_untracked():
    optimizer = keras.optimizers.SGD()
    assert [v.name for v in optimizer._variables] == ["iteration", "learning_rate"]
    for variable in list(optimizer._variables):
        optimizer._untrack_variable(variable)
    assert optimizer.variables == []


def test_what_the_optimizer_was_built_on():
    model, optimizer = built_adam()
    variables = model.trainable_variables
    assert all(a is b for a, b in zip(optimizer._trainable_variables, variables))
    indices = [optimizer._trainable_variables_indices[optimizer._var_key(v)] for v in variables]
    assert indices == [0, 1, 2, 3]


def test_the_saver_stores_saveables_and_lists_their_kind():
    from keras.src.saving.keras_saveable import KerasSaveable

    optimizer = keras.optimizers.SGD()
    assert isinstance(optimizer, KerasSaveable)
    assert optimizer._obj_type() == "Optimizer"


def test_the_modules_that_ask_for_a_loss_scale_optimizer():
    from keras.src.trainers import trainer

    assert "isinstance(self.optimizer, LossScaleOptimizer)" in inspect.getsource(trainer)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        from keras.src.optimizers import multi_optimizer

        assert "isinstance(optimizer, LossScaleOptimizer)" in inspect.getsource(multi_optimizer)


def test_a_variable_can_be_made_part_of_the_state():
    optimizer = keras.optimizers.SGD()
    variable = keras.Variable(1.0)
    optimizer._track_variable(variable)
    assert optimizer.variables[-1] is variable


def test_iterations_and_averages():
    _, optimizer = built_adam()
    assert optimizer._iterations is optimizer.variables[0]
    assert [tuple(v.shape) for v in optimizer._model_variables_moving_average] == [(5, 7), (7,), (7, 3), (3,)]


@pytest.mark.backends("torch")
def test_torch_optimizers_live_in_a_private_module():
    adam = keras.optimizers.Adam()
    assert type(adam).__module__.startswith("keras.src.backend.torch.optimizers.")
    assert keras.saving.serialize_keras_object(adam)["module"].startswith("keras.src.backend.torch.optimizers.")


@pytest.mark.backends("torch")
def test_seed_state_on_torch():
    from keras.src.backend.common import global_state
    from keras.src.utils import rng_utils

    keras.utils.set_random_seed(1234)
    assert rng_utils.get_random_seed() == 1234
    keras.random.normal((2,))
    assert tuple(global_state.get_global_attribute("global_seed_generator").state.shape) == (2,)


@pytest.mark.backends("tensorflow")
def test_tensorflow_optimizers_reduce_in_one_method():
    method = keras.optimizers.SGD._all_reduce_sum_gradients
    assert list(inspect.signature(method).parameters) == ["self", "grads_and_vars"]


@pytest.mark.backends("jax")
def test_layout_and_value_place_a_variable():
    devices = keras.distribution.list_devices()[:2]
    variable = keras.Variable(np.zeros(2))
    assert variable._layout is None
    assert variable._value is variable.value
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    assert keras.Variable(np.zeros(2))._layout is not None
