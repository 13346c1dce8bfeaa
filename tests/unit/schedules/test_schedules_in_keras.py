"""Schedules where Keras takes them: in optimizers, models, files and callbacks, alone and inside CrossShard."""

import json
import sys

import keras
import numpy as np
import pytest
from support import problem
from support.catalogue import SCHEDULES, each_schedule, rates
from support.suites import some

import keras_shardopt as ks

wrapped_or_not = pytest.mark.parametrize(
    "wrap", some([lambda inner: inner, ks.CrossShard], [ks.CrossShard]), ids=["alone", "CrossShard"]
)


@each_schedule
@wrapped_or_not
def test_update_s_uses_the_rate_of_step_s(schedule, wrap):
    weight = keras.Variable([0.0])
    optimizer = wrap(keras.optimizers.SGD(schedule))
    used = []
    for step in range(8):
        assert float(optimizer.learning_rate) == float(schedule(step))
        before = float(keras.ops.convert_to_numpy(weight)[0])
        optimizer.apply([keras.ops.convert_to_tensor([1.0])], [weight])
        used.append(before - float(keras.ops.convert_to_numpy(weight)[0]))
    assert int(optimizer.iterations) == 8
    np.testing.assert_allclose(used, rates(schedule, range(8)), 1e-5, 1e-7)  # the weight itself is rounded


@pytest.mark.parametrize(
    "name",
    ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lamb", "Lion", "Nadam", "RMSprop", "SGD"],
)
@pytest.mark.exhaustive("jax", "tensorflow")
def test_every_optimizer_takes_one_and_restores_it(name):
    schedule = SCHEDULES["CosineDecay"]()
    optimizer = getattr(keras.optimizers, name)(learning_rate=schedule)
    restored = type(optimizer).from_config(json.loads(json.dumps(optimizer.get_config())))
    assert type(restored._learning_rate) is ks.schedules.CosineDecay  # not Keras' class of the same name
    weight = keras.Variable([1.0])
    for _ in range(3):
        restored.apply([keras.ops.convert_to_tensor([1.0])], [weight])
    assert float(restored.learning_rate) == float(schedule(3))


@each_schedule
@pytest.mark.exhaustive("jax", "tensorflow")
def test_config_round_trip(schedule):
    config = json.loads(json.dumps(keras.optimizers.schedules.serialize(schedule)))
    restored = keras.optimizers.schedules.deserialize(config)
    assert type(restored) is type(schedule)
    assert config["registered_name"] == f"keras_shardopt>{type(schedule).__name__}"
    assert restored.get_config() == schedule.get_config()
    np.testing.assert_array_equal(rates(restored, range(12)), rates(schedule, range(12)))
    again = type(schedule).from_config(schedule.get_config())
    np.testing.assert_array_equal(rates(again, range(12)), rates(schedule, range(12)))


@pytest.mark.parametrize("name", some(["CosineDecay", "Join", "of Keras' own"], ["Join"], "jax", "tensorflow"))
@wrapped_or_not
def test_a_saved_model_goes_on_where_it_was(name, wrap, tmp_path):
    schedule = SCHEDULES[name]()
    x, y = problem.data(num_steps=3)
    model = problem.model()
    model.compile(wrap(keras.optimizers.Adam(schedule)), "mse")
    model.fit(x, y, batch_size=problem.BATCH_SIZE, epochs=1, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 3
    assert float(loaded.optimizer.learning_rate) == float(schedule(3))
    for each in (model, loaded):
        each.fit(x, y, batch_size=problem.BATCH_SIZE, epochs=1, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), loaded.get_weights()):
        np.testing.assert_array_equal(a, b)


@wrapped_or_not
@pytest.mark.exhaustive("jax", "tensorflow")
def test_reduce_lr_on_plateau_refuses_as_keras_does(wrap):
    x, y = problem.data(num_steps=1)
    messages = []
    for schedule in (ks.schedules.FixedLR(0.1), keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)):
        model = problem.model()
        model.compile(wrap(keras.optimizers.SGD(schedule)), "mse")
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e9)
        with pytest.raises(TypeError, match="learning rate is not settable") as raised:
            model.fit(x, y, batch_size=problem.BATCH_SIZE, epochs=3, verbose=0, callbacks=[plateau])
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_learning_rate_can_become_a_schedule():
    optimizer = ks.CrossShard(keras.optimizers.SGD(0.1))
    optimizer.learning_rate = ks.schedules.PiecewiseConstant(0.5, [0], [0.5])
    assert float(optimizer.learning_rate) == 0.5


