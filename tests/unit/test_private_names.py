"""Every private name of Keras that the package touches exists and does what the package expects of it."""

import inspect
import pathlib

import keras
import numpy as np
import pytest
from support import problem


def built_adam():
    optimizer = keras.optimizers.Adam(use_ema=True)
    model = problem.model()
    optimizer.build(model.trainable_variables)
    return model, optimizer


def test_name_scope_stack_makes_variable_paths():
    from keras.src.backend.common import global_state

    with keras.name_scope("outer"):
        assert keras.Variable(1.0, name="v").path == "outer/v"
        stack = global_state.get_global_attribute("name_scope_stack")
        global_state.set_global_attribute("name_scope_stack", [])
        assert keras.Variable(1.0, name="v").path == "v"
        global_state.set_global_attribute("name_scope_stack", stack)


def test_the_states_of_a_stateful_rnn_are_made_and_counted():
    layer = keras.layers.LSTM(3, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(4, 2, 5)), layer])
    assert layer._expected_batch_size == 4 and not any(v is s for v in model.variables for s in layer.states)
    layer._create_state_variables(2)
    layer._expected_batch_size = 2
    assert [tuple(state.shape) for state in layer.states] == [(2, 3), (2, 3)]
    model(np.ones((2, 2, 5), "float32"))


def test_what_reading_a_variable_finds():
    variable = keras.Variable(np.arange(3.0))
    variable._value, variable._shape = keras.ops.ones(2), (2,)
    with keras.StatelessScope() as scope:
        assert tuple(variable.value.shape) == variable.shape == (2,)
        variable.assign(np.zeros(2))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(scope.get_current_value(variable)), [0, 0])


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


def test_the_arrays_of_an_optimizer_are_in_a_group_with_attributes(tmp_path):
    from keras.src.saving.saving_lib import H5IOStore

    store = H5IOStore(tmp_path / "a.h5", mode="w")
    store.make("optimizer")["0"] = np.ones(2)
    store._h5_entry_group["0"].attrs["slot"] = "x"
    store.close()
    store = H5IOStore(tmp_path / "a.h5", mode="r")
    assert store.get("optimizer")._h5_entry_group["0"].attrs["slot"] == "x"
    store.close()


def test_names_of_layers_are_those_of_their_classes():
    from keras.src.utils.naming import to_snake_case

    class Cross2DBlock(keras.layers.Dense):
        pass

    for kind in (keras.layers.Dense, keras.layers.Conv1D, keras.layers.GRU, Cross2DBlock):
        names = [kind(*[1] * (1 + (kind is keras.layers.Conv1D))).name for _ in range(2)]
        name = to_snake_case(kind.__name__)
        assert names[1].startswith(f"{name}_") and names[1].removeprefix(f"{name}_").isdigit(), names


def test_the_saver_goes_through_all_without_a_store():
    from keras.src.saving import saving_lib

    from keras_shardopt.checkpoint.gathering import NoStore

    model = problem.model()
    model.first, model.a = keras.optimizers.SGD(), [keras.optimizers.Adam()]
    model.compile("sgd", "mse")

    class Visited(list):
        add = list.append

    visited = Visited()
    saving_lib._save_state(model, NoStore(), None, "", visited)
    places = [visited.index(id(optimizer)) for optimizer in (model.a[0], model.first, model.optimizer)]
    assert places == sorted(places)


def test_the_saver_gives_variables_to_a_store_and_takes_arrays_from_one():
    from keras.src.saving import saving_lib

    class Stored(saving_lib.H5IOStore):
        def __init__(self, found):
            self.found, self.path = found, ""

        def __bool__(self):
            return True

        def make(self, path, metadata=None):
            self.path = path
            return self

        def get(self, path):
            return {key: value for (group, key), value in self.found.items() if group == path}

        def has_path(self, path):
            return True

        def __setitem__(self, key, value):
            self.found[self.path, key] = value

    model, found = problem.model(), {}
    saving_lib._save_state(model, Stored(found), None, "", set())
    assert [id(value) for value in found.values()] == [id(v) for v in model.weights]
    ones = {place: np.ones(variable.shape) for place, variable in found.items()}
    problems = {}
    collected = {"visited_saveables": set(), "failed_saveables": set(), "error_msgs": problems}
    saving_lib._load_state(model, Stored(ones), None, "", **collected)
    assert not problems
    assert all(np.all(weight == 1) for weight in model.get_weights())


def test_the_saver_writes_files_of_layers_into_a_folder():
    from keras.src.saving import saving_lib

    from keras_shardopt.checkpoint.gathering import NoStore

    class Words(keras.layers.Layer):
        def save_assets(self, folder):
            (pathlib.Path(folder) / "words.txt").write_text("a")

    store = saving_lib.DiskIOStore("assets", mode="w")
    saving_lib._save_state(keras.Sequential([keras.Input((1,)), Words()]), NoStore(), store, "", set())
    folder = pathlib.Path(store.working_dir)
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")] == ["layers/words/words.txt"]
    store.close()
    assert not folder.exists()


