"""Every wrapper and every kind of inner optimizer that the contract tests run over, and every schedule.

A new wrapper is one row in `WRAPPERS`, with arguments under which it must do nothing to a lone replica.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import pathlib
import shutil
import tempfile

import keras
import numpy as np
import pytest
from keras import ops
from keras import optimizers as o
from support.problem import BATCH_SIZE, data, keras_optimizers
from support.problem import model as problem_model

import keras_shardopt as ks
from keras_shardopt import schedules

# With the inner optimizer's own arithmetic; test_fused.py compares PyTorch's kernels with it.
CrossShard = functools.partial(ks.CrossShard, fused=False)

WRAPPERS = {
    "CrossShard": lambda inner: CrossShard(inner),
    "CrossShard sum": lambda inner: CrossShard(inner, reduction="sum"),
    "CrossShard clipping": lambda inner: CrossShard(inner, group_assignment=[[0]], replica_clipnorm=1e6),
    "CrossShard checking": lambda inner: CrossShard(inner, on_nonfinite="skip"),
    "CrossShard of CrossShard": lambda inner: CrossShard(CrossShard(inner)),
    "GradientClipping": lambda inner: ks.GradientClipping(inner, clip_gradients=1e6),
    "LARC": lambda inner: ks.LARC(inner, larc_eta=1e6),
    "LossScaling": lambda inner: ks.LossScaling(inner, "Backoff", {"scale_max": 1.0}),
    "LossScaling static": lambda inner: ks.LossScaling(inner, 1.0),
    "MixedPrecision": lambda inner: ks.MixedPrecision(inner),
    "Tower": lambda inner: ks.Tower(inner),
    "VariableClipping": lambda inner: ks.VariableClipping(inner, {".*": [0]}, max_norm=1e6),
}


# By class the first of them.
ONE_OF_EACH_CLASS = [
    *("CrossShard", "GradientClipping", "LARC", "LossScaling", "MixedPrecision", "Tower", "VariableClipping"),
]


# Those whose arguments here leave each gradient as it is, but not before they have looked at it.
READS_GRADIENTS = {"CrossShard clipping", "CrossShard checking", "GradientClipping", "LARC", "LossScaling"}
# Variables that a wrapper keeps besides those of the inner optimizer, at the end.
OWN_STATE = {
    "LossScaling": ["loss_scale", "good_steps", "skipped_steps"],
    "CrossShard checking": ["skipped_steps", "last_nonfinite"],
}
# Those that cannot be inside a LossScaleOptimizer: reductions, and what scales the loss already.
REFUSES_LOSS_SCALING = (
    *("CrossShard", "CrossShard sum", "CrossShard clipping", "CrossShard checking", "CrossShard of CrossShard"),
    *("LossScaling", "LossScaling static"),
)
REFUSES_MULTI_OPTIMIZER = ("LossScaling", "LossScaling static")


def _multi(**arguments):
    rules = o.OptimizerMap(o.Adam(0.01, **arguments), {".*bias": o.SGD(0.02, **arguments)})
    return o.MultiOptimizer(rules)


SIMPLE_INNERS = keras_optimizers()

COMPOSED_INNERS = {
    "Adam ema": lambda: o.Adam(0.01, use_ema=True, ema_momentum=0.5),
    "NovoGrad": lambda: ks.NovoGrad(0.01, weight_decay=0.1),
    "Adam accumulating": lambda: o.Adam(0.01, gradient_accumulation_steps=2),
    "Adam global_clipnorm": lambda: o.Adam(0.01, global_clipnorm=0.1),
    "Adam loss_scale_factor": lambda: o.Adam(0.01, loss_scale_factor=8.0),
    "Adam schedule": lambda: o.Adam(o.schedules.ExponentialDecay(0.01, 2, 0.5)),
    "LossScaleOptimizer": lambda: o.LossScaleOptimizer(o.Adam(0.01), initial_scale=4.0),
}
if hasattr(o, "MultiOptimizer"):
    COMPOSED_INNERS["MultiOptimizer"] = _multi
    COMPOSED_INNERS["LossScaleOptimizer of Multi"] = lambda: o.LossScaleOptimizer(_multi(), initial_scale=4.0)

INNERS = {**SIMPLE_INNERS, **COMPOSED_INNERS}


# One inner optimizer of each kind. The wrapper that everybody uses is trained with every inner optimizer. On PyTorch,
# which compiles nothing and so takes a tenth of the time, that goes down to files and continued training, and the
# wrapper with an update path of its own is trained with every inner optimizer too.
REPRESENTATIVE = [
    inner
    for inner in ("SGD momentum", "Adam", "Adafactor", "Adam ema", "LossScaleOptimizer", "MultiOptimizer")
    if inner in INNERS
]
IS_QUICK = keras.config.backend() == "torch"
WITH_EVERY_INNER = ("CrossShard", "LossScaling") if IS_QUICK else ("CrossShard",)
IN_FILES_WITH_EVERY_INNER = ("CrossShard",) if IS_QUICK else ()
if os.environ.get("ONE_OF_EACH_KIND"):
    WITH_EVERY_INNER = IN_FILES_WITH_EVERY_INNER = ()
ALL_PAIRS = [(w, i) for w in WRAPPERS for i in (INNERS if w in WITH_EVERY_INNER else REPRESENTATIVE)]
# What runs by default: the wrapper that everybody uses around the kinds that are composed, the others around one of
# each kind, another each time; on PyTorch, which compiles nothing, that wrapper and the one with an update path of its
# own around each kind.
COMPOSED = [inner for inner in ("Adam ema", "LossScaleOptimizer", "MultiOptimizer") if inner in INNERS]
IN_FULL = dict.fromkeys(["CrossShard", "LossScaling"], REPRESENTATIVE) if IS_QUICK else {"CrossShard": COMPOSED}
DEFAULT_PAIRS = [
    (w, i)
    for number, w in enumerate(WRAPPERS if IS_QUICK else ONE_OF_EACH_CLASS)
    for i in (IN_FULL.get(w) or [REPRESENTATIVE[number % len(REPRESENTATIVE)]])
]
LONG_PAIRS = [(w, i) for w in WRAPPERS for i in (INNERS if w in IN_FILES_WITH_EVERY_INNER else REPRESENTATIVE)]


# TensorFlow takes longer to trace a step than to run a few. Wrappers are traced, and compiled by XLA, in
# `test_tensorflow_traced_and_compiled`, and inner optimizers in test_equals_one_process_devices.py.
COMPILE = {"run_eagerly": True} if keras.config.backend() == "tensorflow" else {}


def make(wrapper, inner):
    """The wrapper called `wrapper` around a new inner optimizer called `inner`."""
    return WRAPPERS[wrapper](INNERS[inner]())


def plain(inner):
    """A new optimizer called `inner`, not wrapped."""
    return INNERS[inner]()


def trained(optimizer, steps=3, model=None):
    """The small problem's model after some steps with `optimizer`."""
    x, y = data(num_steps=steps)
    if model is None:
        model = problem_model()
        model.compile(optimizer, "mse", **COMPILE)
    # Before `fit`, because ScheduleFreeAdamW assigns in `build`, which TensorFlow would trace into every step.
    optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    return model


