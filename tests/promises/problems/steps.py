"""The small problem trained by the steps that `optimize_loss` makes, on any number of replicas."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops
from support import problem

import keras_shardopt as ks
from keras_shardopt.classic.summaries.tags import SUMMARIES

# Losses that come divided by the number of replicas on TensorFlow, and such that do not.
CONFIGS = {
    "keras.losses": {"loss": "object"},
    "a custom mean": {"loss": "mean", "jit_compile": None},
    "told when": {"loss": "object", "iter_size": 4, "skip_update_ph": True},
    "everything": {
        "loss": "mean",
        "iter_size": 2,
        "clip_gradients": 0.5,
        "loss_scaling": "Backoff",
        "summaries": [name for name in SUMMARIES if name != "gradient_noise_scale"],
        "every": 5,
        "penalty": 0.01,
    },
}
# Not synchronised, which is refused on several replicas.
APART = "apart"
ON_REPLICAS = [*CONFIGS, APART]


def on_replicas(replicas, config):
    """The largest difference between replicas, what they came to, the losses and what was seen; or the refusal."""
    if config == APART:
        try:
            trained("keras.losses", *problem.rows_here(replicas), on_horovod=False)
        except ValueError as refusal:
            return str(refusal)
        return "not refused"
    found, losses, step, model = trained(config, *problem.rows_here(replicas), on_horovod=True)
    return replicas.largest_difference(model), found, losses, scalars(step)


def trained(config, x, y, batch_size, on_horovod):
    """Weights and slots after training, the losses, and what was seen in the last update but one fifth of them."""
    arguments = dict(CONFIGS[config])
    kind, penalty = arguments.pop("loss"), arguments.pop("penalty", None)
    model = problem.model()
    if penalty is not None:
        for layer in model.layers:
            layer.kernel.regularizer = keras.regularizers.L2(penalty)
    error = keras.losses.MeanSquaredError()

    def loss(x, y):
        outputs = model(x, training=True)
        return error(y, outputs) if kind == "object" else ops.mean(ops.square(outputs - y))

    step = ks.optimize_loss(
        loss, "Momentum", {"momentum": 0.9}, 0.1, on_horovod=on_horovod, model=model, tf1_defaults=True, **arguments
    )
    losses = []
    for i, start in enumerate(range(0, len(x), batch_size)):
        told = {"skip_update": i % 3 == 0} if "skip_update_ph" in arguments else {}
        losses.append(float(step(x[start : start + batch_size], y[start : start + batch_size], **told)))
    slots = [step.optimizer.get_slot(v, "momentum") for v in model.trainable_variables]
    arrays = [ops.convert_to_numpy(v) for v in [*model.trainable_variables, *slots]]
    return arrays, np.array(losses), step, model


def check_equal(found, reference):
    assert problem.relative_difference(found[:4], reference[:4]) <= problem.TOLERANCE
    start = [np.zeros_like(slot) for slot in reference[4:]]
    assert problem.relative_difference(found[4:], reference[4:], start) <= problem.TOLERANCE


def scalars(step):
    """What was seen, without histograms."""
    return {tag: value for tag, value in step.summaries().items() if isinstance(value, float)}
