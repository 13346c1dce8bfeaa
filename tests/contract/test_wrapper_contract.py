"""What every wrapper promises to Keras, over all wrappers and all inner optimizers."""

import copy
import functools
import json
import pickle
import re
import warnings

import keras
import numpy as np
import pytest
from support import catalogue, problem
from support.suites import some

from keras_shardopt.wrapping.chain import base_optimizers, innermost

pairs = pytest.mark.parametrize(("wrapper", "inner"), some(catalogue.ALL_PAIRS, catalogue.DEFAULT_PAIRS))
long_pairs = pytest.mark.parametrize(("wrapper", "inner"), some(catalogue.LONG_PAIRS, catalogue.DEFAULT_PAIRS))
each_inner = pytest.mark.parametrize("inner", catalogue.INNERS)
WRAPPERS = some(catalogue.WRAPPERS, catalogue.ONE_OF_EACH_CLASS, "jax", "tensorflow")
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)
# Of what is the same code for all, and long where steps are compiled.
two_wrappers = pytest.mark.parametrize(
    "wrapper", some(catalogue.WRAPPERS, ["CrossShard", "GradientClipping"], "jax", "tensorflow")
)


def assert_equal(some, others):
    assert len(some) == len(others)
    for a, b in zip(some, others):
        np.testing.assert_array_equal(a, b)


def assert_trained_alike(wrapper, some, others):
    """Bit for bit, unless the wrapper reads gradients inside an update that XLA compiles as a whole."""
    if keras.config.backend() == "jax" and wrapper in catalogue.READS_GRADIENTS:
        # XLA then fuses the update another way, and rounds some products once less.
        assert len(some) == len(others)
        for a, b in zip(some, others):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    else:
        assert_equal(some, others)


@pairs
def test_one_replica_is_bit_identical_to_the_inner_optimizer(wrapper, inner):
    wrapped, plain = catalogue.wrapped_run(wrapper, inner), catalogue.plain_run(inner)
    assert_trained_alike(wrapper, wrapped.weights, plain.weights)
    assert_trained_alike(wrapper, catalogue.inner_state(wrapper, wrapped.state), plain.state)


@pairs
@pytest.mark.exhaustive("jax", "tensorflow")
def test_state_is_the_inner_state_once_and_in_its_order(wrapper, inner):
    model = problem.model()
    optimizer, plain = catalogue.make(wrapper, inner), catalogue.plain(inner)
    optimizer.build(model.trainable_variables)
    plain.build(model.trainable_variables)
    # Keras numbers the names that it makes up itself.
    described = [(re.sub(r"_\d+$", "", v.name), v.shape, v.dtype) for v in plain.variables]
    variables = catalogue.inner_state(wrapper, optimizer.variables)
    own = optimizer.variables[len(variables) :]
    assert [(re.sub(r"_\d+$", "", v.name), v.shape, v.dtype) for v in variables] == described
    assert [v.name for v in own] == catalogue.OWN_STATE.get(wrapper, [])
    assert len({v.path for v in optimizer.variables}) == len({v.path for v in plain.variables}) + len(own)
    weights = {id(v) for v in model.variables}
    assert not any(id(v) in weights for v in optimizer.variables)


@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_build_is_idempotent(wrapper):
    model = problem.model()
    optimizer = catalogue.make(wrapper, "Adafactor")
    optimizer.build(model.trainable_variables)
    before = [id(v) for v in optimizer.variables]
    optimizer.build(model.trainable_variables)
    assert [id(v) for v in optimizer.variables] == before


@pairs
@pytest.mark.exhaustive("jax", "tensorflow")
def test_config_round_trip(wrapper, inner):
    optimizer = catalogue.make(wrapper, inner)
    config = keras.optimizers.serialize(optimizer)
    assert "keras.src.backend" not in json.dumps(config)
    untouched = copy.deepcopy(config)
    restored = keras.optimizers.deserialize(config)
    assert config == untouched
    assert type(restored) is type(optimizer)
    assert restored.get_config() == optimizer.get_config()