class FakeAxes:
    def plot(self, steps, values, **line):
        self.steps, self.values, self.line = list(steps), list(values), line

    def set_xlabel(self, text):
        self.xlabel = text

    def set_ylabel(self, text):
        self.ylabel = text


@pytest.mark.neutral
def test_plot_draws_the_rates(monkeypatch):
    # matplotlib is optional, and here nothing is drawn with it.
    monkeypatch.setitem(sys.modules, "matplotlib", type(sys)("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", type(sys)("matplotlib.pyplot"))
    schedule = SCHEDULES["PolyDecay"]()
    ax = FakeAxes()
    assert schedule.plot(12, ax, color="red") is ax
    assert ax.steps == list(range(12))
    np.testing.assert_array_equal(ax.values, rates(schedule, range(12)))
    assert ax.line == {"label": "PolyDecay", "color": "red"}
    ax = schedule.plot(1_000_000, FakeAxes(), label="mine")
    assert (len(ax.steps), ax.steps[1], ax.steps[-1], ax.line["label"]) == (1000, 1000, 999_000, "mine")
    with pytest.raises(ValueError, match="`num_steps` must be a whole number, at least 1"):
        schedule.plot(0, ax)
    low = ks.schedules.TransformerPolicy(1.0, 8, 4, dtype="bfloat16").plot(3, FakeAxes())
    assert len(low.values) == 3


def test_keras_own_accumulation_counts_batches_as_the_docs_say():
    schedule = ks.schedules.PiecewiseConstant(0.5, [1], [0.5])
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    weight = keras.Variable([0.0])
    for _ in range(2):
        optimizer.apply([keras.ops.convert_to_tensor([1.0])], [weight])
    assert float(optimizer.learning_rate) == 0.25  # after one update, schedule(1) would be 0.5


@pytest.mark.parametrize(
    "wrap",
    some([lambda optimizer: optimizer, ks.CrossShard], [ks.CrossShard], "jax", "tensorflow"),
    ids=["alone", "CrossShard"],
)
@pytest.mark.parametrize(
    "schedule",
    [
        ks.schedules.PiecewiseConstant(1.0, [2], [0.5]),
        ks.schedules.PolyDecay(1.0, 4, begin_decay_at=2, warmup_steps=2),
        keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5),
    ],
    ids=["PiecewiseConstant", "PolyDecay", "Keras' ExponentialDecay"],
)
def test_per_update_counts_updates_where_keras_accumulates(schedule, wrap):
    per_update = ks.schedules.PerUpdate(schedule, 2)
    optimizer = wrap(keras.optimizers.SGD(per_update, gradient_accumulation_steps=2))
    weight = keras.Variable([0.0])
    for update in range(5):
        before = float(keras.ops.convert_to_numpy(weight)[0])
        for _ in range(2):
            optimizer.apply([keras.ops.convert_to_tensor([1.0])], [weight])
        moved = before - float(keras.ops.convert_to_numpy(weight)[0])
        assert moved == pytest.approx(float(keras.ops.convert_to_numpy(schedule(update))), abs=1e-6)


@pytest.mark.backends("torch")
def test_steps_that_are_python_ints_are_traced_by_torch_compile():
    import torch

    schedule = ks.schedules.PolyDecay(1.0, 10)
    compiled = torch.compile(schedule, backend="eager", fullgraph=True)
    for step in (0, 5, 10, 11):
        assert float(compiled(step)) == float(schedule(step))
    torch._dynamo.reset()


def test_one_schedule_can_be_joined_with_none():
    assert float(ks.schedules.Join([0.5], [])(7)) == 0.5


@pytest.mark.parametrize("name", ["PolyDecay", "poly_decay", "keras_shardopt>PolyDecay"])
def test_get_knows_the_registered_name(name):
    config = {"class_name": name, "config": {"learning_rate": 1.0, "decay_steps": 4}}
    assert isinstance(ks.schedules.get(config), ks.schedules.PolyDecay)


def test_a_step_that_no_integer_holds_is_refused():
    with pytest.raises(ValueError, match=r"less than 2\*\*63"):
        ks.schedules.PolyDecay(0.1, 10)(2**63)