def test_how_keras_writes_a_checkpoint():
    callback = keras.callbacks.ModelCheckpoint
    assert list(inspect.signature(callback._save_model).parameters) == ["self", "epoch", "batch", "logs"]
    assert list(inspect.signature(callback._get_file_path).parameters) == ["self", "epoch", "batch", "logs"]
    wanted = ["self", "epoch", "batch", "logs", "filepath"]
    assert list(inspect.signature(callback._should_save_model).parameters) == wanted


@pytest.mark.skipif(not hasattr(keras.callbacks, "OrbaxCheckpoint"), reason="needs a Keras with OrbaxCheckpoint")
def test_how_keras_writes_with_orbax():
    orbax = keras.callbacks.OrbaxCheckpoint
    assert list(inspect.signature(orbax._save_checkpoint).parameters) == ["self", "step", "logs"]
    for hook in (orbax.on_train_batch_end, orbax.on_epoch_end):
        assert "self._save_checkpoint(" in inspect.getsource(hook)


def test_how_keras_backs_training_up():
    callback = keras.callbacks.BackupAndRestore("folder")
    assert list(inspect.signature(callback._save_model).parameters) == []
    assert callback._weights_path.endswith(".weights.h5")
    source = inspect.getsource(type(callback))
    assert "self.model.save_weights(filepath=self._weights_path, overwrite=True)" in source
    assert "self.model._initial_epoch = epoch" in source and "rmtree(self.backup_dir)" in source
    source = inspect.getsource(keras.callbacks.ModelCheckpoint._save_model)
    for method in ("save", "save_weights"):
        assert f"self.model.{method}(filepath, overwrite=True)" in source


def test_each_list_of_callbacks_is_given_its_model_at_the_start():
    class Model:
        history = None

    seen = []
    callback = keras.callbacks.LambdaCallback()
    callback.set_model = seen.append
    model = Model()
    callbacks = keras.callbacks.CallbackList([callback], add_history=True, add_progbar=True, model=model)
    assert seen == [model] and [type(each).__name__ for each in callbacks.callbacks[1:]] == ["History", "ProgbarLogger"]
    source = inspect.getsource(keras.callbacks.CallbackList.__init__)
    assert source.index("self._add_default_callbacks(") < source.index("self.set_model(model)")


def test_compile_from_a_file_goes_through_compile(tmp_path):
    assert "self.compile(**config)" in inspect.getsource(keras.Model.compile_from_config)


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
def test_the_arithmetic_of_torch_optimizers_is_one_method():
    import torch

    from keras_shardopt.kernels.torch import pieces

    made = {
        "Adam": {"amsgrad": True},
        "RMSprop": {"momentum": 0.5, "centered": True},
        "SGD": {"momentum": 0.5},
        **{name: {} for name in ("AdamW", "Adagrad", "Adadelta", "Adamax", "Nadam", "Lion", "Ftrl")},
    }
    assert len(made) == len(pieces._SLOTS)
    for name, arguments in made.items():
        optimizer = getattr(keras.optimizers, name)(**arguments)
        kind = type(optimizer)
        assert pieces.is_elementwise(optimizer)
        given = inspect.signature(getattr(kind, pieces.step_of(kind))).parameters
        assert list(given) == [
            "self",
            "grads",
            "trainable_variables" if name == "Ftrl" else "variables",
            "learning_rate",
        ]
        variables = problem.model().trainable_variables
        optimizer.build(variables)
        assert optimizer._get_variable_index(variables[2]) == 2
        for slot in pieces._SLOTS[kind]:
            if (name, slot) != ("AdamW", "_velocity_hats"):
                assert [tuple(v.shape) for v in getattr(optimizer, slot)] == [(5, 7), (7,), (7, 3), (3,)]
        # Nothing else of it is of variables, or is assigned.
        others = [v for v in optimizer.variables if len(v.shape)]
        assert len(others) == 4 * len(pieces.slot_names(optimizer)), name
        assert hasattr(optimizer, "_u_product") == (name == "Nadam")
        assert callable(optimizer._apply_weight_decay) and callable(optimizer._use_weight_decay)
    assert callable(torch._fused_adam_) and callable(torch._fused_adamw_) and callable(torch._fused_sgd_)


@pytest.mark.backends("torch")
def test_what_a_step_of_the_torch_trainer_does():
    import torch

    source = inspect.getsource(inspect.unwrap(keras.Model.train_step))
    names = [
        ".zero_grad()\n",
        "self.optimizer.scale_loss(loss)",
        "loss.backward()",
        ".value.grad",
        ".optimizer.apply(",
    ]
    places = [source.index(name) for name in names]
    assert places == sorted(places)
    assert source.count("backward(") == source.count("loss.backward()") + source.count("Call torch.Tensor.backward()")
    seen = []
    value = torch.ones((), requires_grad=True)
    loss = value * 2
    queue = torch.autograd.Variable._execution_engine.queue_callback
    loss.register_hook(lambda _: queue(lambda: seen.append(float(value.grad))))
    handle = value.register_post_accumulate_grad_hook(lambda _: seen.append(torch._C._current_graph_task_id() >= 0))
    assert list(value._post_accumulate_grad_hooks) == [handle.id]
    loss.backward()
    assert seen == [True, 2.0]
    assert torch._C._current_graph_task_id() == -1


