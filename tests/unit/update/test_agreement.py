"""What processes compare before they train together: whatever makes another training, and nothing else."""

import inspect
import warnings

import keras
import numpy as np
import pytest
from support import problem
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.classic import NovoGrad
from keras_shardopt.optimizers import AutomaticLossScaler
from keras_shardopt.update.agreement import described, sum_losses_of

SGD, layers = keras.optimizers.SGD, keras.layers


def differing(one, other):
    """The things in which two descriptions differ."""
    return [thing for thing in dict.fromkeys([*one, *other]) if one.get(thing) != other.get(thing)]


# -- optimizers ----------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_agreement")
def halved(grads, variables):
    return [None if g is None else g / 2 for g in grads]


# For each argument of each constructor: other arguments that it needs, and two values. None: it may differ.
COMMON = {"name": None}
INNER = ({}, SGD(0.1), SGD(0.2))
OF_KERAS = {
    "weight_decay": ({}, None, 0.1),
    "clipnorm": ({}, None, 1.0),
    "clipvalue": ({}, None, 1.0),
    "global_clipnorm": ({}, None, 1.0),
    "use_ema": ({}, False, True),
    "ema_momentum": ({"use_ema": True}, 0.9, 0.8),
    "ema_overwrite_frequency": ({"use_ema": True}, None, 2),
    "learning_rate": ({}, 0.1, 0.2),
    "loss_scale_factor": ({}, None, 2.0),
    "gradient_accumulation_steps": ({}, None, 2),
}
CASES = {
    ks.CrossShard: {
        **COMMON,
        "inner_optimizer": INNER,
        "reduction": ({}, "mean", "sum"),
        "group_assignment": ({}, None, [[0]]),
        "gradients": ({}, "auto", "local"),
        "gradient_accumulation_steps": ({}, None, 2),
        "replica_clipnorm": ({}, None, 1.0),
        "replica_transform": ({}, None, halved),
        "on_nonfinite": ({}, "ignore", "skip"),
        "shard_state": ({}, False, True),
        "compression": ({}, None, "float16"),
        "extensions": ({}, [ks.LocalSGD(5)], [ks.LocalSGD(5, warmup=3)]),
        "torch": ({}, None, ks.TorchSpeed(bucket_mib=5.0)),
        "stages": ({}, (), [ks.GradientNoise()]),
        "axis_name": ({}, "batch", "rows"),
    },
    ks.GradientClipping: {**COMMON, "inner_optimizer": INNER, "clip_gradients": ({}, 1.0, 2.0)},
    ks.LARC: {
        **COMMON,
        "inner_optimizer": INNER,
        "larc_eta": ({}, 0.1, 0.2),
        "larc_mode": ({}, "clip", "scale"),
        "min_update": ({}, 1e-7, 1e-6),
        "epsilon": ({}, 1e-7, 1e-6),
        "faithful": ({}, False, True),
    },
    ks.LossScaling: {
        **COMMON,
        "inner_optimizer": INNER,
        "loss_scaling": ({}, "Backoff", "LogMax"),
        "loss_scaling_params": ({"loss_scaling": "Backoff"}, None, {"step_window": 10}),
    },
    ks.MixedPrecision: {**COMMON, "inner_optimizer": INNER, "loss_scale": ({}, 2.0, 4.0)},
    ks.Tower: {**COMMON, "optimizer_or_optimizer_fn": INNER},
    ks.VariableClipping: {
        **COMMON,
        "inner_optimizer": INNER,
        "vars_to_clip_dims": ({}, {".*": [0]}, {".*": [1]}),
        "max_norm": ({}, 1.0, 2.0),
    },
    NovoGrad: {
        **COMMON,
        **OF_KERAS,
        "weight_decay": ({}, 0.0, 0.1),
        "beta1": ({}, 0.95, 0.9),
        "beta2": ({}, 0.98, 0.9),
        "epsilon": ({}, 1e-8, 1e-7),
        "grad_averaging": ({}, False, True),
        "faithful": ({}, False, True),
    },
    AutomaticLossScaler: {
        "algorithm": ({}, "Backoff", "LogMax"),
        "params": ({}, None, {"step_window": 10}),
        "faithful": ({}, False, True),
    },
}
NEEDED = {
    ks.GradientClipping: {"clip_gradients": 1.0},
    ks.LARC: {"larc_eta": 0.1},
    ks.VariableClipping: {"vars_to_clip_dims": {".*": [0]}, "max_norm": 1.0},
}
OPTIMIZERS = [
    kind for kind in map(vars(ks).get, ks.__all__) if inspect.isclass(kind) and issubclass(kind, keras.Optimizer)
]