@long_pairs
def test_weights_files_move_between_the_wrapper_and_the_inner_optimizer(wrapper, inner):
    def load(wrapper, optimizer, file):
        model = problem.model()
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
        with warnings.catch_warnings():
            # Keras stores the state of the optimizers inside LossScaleOptimizer and MultiOptimizer twice; the
            # second copy, which a wrapper does not write, is redundant.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(file)
        return model.get_weights(), catalogue.inner_state(wrapper, catalogue.state_of(optimizer))

    wrapped, plain = catalogue.wrapped_run(wrapper, inner), catalogue.plain_run(inner)
    weights, state = load(wrapper, catalogue.make(wrapper, inner), plain.weights_file)
    assert_equal(weights, plain.weights)
    assert_equal(state, plain.state)
    weights, state = load(None, catalogue.plain(inner), wrapped.weights_file)
    assert_equal(weights, wrapped.weights)
    assert_equal(state, catalogue.inner_state(wrapper, wrapped.state))


@long_pairs
def test_a_saved_model_continues_as_if_not_interrupted(wrapper, inner):
    loaded = keras.saving.load_model(catalogue.wrapped_run(wrapper, inner).model_file)
    assert type(loaded.optimizer) is type(catalogue.make(wrapper, inner))
    assert_equal(catalogue.state_of(loaded.optimizer), catalogue.wrapped_run(wrapper, inner).state)
    catalogue.trained(loaded.optimizer, steps=2, model=loaded)
    assert_trained_alike(wrapper, loaded.get_weights(), catalogue.plain_run(inner).continued_weights)


def loaded_and_traced(optimizer, run, build=False):
    """A model that goes on for two steps, which TensorFlow traces, from the files of a run."""
    model = problem.model()
    model.compile(optimizer, "mse")
    if build:
        optimizer.build(model.trainable_variables)  # Keras itself loads no state before
    model.load_weights(run.weights_file)
    x, y = problem.data(num_steps=2)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model


@functools.cache
def plain_loaded_and_traced():
    return loaded_and_traced(catalogue.plain("Adam"), catalogue.plain_run("Adam"), build=True).get_weights()


@two_wrappers
@pytest.mark.exhaustive("jax", "tensorflow")
def test_training_goes_on_from_a_state_loaded_before_building(wrapper):
    fresh = loaded_and_traced(catalogue.make(wrapper, "Adam"), catalogue.wrapped_run(wrapper, "Adam"))
    assert_trained_alike(wrapper, fresh.get_weights(), plain_loaded_and_traced())
    assert int(catalogue.state_of(fresh.optimizer)[0]) == 5


@pairs
def test_state_can_be_read_once_it_is_loaded(wrapper, inner):
    for run in (catalogue.wrapped_run(wrapper, inner), catalogue.plain_run(inner)):
        model = problem.model()
        model.compile(catalogue.make(wrapper, inner), "mse")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")  # the second copy, as above
            model.load_weights(run.weights_file)
        state = catalogue.state_of(model.optimizer)
        assert_equal(state[: len(run.state)], run.state)
        num_updates = 1 if inner == "Adam accumulating" else 3
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == num_updates


@pytest.mark.parametrize("wrapper", ["CrossShard", "LossScaling"])
def test_state_without_a_model_is_kept_until_the_optimizer_is_built(wrapper):
    run = catalogue.wrapped_run(wrapper, "Adam")
    optimizer = catalogue.make(wrapper, "Adam")
    optimizer.load_own_variables({str(i): value for i, value in enumerate(catalogue.inner_state(wrapper, run.state))})
    assert not optimizer.built
    optimizer.build(problem.model().trainable_variables)
    assert_equal(*(catalogue.inner_state(wrapper, state) for state in (catalogue.state_of(optimizer), run.state)))