def test_the_loss_weights_of_compile():
    model = problem.model()
    model.compile("sgd", loss="mse", loss_weights=[0.5])
    assert model._compile_loss._user_loss_weights == [0.5]


@pytest.mark.backends("torch")
def test_a_variable_of_torch_has_its_tensor_in_one_attribute():
    import torch

    class OfTensor(keras.Variable):
        def _initialize(self, value):
            self.made_of = value

        @property
        def _value(self):
            return tensor

    tensor = torch.ones(2)
    variable = OfTensor(tensor, trainable=False)
    assert variable.made_of is tensor and variable.value is tensor
    variable.assign([3, 4])
    assert tensor.tolist() == [3, 4] and keras.ops.convert_to_numpy(variable).tolist() == [3, 4]
    variable._path = "a/b"
    assert variable.path == "a/b"


@pytest.mark.backends("torch")
def test_fit_on_torch_has_its_batches_and_the_epoch_in_local_variables():
    from keras.src.backend.torch.trainer import TorchEpochIterator, TorchTrainer
    from keras.src.trainers.epoch_iterator import EpochIterator

    assert {"epoch_iterator", "epoch"} <= set(inspect.unwrap(TorchTrainer.fit).__code__.co_varnames)
    assert TorchEpochIterator._get_iterator is not EpochIterator._get_iterator


@pytest.mark.backends("torch")
def test_seed_state_on_torch():
    from keras.src.backend.common import global_state
    from keras.src.utils import rng_utils

    keras.utils.set_random_seed(1234)
    assert rng_utils.get_random_seed() == 1234
    keras.random.normal((2,))
    assert tuple(global_state.get_global_attribute("global_seed_generator").state.shape) == (2,)


def test_seeds_reach_the_tensorflow_of_one_name(monkeypatch):
    from types import SimpleNamespace

    from keras.src.utils import rng_utils

    seeds = []
    random = SimpleNamespace(set_seed=seeds.append)
    for available in (True, False):
        monkeypatch.setattr(rng_utils, "tf", SimpleNamespace(available=available, random=random))
        keras.utils.set_random_seed(1234)
    assert seeds == [1234]


@pytest.mark.backends("torch")
def test_random_numbers_on_torch_take_their_seeds_from_one_function(monkeypatch):
    from keras.src.backend.torch import random
    from keras.src.random import seed_generator

    assert random.draw_seed is not None and keras.src.backend.image.draw_seed is random.draw_seed
    drawn = []

    def draw_seed(seed):
        drawn.append(seed)
        first, second = seed_generator.draw_seed(seed)
        return int(first) + 2**32 + 1, int(second)  # whole numbers will do, of any size

    expected = keras.random.uniform((3,), seed=6)
    monkeypatch.setattr(random, "draw_seed", draw_seed)
    seeds = keras.random.SeedGenerator(4)
    for seed in (5, seeds, None):
        values = [keras.random.normal((3,), seed=seed), keras.random.gamma((3,), 1.0, seed=seed)]
        assert all(bool(keras.ops.all(keras.ops.isfinite(value))) for value in values)
    assert drawn == [5, 5, seeds, seeds, None, None]
    np.testing.assert_array_equal(keras.random.uniform((3,), seed=5).numpy(), expected.numpy())


@pytest.mark.backends("tensorflow")
def test_random_numbers_on_tensorflow_take_their_seeds_from_one_function(monkeypatch):
    from keras.src.backend.tensorflow import random

    assert keras.src.backend.image.draw_seed is random.draw_seed
    expected = keras.random.uniform((3,), seed=6)
    real = random.draw_seed
    monkeypatch.setattr(random, "draw_seed", lambda seed: real(seed) + [1, 0])
    np.testing.assert_array_equal(keras.random.uniform((3,), seed=5), expected)


@pytest.mark.backends("tensorflow")
def test_tensorflow_optimizers_reduce_in_one_method():
    method = keras.optimizers.SGD._all_reduce_sum_gradients
    assert list(inspect.signature(method).parameters) == ["self", "grads_and_vars"]


@pytest.mark.backends("tensorflow")
def test_the_strategy_of_an_optimizer_and_of_its_variables():
    import tensorflow as tf

    optimizer = keras.optimizers.SGD(0.25)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert optimizer._distribution_strategy is tf.distribute.get_strategy() is not strategy
    with strategy.scope():
        assert keras.optimizers.SGD()._distribution_strategy is strategy
        (rate,) = (variable for variable in optimizer.variables if variable.name == "learning_rate")
        rate._initialize(rate.numpy())
        assert strategy.extended.variable_created_in_scope(rate.value)
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == 0.25