def state_of(optimizer):
    return [keras.ops.convert_to_numpy(v) for v in optimizer.variables]


def inner_state(wrapper, state):
    """The part of a wrapper's state that the plain inner optimizer would have."""
    return state[: len(state) - len(OWN_STATE.get(wrapper, []))]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run left behind."""

    weights: list
    state: list
    model_file: pathlib.Path
    weights_file: pathlib.Path
    continued_weights: list | None


@functools.cache
def plain_run(inner):
    """A run with the optimizer called `inner` alone, also continued after three steps."""
    return _run(plain(inner), continued=True)


@functools.cache
def wrapped_run(wrapper, inner):
    """The same run with a wrapper around it."""
    return _run(make(wrapper, inner), continued=False)


def _run(optimizer, continued):
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = trained(optimizer)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    weights, state = model.get_weights(), state_of(optimizer)
    after = None
    if continued:
        # A loaded one: on JAX, Keras cannot fit a second time with `use_ema`, where the weights and their averages
        # share buffers after the first.
        loaded = keras.saving.load_model(folder / "model.keras")
        after = trained(loaded.optimizer, steps=2, model=loaded).get_weights()
    return Run(weights, state, folder / "model.keras", folder / "model.weights.h5", after)


# -- schedules: one of each policy, and compositions ------------------------------------------------------------------

EXAMPLES = {
    "FixedLR": {"learning_rate": 0.3},
    "PiecewiseConstant": {"learning_rate": 0.8, "boundaries": [3, 5, 5, 9], "decay_rates": [0.5, 0.1, 0.2, 2.0]},
    "ExpDecay": {"learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.7, "use_staircase_decay": False},
    "PolyDecay": {"learning_rate": 0.1, "decay_steps": 7, "power": 1.5, "begin_decay_at": 2, "warmup_steps": 3},
    "CosineDecay": {"learning_rate": 0.1, "decay_steps": 7, "min_lr": 0.1, "begin_decay_at": 3, "warmup_steps": 3},
    "InvPolyDecay": {"learning_rate": 0.1, "decay_steps": 7, "min_lr": 0.01, "power": 0.8},
    "TransformerPolicy": {"learning_rate": 2.0, "d_model": 33, "warmup_steps": 4, "max_lr": 0.17},
}
SCHEDULES = {name: lambda name=name, a=a: getattr(schedules, name)(**a) for name, a in EXAMPLES.items()} | {
    "Warmup": lambda: schedules.Warmup(schedules.PolyDecay(0.1, 7), 3, start_factor=0.1),
    "Warmup at once": lambda: schedules.Warmup(schedules.PolyDecay(0.1, 7), 3, delay_schedule=False),
    "Join": lambda: schedules.Join([0.2, schedules.CosineDecay(0.1, 4), SCHEDULES["ExpDecay"]()], [3, 6]),
    "ScaledByReplicas": lambda: schedules.ScaledByReplicas(schedules.ExpDecay(0.1, 3, 0.5, True), 6, "sqrt", 4),
    "of Keras' own": lambda: schedules.Warmup(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), 2),
}
each_schedule = pytest.mark.parametrize("schedule", [pytest.param(make(), id=name) for name, make in SCHEDULES.items()])


def rates(schedule, steps):
    """The rate at each of `steps`, asked for one by one."""
    return np.array([float(ops.convert_to_numpy(schedule(step))) for step in steps])
