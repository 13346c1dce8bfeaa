"""Bad arguments of everything public: a TypeError or ValueError that names the argument, and nothing half-changed."""

import datetime
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import re

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

import keras_shardopt as ks
from keras_shardopt.callbacks import slow_ranks

schedule, sgd = lambda: ks.schedules.FixedLR(0.1), lambda: keras.optimizers.SGD(0.1)


def in_schedules(**arguments):
    return lambda: {name: value() if callable(value) else value for name, value in arguments.items()}


decaying = in_schedules(learning_rate=0.1, decay_steps=5)


@functools.cache
def a_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@functools.cache
def a_checkpoint():
    return ks.save_sharded(a_model(), "checkpoint")


def prints():
    pathlib.Path("prints").write_text('{"variables": []}\n{"update": 1, "fingerprints": []}\n')
    return "prints"


def a_report():
    seconds = dict.fromkeys((*slow_ranks.PHASES, *slow_ranks.PROBES), 1.0)
    line = {"step": 9, "num_steps": 9, "ranks": [seconds], "slow": None}
    pathlib.Path("steps.jsonl").write_text(json.dumps(line))
    return "steps.jsonl"


# For each public class and function, arguments that are right.
VALID = {
    "AutomaticLossScaler": dict,
    "CrossShard": lambda: {"inner_optimizer": sgd()},
    "GradientClipping": lambda: {"inner_optimizer": sgd(), "clip_gradients": 1.0},
    "GradientNoise": dict,
    "LARC": lambda: {"inner_optimizer": sgd(), "larc_eta": 0.1},
    "LocalSGD": lambda: {"every": 2},
    "LossScaling": lambda: {"inner_optimizer": sgd()},
    "MixedPrecision": lambda: {"inner_optimizer": sgd()},
    "NovoGrad": dict,
    "ShardedWeights": dict,
    "Stage": dict,
    "TorchSpeed": dict,
    "Tower": lambda: {"optimizer_or_optimizer_fn": sgd()},
    "VariableClipping": lambda: {"inner_optimizer": sgd(), "vars_to_clip_dims": {"a": [0]}, "max_norm": 1.0},
    "VirtualReplicas": lambda: {"number": 4},
    "bfloat16_scope": dict,
    "callbacks.BackupAndRestore": lambda: {"backup_dir": "nowhere"},
    "callbacks.CheckReplicas": dict,
    "callbacks.Fingerprints": lambda: {"filepath": "prints"},
    "callbacks.Heartbeat": dict,
    "callbacks.ModelCheckpoint": lambda: {"filepath": "model.keras"},
    "callbacks.ShardedCheckpoint": lambda: {"directory": "checkpoints"},
    "callbacks.StepReport": dict,
    "callbacks.StopOnNonFinite": dict,
    "callbacks.SyncReplicas": dict,
    "callbacks.Throughput": lambda: {"batch_size": 8},
    "callbacks.TrainingSummaries": lambda: {"log_dir": None},
    "callbacks.first_difference": lambda: {"a": prints(), "b": prints()},
    "build_optimizer": lambda: {"optimizer": "SGD"},
    "clip_by_global_norm": lambda: {"t_list": [keras.ops.ones(2)], "clip_norm": 1.0},
    "clip_gradients_by_norm": lambda: {
        "grads_and_vars": [(keras.ops.ones(2), keras.Variable([1.0, 2.0]))],
        "clip_gradients": 1.0,
    },
    "consolidate": lambda: {"path": a_checkpoint(), "filepath": "model.keras"},
    "data_parallel": dict,
    "get_regularization_loss": lambda: {"model": keras.layers.Dense(1)},
    "optimize_loss": lambda: {
        "loss": lambda x: x,
        "optimizer": "SGD",
        "optimizer_params": {"learning_rate": 0.1},
        "var_list": [keras.Variable([1.0, 2.0])],
    },
    "plot_step_report": lambda: {"path": a_report()},
    "prepare": lambda: {"model": None},  # there is no right one that could be made so often
    "replicate": lambda: {"step": lambda data: {}, "num_towers": 2},
    "load_sharded": lambda: {"model": a_model(), "path": a_checkpoint()},
    "save_model": lambda: {"model": a_model(), "filepath": "model.keras"},
    "save_sharded": lambda: {"model": a_model(), "directory": "checkpoints"},
    "save_weights": lambda: {"model": a_model(), "filepath": "model.weights.h5"},
    "schedules.CosineDecay": decaying,
    "schedules.ExpDecay": in_schedules(learning_rate=0.1, decay_steps=5, decay_rate=0.5, use_staircase_decay=False),
    "schedules.FixedLR": in_schedules(learning_rate=0.1),
    "schedules.InvPolyDecay": in_schedules(learning_rate=0.1, decay_steps=5, min_lr=0.01),
    "schedules.Join": in_schedules(schedules=lambda: [schedule(), schedule()], boundaries=lambda: [3]),
    "schedules.PerUpdate": in_schedules(schedule=schedule, gradient_accumulation_steps=2),
    "schedules.PiecewiseConstant": in_schedules(
        learning_rate=0.1, boundaries=lambda: [1, 2], decay_rates=lambda: [0.1, 0.2]
    ),
    "schedules.PolyDecay": decaying,
    "schedules.ScaledByReplicas": in_schedules(schedule=schedule, num_replicas=2),
    "schedules.TransformerPolicy": in_schedules(learning_rate=0.1, d_model=8, warmup_steps=4),
    "schedules.Warmup": in_schedules(schedule=schedule, warmup_steps=4),
    "schedules.get": in_schedules(identifier=0.1),
    "shard_data": lambda: {"x": np.ones((4, 2))},
    "synchronize_batch_normalization": lambda: {"model": keras.layers.BatchNormalization()},
}


