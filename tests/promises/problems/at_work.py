"""Each wrapper (and NovoGrad) with arguments under which it changes the training of the small problem, and its twin in
NumPy: float64 arithmetic that shares nothing with the package."""

from __future__ import annotations

import keras
import numpy as np
from support import problem

import keras_shardopt as ks

# As float32 holds them.
RATE, MOMENTUM = float(np.float32(0.1)), float(np.float32(0.9))
LIMIT = 0.125  # of the gradient's norm; has no rounding in float32
NUM_TOWERS = 2


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(RATE, 10, 0.5)


def _clip_gradients(step, weights, grads):
    norm = np.sqrt(sum(np.sum(g**2) for g in grads))
    return [g * min(1.0, LIMIT / norm) for g in grads]


def _larc(step, weights, grads):
    rate = RATE * 0.5 ** (step / 10)
    scaled = []
    for w, g in zip(weights, grads):
        largest = 0.02 * np.linalg.norm(w) / (rate * (np.linalg.norm(g) + 1e-7))
        scaled.append(g * min(1.0, max(largest, 1e-7)))
    return scaled


def _clip_kernels(weights):
    for kernel in weights[::2]:
        kernel *= 0.5 / np.maximum(np.linalg.norm(kernel, axis=0, keepdims=True), 0.5)


def sgd_in_numpy(transform=None, after=None, rate=lambda step: RATE):
    """The rule of Keras' SGD with momentum, between what a wrapper does to gradients and to weights."""
    velocities = [np.zeros_like(w, "float64") for w in problem.start_weights()]

    def update(step, weights, grads):
        if transform is not None:
            grads = transform(step, weights, grads)
        for weight, velocity, grad in zip(weights, velocities, grads):
            velocity *= MOMENTUM
            velocity -= rate(step) * grad
            weight += velocity
        if after is not None:
            after(weights)

    return update


def novograd_in_numpy(rate=0.01, beta1=0.95, beta2=0.98, weight_decay=0.01):
    momenta, averages = [0.0] * 4, [None] * 4

    def update(step, weights, grads):
        for i, (weight, grad) in enumerate(zip(weights, grads)):
            square = np.sum(grad**2)
            averages[i] = square if averages[i] is None else beta2 * averages[i] + (1 - beta2) * square
            momenta[i] = beta1 * momenta[i] + grad / (np.sqrt(averages[i]) + 1e-8) + weight_decay * weight
            weight -= rate * momenta[i]

    return update


# Name: how to make it around nothing but its inner optimizer, and the same update in NumPy.
AT_WORK = {
    "VariableClipping": (
        lambda: ks.VariableClipping(problem.sgd_momentum(), {".*kernel": [0]}, 0.5),
        lambda: sgd_in_numpy(after=_clip_kernels),
    ),
    "GradientClipping": (
        lambda: ks.GradientClipping(problem.sgd_momentum(), LIMIT),
        lambda: sgd_in_numpy(transform=_clip_gradients),
    ),
    "LARC": (
        lambda: ks.LARC(keras.optimizers.SGD(schedule(), momentum=MOMENTUM), larc_eta=0.02),
        lambda: sgd_in_numpy(transform=_larc, rate=lambda step: RATE * 0.5 ** (step / 10)),
    ),
    "NovoGrad": (lambda: ks.NovoGrad(0.01, weight_decay=0.01), novograd_in_numpy),
    "Tower": (problem.sgd_momentum, sgd_in_numpy),
}


def in_cross_shard(name):
    """The optimizer called `name` for several replicas."""
    optimizer = ks.CrossShard(AT_WORK[name][0]())
    return ks.Tower(optimizer) if name == "Tower" else optimizer


def alone(name):
    """The optimizer called `name` for one replica."""
    optimizer = AT_WORK[name][0]()
    return ks.Tower(optimizer) if name == "Tower" else optimizer


def compiled(name, optimizer):
    """The small model, ready for `fit`; under "Tower" its step runs in towers."""
    model = problem.model()
    model.compile(optimizer, "mse")
    if name == "Tower":
        model.train_step = ks.replicate(model.train_step, NUM_TOWERS, "mean")
    return model


def on_replicas(replicas, name):
    """The largest difference between replicas, and the weights, after `fit` with the optimizer called `name`."""
    model = compiled(name, in_cross_shard(name))
    x, y, batch_size = problem.rows_here(replicas)
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return replicas.largest_difference(model), model.get_weights()


def trained_in_numpy(name):
    return problem.trained_in_numpy(AT_WORK[name][1]())