def arguments_of(kind):
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [each.name for each in parameters if each.name != "self" and (kind, each.name) != (ks.CrossShard, "old")]


def test_every_argument_of_every_optimizer_has_a_case():
    assert set(OPTIMIZERS) <= set(CASES)
    for kind, cases in CASES.items():
        assert set(arguments_of(kind)) == set(cases), kind


def made(kind, argument, more, value):
    more = {**NEEDED.get(kind, {}), **more}
    given = {**more, argument: value}
    first = arguments_of(kind)[0]
    if first in ("inner_optimizer", "optimizer_or_optimizer_fn"):
        given = {first: SGD(0.1), **given}
    if kind is AutomaticLossScaler:
        return ks.LossScaling(SGD(0.1), kind(**given))
    return kind(**given)


@pytest.mark.neutral
@pytest.mark.parametrize(
    ("kind", "argument"), [(k, a) for k, cases in CASES.items() for a in cases], ids=lambda v: getattr(v, "__name__", v)
)
def test_two_values_of_an_argument_differ(kind, argument):
    model = problem.model()
    found = []
    case = CASES[kind][argument]
    more, *values = ({}, "one", "other") if case is None else case
    for value in values:
        outer = made(kind, argument, more, value)
        found.append(described(outer, model.trainable_variables))
    if case is None:
        assert differing(*found) == []
    elif argument in ("inner_optimizer", "optimizer_or_optimizer_fn"):
        assert differing(*found) == ["`learning_rate` of optimizer 1 (SGD)"]
    else:
        (thing,) = differing(*found)
        assert "of optimizer 0" in thing or thing == "class of optimizer 0"


# -- models --------------------------------------------------------------------------------------------------------


def model_of(*more, loss="mse", loss_weights=None, dense=None, before=0):
    for _ in range(before):
        layers.Dense(1)  # which moves Keras' counters
    inputs = keras.Input((4, 4, 3))
    outputs = layers.Conv2D(2, 2, **(dense or {}))(inputs)
    for layer in more:
        outputs = layer(outputs)
    first, second = layers.Dense(1)(layers.Flatten()(outputs)), layers.Dense(1)(layers.Flatten()(outputs))
    model = keras.Model(inputs, [first, second])
    model.compile(ks.CrossShard(SGD(0.1)), loss=[loss, "mse"], loss_weights=loss_weights)
    return model


class Quiet(layers.Layer):
    """Cannot say what it was made of."""

    def get_config(self):
        raise NotImplementedError("no config")

    def call(self, inputs):
        return inputs


def wrapped(**arguments):
    return layers.TimeDistributed(layers.Dense(2, **arguments))


MODELS = {
    "loss": ({}, {"loss": "mae"}, "`loss`", "'mae'"),
    "reduction": (
        {"loss": keras.losses.MeanSquaredError()},
        {"loss": keras.losses.MeanSquaredError(reduction="sum")},
        "`loss`",
        "'reduction': 'sum'",
    ),
    "loss_weights": ({}, {"loss_weights": [1.0, 0.5]}, "`loss_weights`", "[1.0, 0.5]"),
    "activation": ({}, {"dense": {"activation": "relu"}}, "`activation` of layer 1, `conv2d`", "'relu'"),
    "regularizer": ({}, {"dense": {"kernel_regularizer": "l2"}}, "`kernel_regularizer` of layer 1, `conv2d`", "L2"),
    "dtype": ({}, {"dense": {"dtype": "mixed_bfloat16"}}, "`dtype` of layer 1, `conv2d`", "mixed_bfloat16"),
    "rate": ([layers.Dropout(0.1)], [layers.Dropout(0.2)], "`rate` of layer 2, `dropout`", "0.2"),
    "momentum": (
        [layers.BatchNormalization()],
        [layers.BatchNormalization(momentum=0.5)],
        "`momentum` of layer 2, `batch_normalization`",
        "0.5",
    ),
    "inner layer": ([wrapped()], [wrapped(activation="relu")], "`layer` of layer 2, `time_distributed`", "relu"),
    "another layer": ([layers.Dropout(0.1)], [layers.GaussianDropout(0.1)], "layer 2", "GaussianDropout"),
}


def description(given):
    model = model_of(*given) if isinstance(given, list) else model_of(**given)
    return described(model.optimizer, model.trainable_variables)


@pytest.mark.parametrize("name", some(MODELS, ["regularizer"], "jax", "tensorflow"))
@pytest.mark.exhaustive("jax", "tensorflow")
def test_what_differs_in_models_is_named(name):
    one, other, thing, value = MODELS[name]
    found = [description(one), description(other)]
    assert thing in differing(*found), differing(*found)
    assert value in found[1][thing] and value not in found[0].get(thing, "")
    assert all(len(text) < 200 for text in found[1].values())


