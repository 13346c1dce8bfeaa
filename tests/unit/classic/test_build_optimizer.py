import keras
import numpy as np
import pytest
from keras import ops
from support import golden

import keras_shardopt as ks
from keras_shardopt.classic.tf1 import NAMES

ORIGINAL = golden.load("optimize_loss")


def chain(optimizer):
    """The names of the classes, from the outside in."""
    names = [type(optimizer).__name__]
    while hasattr(optimizer, "inner"):
        optimizer = optimizer.inner
        names.append(type(optimizer).__name__)
    return names


def test_the_order():
    larc = {"larc_eta": 0.02}
    built = ks.build_optimizer("SGD", larc_params=larc, loss_scaling="LogMax", cross_shard=True)
    assert chain(built) == ["CrossShard", "LossScaling", "LARC", "SGD"]
    built = ks.build_optimizer("Adam", clip_gradients=1.0, dtype="mixed", loss_scaling=128, iter_size=4)
    assert chain(built) == ["CrossShard", "MixedPrecision", "GradientClipping", "Adam"]
    assert built.gradient_accumulation_steps == 4
    assert float(built.loss_scale) == 128
    assert larc == {"larc_eta": 0.02}


def test_what_is_not_asked_for_is_left_out():
    assert chain(ks.build_optimizer("Adam")) == ["Adam"]
    assert chain(ks.build_optimizer("Adam", cross_shard=True)) == ["CrossShard", "Adam"]
    built = ks.build_optimizer("Adam", cross_shard={"replica_clipnorm": 1.0})
    assert built.replica_clipnorm == 1.0
    built = ks.build_optimizer("Adam", cross_shard={"sync_every": 5, "fused": False})  # in their old spelling
    assert (built.sync_every, built.fused) == (5, False)


@pytest.mark.parametrize("name", [*NAMES, *ORIGINAL["OPTIMIZER_CLS_NAMES"], "lion", "Nadam", "adafactor", "sgd"])
def test_names(name):
    params = {"Momentum": {"momentum": 0.5}, "AdamW": {"weight_decay": 0.1}}.get(name, {})
    built = ks.build_optimizer(name, params, 0.25)
    assert isinstance(built, keras.optimizers.Optimizer)
    assert float(ops.convert_to_numpy(built.learning_rate)) == 0.25


def test_both_spellings_of_parameters():
    ours = ks.build_optimizer("Adam", {"beta_1": 0.5, "beta_2": 0.6})
    theirs = ks.build_optimizer("Adam", {"beta1": 0.5, "beta2": 0.6})
    assert (ours.beta_1, ours.beta_2) == (theirs.beta_1, theirs.beta_2) == (0.5, 0.6)
    assert ks.build_optimizer("RMSProp", {"decay": 0.7}).rho == 0.7
    assert ks.build_optimizer("Momentum", {"momentum": 0.9, "use_nesterov": True}).nesterov
    with pytest.raises(TypeError, match="the same"):
        ks.build_optimizer("Adam", {"beta1": 0.5, "beta_1": 0.5})


def test_defaults_of_tensorflow_1_on_request():
    assert ks.build_optimizer("Adam").epsilon == 1e-7
    assert ks.build_optimizer("Adam", tf1_defaults=True).epsilon == 1e-8
    assert ks.build_optimizer("Adam", {"epsilon": 1e-3}, tf1_defaults=True).epsilon == 1e-3
    assert ks.build_optimizer("Adagrad", {"use_locking": True}, tf1_defaults=True).epsilon == 0
    assert ks.build_optimizer("RMSProp", tf1_defaults=True).epsilon == 1e-10
    with pytest.raises(TypeError, match="weight_decay"):
        ks.build_optimizer("AdamW", tf1_defaults=True)


def test_private_names_of_the_rules_of_tensorflow_1():
    weights = [keras.Variable([1.0]), keras.Variable([1.0, 2.0])]
    for name in ("Momentum", "RMSProp"):
        built = ks.build_optimizer(name, {"momentum": 0.5}, tf1_defaults=True)
        built.build(weights)
        assert [built._get_variable_index(v) for v in weights] == [0, 1]
        if name == "Momentum":
            assert [tuple(m.shape) for m in built.momentums] == [(1,), (2,)]
        else:
            assert all(np.all(ops.convert_to_numpy(v) == 1) for v in built._velocities)


@pytest.mark.parametrize("tf1_defaults", [False, True])
@pytest.mark.parametrize("name", ["Momentum", "RMSProp", "Adam"])
def test_it_is_saved_and_loaded(name, tf1_defaults):
    params = {"momentum": 0.5} if name != "Adam" else {}
    built = ks.build_optimizer(name, params, 0.1, clip_gradients=1.0, cross_shard=True, tf1_defaults=tf1_defaults)
    config = keras.saving.serialize_keras_object(built)
    loaded = keras.saving.deserialize_keras_object(config)
    assert chain(loaded) == chain(built)
    assert keras.saving.serialize_keras_object(loaded) == config


def by_halves(step):
    return 0.1 / ops.cast(step + 1, "float32")