def test_state_of_fewer_variables_is_kept_until_a_layer_is_frozen(tmp_path):
    def half_frozen(freeze):
        model = problem.model()
        model.compile(catalogue.make("CrossShard", "Adam"), "mse", **catalogue.COMPILE)
        model.layers[0].trainable = not freeze
        return model

    trained = half_frozen(True)
    x, y = problem.data(num_steps=1)
    trained.fit(x, y, verbose=0)
    trained.save_weights(tmp_path / "model.weights.h5")
    model = half_frozen(False)
    model.load_weights(tmp_path / "model.weights.h5")
    assert not model.optimizer.built
    model.layers[0].trainable = False
    model.fit(x, y, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2


@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_state_of_another_optimizer_is_an_error_before_training(wrapper):
    model = problem.model()
    model.compile(catalogue.make(wrapper, "Adam"), "mse")
    model.load_weights(catalogue.wrapped_run("CrossShard", "SGD").weights_file)  # which names its class
    with pytest.raises(ValueError, match="must have 10 arrays"):
        model.optimizer.build(model.trainable_variables)
    model = problem.model()
    model.compile(catalogue.make(wrapper, "Adam"), "mse")
    with pytest.raises(ValueError, match="must have 10 arrays"):
        model.load_weights(catalogue.plain_run("SGD").weights_file)  # as many arrays as an Adam that is not built


@each_wrapper
def test_state_that_does_not_fit_is_an_error_and_changes_nothing(wrapper):
    model = problem.model()
    model.compile(catalogue.make(wrapper, "Adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    before = catalogue.state_of(model.optimizer)
    store = {str(i): v + 1 for i, v in enumerate(before)}
    changed = list(store.values())
    with pytest.raises(ValueError, match="must have 10 arrays"):
        model.optimizer.load_own_variables({"0": before[0]})
    store = {key: store[key] for key in list(store)[:10]}
    with pytest.raises(ValueError, match="must have shape"):
        model.optimizer.load_own_variables({**store, "9": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="must have shape"):
        model.optimizer.set_weights([*changed[:-1], np.zeros((2, 2))])
    with pytest.raises(ValueError, match="must have 10 arrays"):
        model.load_weights(catalogue.plain_run("SGD momentum").weights_file)
    assert_equal(catalogue.state_of(model.optimizer), before)


@pairs
def test_set_weights_restores_all_of_the_state(wrapper, inner):
    state = catalogue.wrapped_run(wrapper, inner).state
    optimizer = catalogue.make(wrapper, inner)
    with pytest.raises(ValueError, match="built"):
        optimizer.set_weights(state)
    optimizer.build(problem.model().trainable_variables)
    optimizer.set_weights(state)
    assert_equal(catalogue.state_of(optimizer), state)


@pairs
def test_deepcopy_is_independent_and_alike(wrapper, inner):
    optimizer = catalogue.make(wrapper, inner)
    optimizer.build(problem.model().trainable_variables)
    copied = copy.deepcopy(optimizer)
    assert innermost(copied) is not innermost(optimizer)
    assert copied.get_config() == optimizer.get_config()
    if inner in ("SGD momentum", "LossScaleOptimizer", "MultiOptimizer"):
        again = copy.deepcopy(catalogue.make(wrapper, inner))
        assert_trained_alike(wrapper, catalogue.trained(again).get_weights(), catalogue.plain_run(inner).weights)


@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_a_compiled_model_can_be_pickled(wrapper):
    model = problem.model()
    model.compile(catalogue.make(wrapper, "Adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    restored = pickle.loads(pickle.dumps(model))
    assert type(restored.optimizer) is type(model.optimizer)
    assert_equal(catalogue.state_of(restored.optimizer), catalogue.state_of(model.optimizer))


@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_learning_rate_reaches_the_innermost_optimizer(wrapper):
    optimizer = catalogue.make(wrapper, "Adam")
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == pytest.approx(0.01)
    optimizer.learning_rate = 0.5
    assert float(keras.ops.convert_to_numpy(innermost(optimizer).learning_rate)) == 0.5
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        catalogue.make(wrapper, "Adam schedule").learning_rate = 0.5


@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_settings_answer_for_the_innermost_optimizer(wrapper):
    optimizer = catalogue.WRAPPERS[wrapper](
        keras.optimizers.AdamW(0.01, weight_decay=0.25, clipnorm=3.0, use_ema=True, ema_momentum=0.75)
    )
    assert (optimizer.weight_decay, optimizer.clipnorm) == (0.25, 3.0)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.75)
    assert optimizer.global_clipnorm is None and optimizer.gradient_accumulation_steps is None
    optimizer.weight_decay = 0.125
    assert innermost(optimizer).weight_decay == 0.125
    optimizer.build(problem.model().trainable_variables)
    assert optimizer._model_variables_moving_average is innermost(optimizer)._model_variables_moving_average
    assert not hasattr(optimizer, "optimizers")
    assert not hasattr(optimizer, "inner_optimizer")


@two_wrappers
@pytest.mark.exhaustive("jax", "tensorflow")
def test_excluding_from_weight_decay_reaches_the_inner_optimizer(wrapper):
    def excluding(optimizer):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return catalogue.trained(optimizer)

    wrapped = excluding(catalogue.make(wrapper, "AdamW"))
    plain = excluding(catalogue.plain("AdamW"))
    assert_trained_alike(wrapper, wrapped.get_weights(), plain.get_weights())


@each_wrapper
def test_apply_gradients_returns_the_update_counter_and_passes_none(wrapper):
    model = problem.model()
    optimizer = catalogue.make(wrapper, "SGD")
    variables = model.trainable_variables
    grads = [keras.ops.ones(v.shape) for v in variables]
    grads[1] = None
    before = model.get_weights()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        counter = optimizer.apply_gradients(zip(grads, variables))
    assert int(keras.ops.convert_to_numpy(counter)) == 1
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 1
    after = model.get_weights()
    np.testing.assert_allclose(after[0], before[0] - 0.1, rtol=1e-6)
    np.testing.assert_array_equal(after[1], before[1])


@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_bad_calls_are_refused_and_change_nothing(wrapper):
    model = problem.model()
    variables = model.trainable_variables
    optimizer = catalogue.make(wrapper, "SGD")
    grads = [keras.ops.ones(v.shape) for v in variables]
    with pytest.raises(ValueError, match="first `apply`"):
        optimizer.apply(grads)
    optimizer.build(variables)
    optimizer.apply([])
    with pytest.raises(ValueError, match="4 variables"):
        optimizer.apply(grads[:2])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply(grads[:1], [keras.Variable(np.zeros((5, 7), "float32"))])
    assert_equal(model.get_weights(), problem.start_weights())


@each_wrapper
def test_some_of_the_variables_can_be_updated(wrapper):
    def after_two_updates(optimizer):
        model = problem.model()
        optimizer.build(model.trainable_variables)
        kernel, bias = model.trainable_variables[:2]
        optimizer.apply([keras.ops.ones(bias.shape), keras.ops.ones(kernel.shape)], [bias, kernel])
        optimizer.apply([keras.ops.ones(bias.shape)], [bias])
        return model.get_weights()

    wrapped = after_two_updates(catalogue.make(wrapper, "SGD momentum"))
    assert_equal(wrapped, after_two_updates(catalogue.plain("SGD momentum")))


@two_wrappers
@pytest.mark.exhaustive("jax", "tensorflow")
def test_it_can_be_put_inside_keras_own_wrappers(wrapper):
    def in_multi(optimizer):
        rules = keras.optimizers.OptimizerMap(optimizer, {".*bias": keras.optimizers.SGD(0.02)})
        return keras.optimizers.MultiOptimizer(rules)

    if wrapper in catalogue.REFUSES_MULTI_OPTIMIZER:
        if hasattr(keras.optimizers, "MultiOptimizer"):
            with pytest.raises(ValueError, match="cannot be"):
                catalogue.trained(in_multi(catalogue.make(wrapper, "Adam")))
    elif hasattr(keras.optimizers, "MultiOptimizer"):
        model = catalogue.trained(in_multi(catalogue.make(wrapper, "Adam")))
        reference = catalogue.trained(in_multi(catalogue.plain("Adam")))
        assert_trained_alike(wrapper, model.get_weights(), reference.get_weights())
    if wrapper in catalogue.REFUSES_LOSS_SCALING:
        with pytest.raises(ValueError, match="`LossScaleOptimizer`"):
            keras.optimizers.LossScaleOptimizer(catalogue.make(wrapper, "Adam"))
    else:
        model = catalogue.trained(keras.optimizers.LossScaleOptimizer(catalogue.make(wrapper, "Adam")))
        reference = catalogue.trained(keras.optimizers.LossScaleOptimizer(catalogue.plain("Adam")))
        assert_trained_alike(wrapper, model.get_weights(), reference.get_weights())


@pytest.mark.parametrize("identifier", ["adam", {"class_name": "Adam", "config": {"learning_rate": 0.01}}])
@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_inner_optimizer_may_be_a_name_or_a_config(wrapper, identifier):
    optimizer = catalogue.WRAPPERS[wrapper](identifier)
    assert isinstance(innermost(optimizer), keras.optimizers.Adam)


@pytest.mark.parametrize(("wrong", "error"), [(None, TypeError), (3, TypeError), ("nonsense", ValueError)])
@each_wrapper
@pytest.mark.exhaustive("jax", "tensorflow")
def test_an_inner_that_is_no_optimizer_is_refused(wrapper, wrong, error):
    with pytest.raises(error, match="`(inner_optimizer|optimizer_or_optimizer_fn)` must be"):
        catalogue.WRAPPERS[wrapper](wrong)


@each_inner
@pytest.mark.exhaustive("jax", "tensorflow")
def test_leaves_are_the_optimizers_with_an_update_rule(inner):
    found = base_optimizers(catalogue.make("CrossShard of CrossShard", inner))
    expected = 2 if "Multi" in inner else 1
    assert len(found) == expected
    assert all(type(leaf).update_step is not keras.optimizers.Optimizer.update_step for leaf in found)


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    ("wrapper", "inner"),
    some(
        [
            *((w, "Adam") for w in catalogue.WRAPPERS),
            *(("CrossShard", i) for i in ("LossScaleOptimizer", "Adam accumulating")),
        ],
        lambda pair: pair[0] in ("CrossShard", "LossScaling"),
    ),
)
def test_stateless_apply_takes_arrays_or_variables_and_leaves_no_trace(wrapper, inner):
    import jax

    model = problem.model()
    variables = model.trainable_variables
    optimizer, plain = catalogue.make(wrapper, inner), catalogue.plain(inner)
    grads = [0.1 * keras.ops.ones(v.shape) for v in variables]
    for each in (optimizer, plain):
        with pytest.raises(ValueError, match="built"):
            each.stateless_apply([], grads, [v.value for v in variables])
        each.build(variables)
    before = catalogue.state_of(optimizer)
    weights = [v.value for v in variables]
    results = [
        jax.jit(optimizer.stateless_apply)([v.value for v in optimizer.variables], grads, weights),
        optimizer.stateless_apply(optimizer.variables, grads, weights),
    ]
    expected = plain.stateless_apply([v.value for v in plain.variables], grads, weights)
    for result in results:
        for got, want in zip(result, expected):
            for a, b in zip(got, want):
                np.testing.assert_allclose(a, b, rtol=1e-6)
    assert_equal(catalogue.state_of(optimizer), before)
    assert_equal(model.get_weights(), problem.start_weights())


@functools.cache
def trained_by_tensorflow(wrapper, **compile_arguments):
    """The weights after a few steps; without a wrapper those of the plain inner optimizer, once for all."""
    x, y = problem.data(num_steps=3)
    model = problem.model()
    optimizer = catalogue.plain("Adam") if wrapper is None else catalogue.make(wrapper, "Adam")
    model.compile(optimizer, "mse", **compile_arguments)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("compile_arguments", some([{"run_eagerly": False}, {"jit_compile": True}], 2))
@each_wrapper
def test_tensorflow_traced_and_compiled(wrapper, compile_arguments):
    assert_equal(trained_by_tensorflow(wrapper, **compile_arguments), trained_by_tensorflow(None, **compile_arguments))


@pytest.mark.backends("torch")
@pytest.mark.parametrize("wrapper", some(catalogue.WRAPPERS, ["CrossShard"]))
def test_torch_compile(wrapper):
    # Updates alone, and without PyTorch's generator of code, which takes most of the time. Whole steps of `fit` are
    # compiled in test_fused.py, test_skipped_updates_leave_nothing.py (those that check) and on ranks, and with that
    # generator in test_tower.py.
    import torch

    weights = {}
    for compiled in (False, True):
        random = np.random.default_rng(3)
        variables = [keras.Variable(w) for w in problem.start_weights()]
        optimizer = catalogue.make(wrapper, "SGD momentum") if compiled else catalogue.plain("SGD momentum")
        optimizer.build(variables)
        update = functools.partial(optimizer.apply, trainable_variables=variables)
        update = torch.compile(update, backend="eager") if compiled else update
        with torch.no_grad():
            for _ in range(3):
                update([torch.tensor(random.normal(size=v.shape).astype("float32")) for v in variables])
        weights[compiled] = [keras.ops.convert_to_numpy(v) for v in variables]
    torch._dynamo.reset()
    assert problem.relative_difference(weights[True], weights[False]) <= problem.TOLERANCE