class Strange:
    """Not what anything wants, and it cannot be compared."""

    def __repr__(self):
        return "Strange()"

    def __bool__(self):
        raise RuntimeError("neither")

    def __eq__(self, other):
        raise RuntimeError("no equal")

    __hash__ = None


numbers = [0, 1, -1, 2, 0.5, -0.5, 1.5, 1e-320, 10**30, 10**400, 1j, float("nan"), float("inf"), -float("inf")]
numpy = [np.float32("nan"), np.int64(-3), np.array([1.0]), np.zeros((0,)), np.array("x"), np.array(None)]
words = ["", "nonsense", "mean", "clip", "sgd", "1.0", "SGD", "FixedLR", b"x"]
lists = [
    [],
    [1],
    [None],
    ["a"],
    [float("nan")],
    [[0]],
    [[0, 1], [0, 2]],
    [[0], [0, 1]],
    [[True]],
    [[0.5]],
    [[-1]],
    [[[0]]],
]
dicts = [
    {},
    {"a": 1},
    {"a": [0]},
    {1: 2},
    {"a": ["b"]},
    {"class_name": "x"},
    {"class_name": 3, "config": {}},
    {"scale_max": "x"},
]
others = [None, True, False, (), (1, 2), set(), {1}, object(), Strange(), Strange, len, range(3), float]
others += [datetime.timedelta(seconds=-1), keras.optimizers.SGD, [Strange()], {"a": Strange()}]
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
bad = st.sampled_from([*numbers, *numpy, *words, *lists, *dicts, *others]) | nested