def test_fit_keeps_its_batches_and_the_first_epoch_in_locals():
    from keras_shardopt.backends.keras_callers import running_local

    found = []

    def look(logs):
        adapter = running_local("fit", "epoch_iterator").data_adapter
        found.append((running_local("fit", "initial_epoch"), getattr(adapter, "_epoch", 1)))

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_train_begin=look)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=3, initial_epoch=2, callbacks=[callback], verbose=0)
    assert found == [(2, 1)]
    assert running_local("fit", "epoch_iterator") is None


@pytest.mark.backends("jax")
def test_layout_and_value_place_a_variable():
    devices = keras.distribution.list_devices()[:2]
    variable = keras.Variable(np.zeros(2))
    assert variable._layout is None
    assert variable._value is variable.value
    variable._shape, variable._ndim = (2, 2), 2
    assert variable.shape == (2, 2) and variable.ndim == 2
    variable = keras.Variable(np.zeros(2))
    variable._direct_assign(keras.ops.ones(2))
    assert list(np.asarray(variable.value)) == [1, 1]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    assert keras.Variable(np.zeros(2))._layout is not None


def test_scopes_know_the_scope_around_them():
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    variable = keras.Variable(1.0)
    assert get_stateless_scope() is None
    with keras.StatelessScope([(variable, keras.ops.convert_to_tensor(2.0))]) as outer:
        assert get_stateless_scope() is outer
        assert float(outer.get_current_value(variable)) == 2.0
        outer.add_update((variable, keras.ops.convert_to_tensor(3.0)))
        assert float(keras.ops.convert_to_numpy(variable.value)) == 3.0


def test_a_model_lists_all_layers_in_it():
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((2,)), inner, keras.layers.Dropout(0.5)])
    layers = list(model._flatten_layers())
    assert all(any(each is layer for each in layers) for layer in (model, inner, *inner.layers, *model.layers))


def test_each_model_runs_the_constructor_and_compile_of_the_trainer(monkeypatch):
    from keras_shardopt.backends.models import Trainer

    class Custom(keras.Model):
        def compile(self, optimizer):
            super().compile(optimizer, loss="mse")

    seen = []
    for name in ("__init__", "compile"):
        real = getattr(Trainer, name)
        monkeypatch.setattr(
            Trainer,
            name,
            lambda model, *args, _=(name, real), **more: (seen.append(_[0]), _[1](model, *args, **more))[1],
        )
    x = keras.Input((2,))
    models = [Custom(), keras.Sequential([keras.layers.Dense(1)]), keras.Model(x, keras.layers.Dense(1)(x))]
    assert seen.count("__init__") >= 3
    del seen[:]
    for model in models:
        model.compile("sgd")
    assert seen == ["compile"] * 3


@pytest.mark.backends("tensorflow")
def test_one_function_says_whether_keras_takes_the_logs_of_workers_apart():
    from keras.src.backend.tensorflow import trainer

    assert "if _collective_all_reduce_multi_worker(strategy):" in inspect.getsource(trainer.reduce_per_replica)
    assert list(inspect.signature(trainer._collective_all_reduce_multi_worker).parameters) == ["strategy"]
    assert inspect.getsource(trainer).count("_collective_all_reduce_multi_worker(") == 2


@pytest.mark.backends("tensorflow")
def test_what_the_iterator_of_workers_takes_from_that_of_keras():
    from keras.src.backend.tensorflow import trainer

    class Keeping:
        def experimental_distribute_dataset(self, dataset):
            return dataset

    kind = next(c for c in trainer.TFEpochIterator.__mro__ if c.__module__ == trainer.__name__)
    iterator = kind(Keeping(), np.ones((5, 2)), batch_size=2)
    assert iterator._get_iterator() is iterator._distributed_dataset
    assert iterator._num_batches == iterator.data_adapter.num_batches == 3
    fit, others = keras.Model.fit, (keras.Model.evaluate, keras.Model.predict)
    assert inspect.getsource(fit).count("class_weight=class_weight") == 1  # of the iterator that trains, and no other
    assert not any("class_weight" in inspect.getsource(other) for other in others)


@pytest.mark.backends("tensorflow")
def test_tensorflow_asks_one_method_for_the_devices_of_a_worker():
    from tensorflow.python.distribute import collective_all_reduce_strategy

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    names = list(inspect.signature(extended._initialize_local_devices).parameters)
    assert names == ["self", "cluster_resolver", "worker_device"]
    assert "self._initialize_local_devices(" in inspect.getsource(extended._initialize_multi_worker)


@pytest.mark.backends("tensorflow")
def test_keras_trainer_calls_reduce_from_its_module():
    from keras.src.backend.tensorflow import trainer

    from keras_shardopt.backends.tensorflow.processes import _KERAS_TRAINER

    assert trainer.__name__ == _KERAS_TRAINER
    assert "strategy.reduce(" in inspect.getsource(keras.Model._maybe_symbolic_build)
    assert "strategy.reduce(" in inspect.getsource(trainer.reduce_per_replica)


@pytest.mark.backends("jax")
def test_keras_predicts_in_its_trainer_module():
    from keras.src.backend.jax import trainer

    from keras_shardopt.backends.jax.processes import _KERAS_TRAINER

    assert trainer.__name__ == _KERAS_TRAINER
    assert inspect.unwrap(keras.Model.predict).__globals__ is vars(trainer)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    assert distribution.auto_shard_dataset is False