@pytest.mark.parametrize(
    ("setting", "value"), [("dtype_policy", "mixed_bfloat16"), ("image_data_format", "channels_first")]
)
def test_settings_of_keras_are_compared(setting, value):
    one = described(SGD(0.1), [])
    before, change = getattr(keras.config, setting)(), getattr(keras.config, f"set_{setting}")
    change(value)
    try:
        other = described(SGD(0.1), [])
    finally:
        change(before)
    assert differing(one, other) == [f"`keras.config.{setting}()`"]


@pytest.mark.exhaustive("jax", "tensorflow")
def test_right_programs_agree():
    """Other counters, seeds, initial weights, and layers that cannot say what they are."""

    def given(seed, **more):
        model = model_of(
            layers.Dropout(0.1, seed=seed),
            wrapped(kernel_initializer=keras.initializers.RandomNormal(seed=seed)),
            Quiet(),
            loss=keras.losses.Huber(name=f"loss_{seed}"),
            **more,
        )
        return model, described(model.optimizer, model.trainable_variables)

    model, one = given(1)
    larger = keras.Model(
        model.inputs, layers.Dense(1)(model(model.inputs)[0])
    )  # of one process only, say to look at something
    assert differing(one, described(model.optimizer, model.trainable_variables)) == []
    assert differing(one, given(2, before=3)[1]) == []
    del larger
    assert any("Quiet" in value for value in one.values())


def test_models_that_are_not_compiled_with_the_optimizer_do_not_count():
    """One process may have made some for itself, or may hold one a little longer."""

    def found(rate):
        model = keras.Sequential([keras.Input((3,)), layers.Dropout(rate), layers.Dense(2)])
        return described(ks.CrossShard(SGD(0.1)), model.trainable_variables), model

    assert differing(found(0.1)[0], found(0.2)[0]) == []


class Holding(layers.Layer):
    """A layer of a user's, with anything at all in its config."""

    def __init__(self, thing):
        super().__init__()
        self.thing = thing

    def get_config(self):
        return {"thing": self.thing}

    def call(self, inputs):
        return inputs


@pytest.mark.exhaustive("jax", "tensorflow")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("<function relu at 0x7f10>", "<function relu at 0x7f20>"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # made of a set of strings, which each process has in its own order
        (keras.ops.ones((3,)), keras.ops.ones((3,))),
    ],
)
def test_things_that_each_process_writes_in_its_own_way_agree(one, other):
    one, other, another = (description([Holding(thing)]) for thing in (one, other, "other"))
    assert differing(one, other) == []
    assert differing(one, another) == ["`thing` of layer 2, `holding`"]


@pytest.mark.exhaustive("jax", "tensorflow")
def test_arrays_are_compared_to_the_last_element():
    one, same, other = np.zeros((100, 100)), np.zeros((100, 100)), np.zeros((100, 100))
    other[50, 50] = 1  # which `repr` does not show
    one, same, other = (description([Holding(keras.ops.convert_to_tensor(thing))]) for thing in (one, same, other))
    assert differing(one, same) == [] and differing(one, other) == ["`thing` of layer 2, `holding`"]


def test_looking_at_functions_warns_of_nothing():
    """Keras warns when it makes a config of a lambda, which is right where one is saved."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        description([layers.Dense(2, activation=lambda x: x), layers.Lambda(lambda x: x)])
    assert not [str(w.message) for w in caught if "lambda" in str(w.message)]


@pytest.mark.backends("torch")
def test_modules_of_pytorch_are_compared_without_their_weights():
    """Ranks start with rank 0's, and each has them on its own device."""
    torch = pytest.importorskip("torch", reason="about PyTorch, which is not installed")

    def found(*arguments):
        module = torch.nn.Linear(2, *arguments)
        return description([layers.TorchModuleWrapper(module, output_shape=(None, 3, 3, 3))])

    assert differing(found(3), found(3)) == []
    assert "`module` of layer 2, `torch_module_wrapper`" in differing(found(3), found(3, False))


@pytest.mark.parametrize("nested", [lambda mean, total: [mean, total], lambda mean, total: {"a": mean, "b": total}])
def test_a_sum_is_found_among_several_losses(nested):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in "ab"})
    mean, total = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError(reduction="sum")
    optimizer = ks.CrossShard(SGD(0.1))
    model.compile(optimizer, nested(mean, total))
    assert sum_losses_of(optimizer, model.trainable_variables) == [total]
    model.compile(optimizer, nested(mean, mean))
    assert sum_losses_of(optimizer, model.trainable_variables) == []