@pytest.fixture(autouse=True, scope="module")
def elsewhere(tmp_path_factory):
    """Some of the bad arguments are good names of files."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("names"))
    yield
    os.chdir(before)


def found(name):
    module, _, last = name.rpartition(".")
    return getattr(getattr(ks, module) if module else ks, last)


def state():
    """What of Keras a constructor must not change."""
    seed = keras.src.utils.rng_utils.get_random_seed()
    return keras.config.dtype_policy().name, keras.config.floatx(), seed, keras.distribution.distribution()


def shown(optimizer):
    kept = {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float, str, type(None)))}
    return kept, set(vars(optimizer)), optimizer.get_config(), [v.path for v in optimizer.variables]


@pytest.mark.filterwarnings("ignore:`")  # what can be told, but is doubtful
@pytest.mark.parametrize("name", VALID)
@hypothesis.settings(
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(data=st.data())
@pytest.mark.exhaustive("jax", "tensorflow")
def test_bad_arguments_are_named(name, data):
    function = found(name)
    parameters = [p for p, kind in inspect.signature(function).parameters.items() if kind.kind is not kind.VAR_KEYWORD]
    if not parameters:
        function()
        return
    arguments = VALID[name]()
    chosen = data.draw(st.lists(st.sampled_from(parameters), min_size=1, max_size=2, unique=True))
    for parameter in chosen:
        arguments[parameter] = data.draw(bad, label=parameter)
    inner = next((v for v in arguments.values() if isinstance(v, keras.optimizers.Optimizer)), None)
    before = state(), None if inner is None else shown(inner)
    try:
        function(**arguments)
    except (TypeError, ValueError, FileNotFoundError) as error:
        message = str(error)
        wrong = [*chosen, "model"] if name == "prepare" else chosen  # of which the table has no right one
        assert any(f"`{parameter}" in message for parameter in wrong), message
        assert "Received" in message, message
        assert before[1] is None or shown(inner) == before[1]
    assert state() == before[0]


def test_what_is_right_is_taken():
    left_out = {"prepare"} | (set() if importlib.util.find_spec("matplotlib") else {"plot_step_report"})
    for name, arguments in VALID.items():
        if name not in left_out:
            found(name)(**arguments())


def test_everything_public_is_in_the_table():
    public = [
        *ks.__all__,
        *[f"callbacks.{n}" for n in ks.callbacks.__all__],
        *[f"schedules.{n}" for n in ks.schedules.__all__],
    ]
    # What starts processes has a test of its own: tests/unit/launch/test_function.py.
    assert {name for name in public if callable(found(name))} - {"launch_processes"} == set(VALID)


def test_an_optimizer_that_was_refused_can_still_be_used():
    inner = sgd()
    with pytest.raises(ValueError, match="`reduction`"):
        ks.CrossShard(inner, reduction="average")
    with pytest.raises(ValueError, match="`max_norm`"):
        ks.VariableClipping(inner, {}, -1.0)
    weight = keras.Variable([1.0])
    ks.CrossShard(inner).apply([keras.ops.ones(1)], [weight])
    assert float(keras.ops.convert_to_numpy(weight)[0]) == pytest.approx(0.9)


@pytest.mark.neutral
def test_a_class_that_is_not_checked_is_found(monkeypatch):
    """The test itself: a constructor with a hole fails it."""

    class Hole:
        def __init__(self, rate=1.0):
            self.rate = 1 / rate

    monkeypatch.setattr(ks, "CrossShard", Hole)
    monkeypatch.setitem(VALID, "CrossShard", dict)
    with pytest.raises(BaseException):  # noqa: B017 - hypothesis' own kinds, some of them groups
        test_bad_arguments_are_named("CrossShard")


def test_names_in_messages_have_their_article():
    from keras_shardopt.arguments import with_article

    assert [with_article(value) for value in (1, 1.0, "uint8", object(), [])] == [
        "an int",
        "a float",
        "a uint8",
        "an object",
        "a list",
    ]
    # Nowhere else is an article put before a name that is not known when the message is written.
    package = pathlib.Path(ks.__file__).parent
    bare = re.compile(r"(?<![A-Za-z{`])an? \{")
    found = [
        f"{file.name}: {line.strip()}"
        for file in package.rglob("*.py")
        for line in file.read_text().splitlines()
        if bare.search(line)
    ]
    assert found == []