def test_how_keras_reduces_a_loss():
    from keras.src.losses import loss as keras_loss

    source = inspect.getsource(keras_loss.Loss.__call__)
    assert "return reduce_weighted_values(" in source  # by its name in the module, so that it can be replaced there
    given = inspect.signature(keras_loss.reduce_weighted_values).parameters
    assert list(given) == ["values", "sample_weight", "mask", "reduction", "dtype"]
    assert keras_loss.standardize_reduction("mean") == "mean"
    wide, narrow = keras_loss.squeeze_or_expand_to_same_rank(keras.ops.ones((4, 1)), keras.ops.ones((4,)))
    assert tuple(wide.shape) == tuple(narrow.shape) == (4, 1)


def test_which_losses_are_of_keras():
    from keras_shardopt.update.losses import _is_of_keras

    model = problem.model()
    for loss, is_of_keras in (("mse", True), (lambda y_true, y_pred: y_true - y_pred, False)):
        model.compile("sgd", loss)
        model._compile_loss.build(keras.ops.ones((4, 1)), keras.ops.ones((4, 1)))
        assert _is_of_keras(model._compile_loss._flat_losses[0].loss) == is_of_keras
    assert _is_of_keras(keras.losses.Huber())
    assert not _is_of_keras(keras.losses.Loss())
    assert not _is_of_keras(None)


def test_the_mean_losses_of_a_trainer():
    model = problem.model()
    model.compile("sgd", "mse")
    assert isinstance(model._loss_tracker, keras.metrics.Mean)
    assert model._compile_loss.metrics == []
    assert float(model._aggregate_additional_loss(keras.ops.ones((2,)))) == 2


def test_the_class_method_that_a_pickle_of_a_model_names():
    function, _ = problem.model().__reduce__()
    assert function == keras.Sequential._unpickle_model


def test_what_prepare_stands_in_for():
    from keras.src.trainers.epoch_iterator import EpochIterator

    model = problem.model()
    for name in ("_get_metrics_result_or_logs", "_flatten_metrics_in_order", "_symbolic_build"):
        assert callable(getattr(model, name))
    assert list(inspect.signature(model._symbolic_build).parameters) == ["iterator", "data_batch"]
    x, y = problem.data(num_steps=2)
    iterator = EpochIterator(x, y, batch_size=problem.BATCH_SIZE)
    begin, end, (batch,) = next(iter(iterator))
    assert (begin, end, len(batch)) == (0, 0, 2)
    assert (iterator._num_batches, iterator._steps_seen) == (2, 1)
    iterator.reset()
    assert iterator._steps_seen == 0


