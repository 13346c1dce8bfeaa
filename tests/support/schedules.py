"""Every schedule that the tests run over: one of each policy, and compositions."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_shardopt import schedules

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