def test_learning_rates():
    def rate(given):
        return float(ops.convert_to_numpy(ks.build_optimizer("SGD", {}, given).learning_rate))

    assert rate(0.5) == 0.5
    assert rate(ks.schedules.FixedLR(0.25)) == 0.25
    assert rate(lambda: 0.125) == 0.125
    built = ks.build_optimizer("SGD", {}, by_halves)
    weight = keras.Variable(0.0)
    for _ in range(2):
        built.apply([ops.ones(())], [weight])
    np.testing.assert_allclose(ops.convert_to_numpy(weight), -0.15, rtol=1e-6)
    with pytest.raises(TypeError, match="learning_rate_decay_fn"):
        ks.build_optimizer("SGD", {}, "fast")


def test_clipping_and_larc_exclude_each_other():
    for error in (ValueError, AttributeError):  # the second is the original's
        with pytest.raises(error, match="cannot be used together"):
            ks.build_optimizer("SGD", clip_gradients=1.0, larc_params={"larc_eta": 0.1})
    with pytest.raises(ValueError, match="larc_params=0.1"):  # what it is does not matter then
        ks.build_optimizer("SGD", clip_gradients=1.0, larc_params=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"optimizer": "NoSuch"}, ValueError, "optimizer='NoSuch'"),
        ({"optimizer": "Momentum"}, TypeError, "momentum"),
        ({"optimizer": 3}, TypeError, "`optimizer`"),
        ({"optimizer": int}, TypeError, "`optimizer`"),
        ({"optimizer": "SGD", "optimizer_params": 3}, TypeError, "optimizer_params=3"),
        ({"optimizer": "SGD", "optimizer_params": {"no_such": 3}}, TypeError, "no_such"),
        ({"optimizer_params": {"learning_rate": 1.0}, "learning_rate_decay_fn": 0.1}, TypeError, "once"),
        ({"optimizer": keras.optimizers.SGD(), "learning_rate_decay_fn": 0.1}, ValueError, "Received: the instance"),
        ({"dtype": "mixed", "loss_scaling": "dynamic"}, ValueError, "dynamic"),
        ({"loss_scaling": True}, TypeError, "loss_scaling"),
        ({"loss_scaling": -1.0}, ValueError, "loss_scaling"),
        ({"loss_scaling": "Backoff", "loss_scaling_params": {"no_such": 1}}, ValueError, "no_such"),
        ({"larc_params": {"larc_mode": "clip"}}, ValueError, "larc_eta"),
        ({"larc_params": {"larc_eta": 0.1, "no_such": 1}}, ValueError, "no_such"),
        ({"larc_params": 0.1}, TypeError, "larc_params"),
        ({"clip_gradients": -1.0}, ValueError, "clip_gradients"),
        ({"iter_size": 0}, ValueError, "iter_size=0"),
        ({"iter_size": 1.5}, TypeError, "iter_size=1.5"),
        ({"dtype": "int32"}, ValueError, "dtype"),
        ({"dtype": "no_such"}, ValueError, "dtype"),
        ({"cross_shard": "mean"}, TypeError, "cross_shard"),
        ({"cross_shard": {"old": 1}}, ValueError, "`cross_shard` may have only the keys"),
        ({"iter_size": 2, "cross_shard": {"gradient_accumulation_steps": 3}}, ValueError, "Pass only one"),
        (
            {"loss_scaling": ks.AutomaticLossScaler("Backoff"), "loss_scaling_params": {}},
            ValueError,
            "cannot be combined",
        ),
        ({"optimizer": "adam", "tf1_defaults": True}, ValueError, "requires one of the names"),
    ],
)
def test_mistakes(arguments, error, words):
    with pytest.raises(error, match=words):
        ks.build_optimizer(**{"optimizer": "SGD", **arguments})


def test_a_scale_may_be_any_number():
    assert float(ks.build_optimizer("SGD", loss_scaling=np.float32(8.0)).loss_scale) == 8.0


# What differs from the original, on purpose: names in any case are those of Keras; a scale may be an int; and who
# counts the micro-batches need not be told.
ALLOWED_HERE = ("bad/unknown_optimizer", "bad/int_loss_scaling_mixed", "bad/iter_size_without_skip_ph")


@pytest.mark.parametrize("id", [case["id"] for case in ORIGINAL["error_cases"]])
def test_the_originals_errors(id):
    config = next(case for case in ORIGINAL["error_cases"] if case["id"] == id)["config"]
    error = next(case for case in ORIGINAL["error_cases"] if case["id"] == id)["error"]["type"]
    rate = ks.schedules.get({"class_name": config.pop("lr_policy"), "config": config.pop("lr_policy_params")})
    weight = keras.Variable(1.0)

    def make():
        ks.optimize_loss(lambda x: weight * ops.sum(x), learning_rate_decay_fn=rate, var_list=[weight], **config)

    if id in ALLOWED_HERE:
        make()
    else:
        with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[error]):
            make()


def test_the_regularization_loss_is_float32():
    # The original's: float16 0.5 + float32 0.25 + float64 1.0.
    widest = "float32" if keras.config.backend() == "jax" else "float64"  # which JAX has on request only

    class Penalised(keras.layers.Layer):
        losses = (ops.cast(0.5, "float16"), ops.cast(0.25, "float32"), ops.cast(1.0, widest))

    total = ks.get_regularization_loss(Penalised())
    assert keras.backend.standardize_dtype(total.dtype) == "float32"
    assert float(total) == 1.75
    assert float(ks.get_regularization_loss(keras.layers.Dense(1))) == 0.0