def test_arrays_draw_nothing_but_the_order_of_rows():
    """At the beginning of an epoch and at its end, so that nothing need be shared in between."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.epoch_iterator import EpochIterator

    from keras_shardopt.data import shared_draws

    def states():
        return {name: get() for name, (get, _) in shared_draws._GENERATORS.items()}

    class Torch(EpochIterator):
        def _get_iterator(self):
            torch = keras.config.backend() == "torch"
            return iter(self.data_adapter.get_torch_dataloader()) if torch else self.data_adapter.get_numpy_iterator()

    for shuffle in (True, False):
        iterator = Torch(np.zeros((13, 1)), batch_size=3, shuffle=shuffle)
        assert isinstance(iterator.data_adapter, ArrayDataAdapter)
        iterator.reset()
        iter(iterator)
        drawn = []
        for _ in range(5):
            before = states()
            next(iterator)
            drawn.append([name for name, state in states().items() if state != before[name]])
        assert drawn[1:] == [[]] * 4 and (shuffle or drawn[0] in ([], ["torch"])), drawn
        assert iterator._steps_seen >= iterator.data_adapter.num_batches


def test_a_thread_draws_the_order_of_batches_for_workers():
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.zeros((2, 1))

    assert PyDatasetAdapter(Batches(), shuffle=True).enqueuer is None
    enqueuer = PyDatasetAdapter(Batches(workers=2), shuffle=True).enqueuer
    assert enqueuer.shuffle and not enqueuer.is_running()
    enqueuer.indices = None
    enqueuer.start(*[0][: len(inspect.signature(enqueuer.start).parameters)])  # the epoch, from Keras 3.16 on
    assert enqueuer.is_running()
    enqueuer.run_thread.join(10)
    assert enqueuer.indices is not None
    enqueuer.stop()


@pytest.mark.backends("torch")
def test_names_in_the_torch_trainer():
    from keras.src.backend.torch import trainer
    from keras.src.utils.python_utils import pythonify_logs

    for method in (keras.Model.fit, keras.Model.evaluate):
        assert inspect.unwrap(method).__globals__ is vars(trainer)
        assert "TorchEpochIterator(" in inspect.getsource(inspect.unwrap(method))
        assert "self._get_metrics_result_or_logs(" in inspect.getsource(inspect.unwrap(method))
    assert pythonify_logs({"loss": keras.ops.ones(())}) == {"loss": 1.0}
    (kind,) = [kind for kind in keras.Model.__mro__ if kind.__module__ == trainer.__name__]
    if hasattr(kind, "_initialize_ddp"):  # from 3.16 on
        assert "DistributedDataParallel(" in inspect.getsource(inspect.unwrap(kind._initialize_ddp))
        assert "self._initialize_ddp()" in inspect.getsource(kind.make_train_function)
        assert callable(super(kind, keras.Model).get_metrics_result)


@pytest.mark.backends("jax")
def test_names_that_make_the_first_value_of_a_variable():
    from keras.src.backend.jax import Variable

    assert inspect.signature(Variable._initialize_with_initializer).parameters.keys() == {"self", "initializer"}
    assert "_initialize_with_initializer" in vars(Variable.__mro__[1])


@pytest.mark.backends("jax")
def test_names_in_the_jax_trainer():
    import jax
    from keras.src.backend.common import masking
    from keras.src.backend.jax import trainer
    from keras.src.trainers.data_adapters import data_adapter_utils

    from keras_shardopt.fit.jax import batches as jax_fit

    # Those of Keras, also where a test before has called `prepare`, which puts stand-ins in their places.
    assert jax_fit._distribute_in_keras.__globals__ is vars(trainer)
    given = list(inspect.signature(jax_fit._distribute_in_keras).parameters)
    since_3_16 = hasattr(data_adapter_utils, "PartialBatchList")
    assert given == ["data", "layouts", "is_super_batch"][: 3 if since_3_16 else 2]
    if since_3_16:
        assert "isinstance(batch, data_adapter_utils.PartialBatchList)" in inspect.getsource(trainer)
        given = inspect.signature(keras.Model._maybe_symbolic_build).parameters
        assert list(given) == ["self", "iterator", "data_batch"]
        model = problem.model()
        model.compile("sgd", "mse")
        assert any(model._get_unbuilt_components())
        model.train_on_batch(*problem.data(1))
        assert not any(model._get_unbuilt_components())
    assert list(inspect.signature(jax_fit._KerasEpochIterator._get_iterator).parameters) == ["self"]
    iterator = jax_fit._KerasEpochIterator(np.zeros((13, 1)), batch_size=8)
    adapter = iterator.data_adapter
    assert isinstance(adapter, jax_fit.ArrayDataAdapter) and iterator.steps_per_epoch is None
    assert (adapter.has_partial_batch, adapter.partial_batch_size) == (True, 5)
    assert (adapter.batch_size, adapter.num_batches) == (8, 2)
    for method in ("train_on_batch", "test_on_batch"):
        assert "_distribute_data(" in inspect.getsource(getattr(keras.Model, method))
    assert trainer.jit is jax.jit
    for method in ("make_train_function", "make_test_function"):
        source = inspect.getsource(getattr(keras.Model, method))
        if since_3_16:
            assert "self._make_function(" in source and " jit(" not in source
        else:
            assert source.count(" jit(") == 1
    if since_3_16:  # the step, the steps of one execution, and their outputs
        assert inspect.getsource(keras.Model._make_function).count("jit(") == 3
    assert "y=" in inspect.getsource(keras.Model.evaluate) and "y=" not in inspect.getsource(keras.Model.predict)
    given = inspect.signature(keras.Model.compute_loss_and_updates).parameters
    assert list(given)[1:7] == [
        "trainable_variables",
        "non_trainable_variables",
        "metrics_variables",
        "x",
        "y",
        "sample_weight",
    ]
    tensor = keras.ops.ones(2)
    masking.set_keras_mask(tensor, keras.ops.zeros(2))
    np.testing.assert_array_equal(masking.get_keras_mask(tensor), [0, 0])
    assert masking.get_keras_mask(keras.ops.ones(2)) is None
    given = inspect.signature(keras.Model._update_metrics_variables).parameters
    assert list(given)[1:] == ["metrics_variables", "unscaled_loss", "x", "y", "y_pred", "sample_weight"]


@pytest.mark.backends("tensorflow")
def test_the_format_of_a_trace_of_tensorflow():
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    plane = XSpace.FromString(XSpace().SerializeToString()).planes.add()
    line = plane.lines.add(name="tf_Compute", timestamp_ns=3)
    line.events.add(metadata_id=5, offset_ps=7, duration_ps=9)
    assert plane.event_metadata[5].name == plane.name == "" and (plane.id, line.id) == (0, 0)


@pytest.mark.backends("tensorflow")
def test_the_tensorflow_trainer_builds_from_a_batch():
    from keras.src.backend.tensorflow import trainer

    assert keras.Model._maybe_symbolic_build.__globals__ is vars(trainer)
    given = inspect.signature(keras.Model._maybe_symbolic_build).parameters
    assert list(given) == ["self", "iterator", "data_batch"]


@pytest.mark.backends("tensorflow")
def test_what_a_step_in_parts_takes_of_keras_and_of_tensorflow():
    import tensorflow as tf
    from tensorflow.python.eager import context

    model = problem.model()
    model.compile("sgd", "mse")
    arguments = ["x", "y", "y_pred", "sample_weight", "training"]
    assert list(inspect.signature(model._compute_loss).parameters) == arguments
    source = inspect.getsource(keras.Model.train_step)
    assert "self._compute_loss(" in source and "self._loss_tracker.update_state(" in source
    assert list(inspect.signature(model._symbolic_build).parameters) == ["iterator", "data_batch"]
    context = context.context()
    before = context._optimizer_experimental_options
    context._optimizer_experimental_options = {**before, "arithmetic_optimization": False}
    calls, context.function_call_options = context.function_call_options, None
    assert tf.config.optimizer.get_experimental_options()["arithmetic_optimization"] is False
    assert context.function_call_options is not calls
    context._optimizer_experimental_options, context.function_call_options = before, calls


def test_where_fit_begins():
    model = problem.model()
    model.compile("sgd", "mse")

    class Later(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model._initial_epoch = 2

    assert not hasattr(keras.Model, "_initial_epoch")
    history = model.fit(*problem.data(1), epochs=3, callbacks=[Later()], verbose=0)
    assert history.epoch == [2]


def test_the_global_seed():
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    keras.backend.clear_session(free_memory=False)
    assert global_state.get_global_attribute("global_seed_generator") is None
    found = seed_generator.global_seed_generator()
    assert global_state.get_global_attribute("global_seed_generator") is found
    before = np.array(keras.ops.convert_to_numpy(found.state))
    keras.random.normal((1,))
    assert not np.array_equal(keras.ops.convert_to_numpy(found.state), before)


@pytest.mark.backends("torch")
def test_torch_keeps_the_store_in_which_ranks_met(tmp_path):
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        store = distributed_c10d._get_default_store()
        store.set("key", "1")
        assert store.check(["key"]) and store.delete_key("key") and not store.check(["key"])
    finally:
        dist.destroy_process_group()


@pytest.mark.backends("jax")
def test_jax_keeps_the_client_of_a_job():
    from jax._src import distributed
    from jaxlib import _jax

    assert hasattr(distributed.global_state, "client")
    for name in ("key_value_set", "blocking_key_value_get", "key_value_delete"):
        assert hasattr(_jax.DistributedRuntimeClient, name)


def test_variables_left_out_of_decay_are_kept_by_key():
    model = problem.model()
    optimizer = keras.optimizers.AdamW()
    variables = model.trainable_variables
    optimizer.exclude_from_weight_decay(var_list=variables[:1])
    assert optimizer._exclude_from_weight_decay == {optimizer._var_key(variables[0])}
    optimizer.build(variables)
    assert [optimizer._use_weight_decay(v) for v in variables] == [False, True, True, True]


@pytest.mark.backends("tensorflow")
def test_where_keras_divides_a_loss_by_the_number_of_replicas():
    import tensorflow as tf
    from keras.src.backend.tensorflow import trainer
    from keras.src.losses import loss as keras_loss

    from keras_shardopt.backends.tensorflow import losses as tf_losses

    given = inspect.signature(tf_losses._reduce_in_keras).parameters
    assert list(given) == ["values", "sample_weight", "reduction"]
    assert list(inspect.signature(tf_losses._scale_in_keras).parameters) == ["value"]
    # By their names in the module, so that they can be replaced there; and in no other place.
    source = inspect.getsource(keras_loss)
    assert "= reduce_values(values, sample_weight, reduction)" in source
    assert source.count("scale_loss_for_distribution(loss)") == 1
    source = inspect.getsource(trainer)
    assert source.count("loss_module.scale_loss_for_distribution(") == 1
    assert isinstance(tf_losses._num_replicas, property)
    assert tf_losses._num_replicas.fget(tf.distribute.get_strategy()) == 1


@pytest.mark.backends("tensorflow")
def test_keras_divides_the_dataset_of_its_adapter_by_the_strategy():
    from keras.src.backend.tensorflow import trainer
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    kind = next(c for c in trainer.TFEpochIterator.__mro__ if c.__module__ == trainer.__name__)
    source = inspect.getsource(kind.__init__)
    assert next(iter(inspect.signature(kind.__init__).parameters)) == "self"
    assert list(inspect.signature(kind.__init__).parameters)[1] == "distribute_strategy"
    assert source.count("_distribute_strategy") == 2 and "experimental_distribute_dataset(" in source
    assert "self.data_adapter.get_tf_dataset()" in source and hasattr(ArrayDataAdapter, "get_tf_dataset")
    for method in (keras.Model.fit, keras.Model.evaluate, keras.Model.predict):
        assert "TFEpochIterator(" in inspect.getsource(inspect.unwrap(method))


@pytest.mark.backends("tensorflow")
def test_the_tensorflow_trainer_takes_batches_from_any_iterator():
    source = inspect.getsource(keras.Model._make_function)
    assert list(inspect.signature(keras.Model._make_function).parameters) == ["self", "step_function"]
    assert "range(self.steps_per_execution), iterator" in " ".join(source.split())
    assert "self._make_function(self.train_step)" in inspect.getsource(keras.Model.make_train_function)
    assert "self._make_function(self.test_step)" in inspect.getsource(keras.Model.make_test_function)


def test_a_layer_call_says_whether_it_trains():
    from keras.src.backend.common import global_state

    seen = []

    class Looks(keras.layers.Layer):
        def call(self, x):
            seen.append(global_state.get_global_attribute("current_call_ctx").training)
            return x

    for training in (True, False):
        Looks()(keras.ops.zeros((1, 1)), training=training)
    assert seen == [True, False] and global_state.get_global_attribute("current_call_ctx") is None


def test_layers_assign_statistics_and_seeds_by_the_public_method(monkeypatch):
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    assigned, real = [], keras.Variable.assign
    monkeypatch.setattr(keras.Variable, "assign", lambda self, value: (assigned.append(self), real(self, value))[1])
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)])
    model(keras.ops.ones((2, 2)), training=True)
    normalize, dropout = model.layers
    (seed,) = dropout._seed_generators
    expected = [normalize.moving_mean, normalize.moving_variance, seed.state]
    assert len(assigned) == 3 and all(any(v is other for other in assigned) for v in expected)
    assert [id(v) for v in normalize._non_trainable_variables] == [id(v) for v in expected[:2]]
    assert not in_stateless_scope()
    with keras.StatelessScope():
        assert in_stateless_scope()


def test_a_frozen_weight_is_not_among_those_that_were_made_as_not_trainable():
    layer = keras.layers.Dense(1, trainable=False)
    layer.build((None, 1))
    assert layer.non_trainable_variables and not layer._non_trainable_variables


def test_what_a_batch_normalization_takes_its_statistics_with(monkeypatch):
    from keras.src import backend
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope

    from keras_shardopt.fit import batch_normalization

    kind = keras.layers.BatchNormalization
    in_keras = inspect.getsource(inspect.unwrap(kind.__init__))
    assert 'if synchronized and backend.backend() != "tensorflow":' in in_keras and "self.synchronized =" in in_keras
    assert list(inspect.signature(batch_normalization._moments_in_keras).parameters) == ["self", "inputs", "mask"]
    source = inspect.getsource(kind.call)
    assert source.count("self._moments(inputs, mask)") == 1 and "if training and self.trainable:" in source
    layer = kind(axis=1)
    layer.build((None, 2, 3))
    assert list(layer._reduction_axes) == [0, 2]
    seen = []

    def moments(layer, inputs, mask):
        seen.append(in_symbolic_scope())
        return keras.ops.zeros(2), keras.ops.ones(2)

    monkeypatch.setattr(kind, "_moments", moments)
    backend.compute_output_spec(lambda x: layer(x, training=True), keras.KerasTensor((4, 2, 3)))
    assert seen and all(seen) and not in_symbolic_scope()


@pytest.mark.backends("jax")
def test_where_jax_takes_variables_for_training_steps():
    source = inspect.getsource(keras.Model.fit)
    assert "state = self._get_jax_state(" in source and "optimizer_variables=True" in source
    given = inspect.signature(keras.Model._get_jax_state).parameters
    assert list(given)[1:4] == ["trainable_variables", "non_trainable_variables", "optimizer_variables"]
    assert list(given)[4:] == ["metrics_variables", "purge_model_variables"]
    assert "purge_model_variables=True" in source


@pytest.mark.backends("jax")
def test_what_jax_takes_out_of_variables_is_put_back_in_the_order_in_which_it_is_taken():
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    before = {name: [np.array(v) for v in getattr(model, name, model.optimizer.variables)] for name in names}
    taken = model._get_jax_state(**dict.fromkeys(names, True), purge_model_variables=True)
    assert all(v._value is None for v in model.trainable_variables)
    model._jax_state, model._jax_state_synced = dict(zip(names, taken)), False
    model.jax_state_sync()
    for name in names:
        found = [np.array(v) for v in getattr(model, name, model.optimizer.variables)]
        assert len(found) == len(before[name]) and all(map(np.array_equal, found, before[name]))


def test_logs_of_an_epoch_come_before_validation():
    source = inspect.getsource(inspect.unwrap(keras.Model.fit))
    assert source.index("self._get_metrics_result_or_logs(") < source.index("self.evaluate(")
    optimizer = keras.optimizers.SGD()
    variable = keras.Variable(0.0)
    optimizer._track_variable(variable)
    assert any(each is variable for each in optimizer.variables)


@pytest.mark.backends("torch")
def test_what_a_variable_holds_unless_a_scope_stands_in_for_it():
    from keras.src.backend.common.stateless_scope import in_stateless_scope
    from keras.src.backend.common.variables import get_autocast_scope

    variable = keras.Variable(np.ones(2, "float32"))
    assert type(variable) is keras.Variable
    assert variable.value is variable._value
    assert not in_stateless_scope() and get_autocast_scope() is None
    with keras.StatelessScope([(variable, keras.ops.zeros(2))]):
        assert in_stateless_scope() and variable.value is not variable._value
    with keras.src.backend.common.variables.AutocastScope("float16"):
        assert get_autocast_scope() is not None and variable.value is not variable._value
