"""Every wrapper and every kind of inner optimizer that the contract tests run over.

A new wrapper is one row in `WRAPPERS`, with arguments under which it must do nothing to a lone replica.
"""

from __future__ import annotations

import keras
from keras import optimizers as o
from support.problem import keras_optimizers

import keras_shardopt as ks

WRAPPERS = {
    "CrossShard": lambda inner: ks.CrossShard(inner),
    "CrossShard sum": lambda inner: ks.CrossShard(inner, reduction="sum"),
    "CrossShard of CrossShard": lambda inner: ks.CrossShard(ks.CrossShard(inner)),
    "GradientClipping": lambda inner: ks.GradientClipping(inner, clip_gradients=1e6),
    "LARC": lambda inner: ks.LARC(inner, larc_eta=1e6),
    "VariableClipping": lambda inner: ks.VariableClipping(inner, {".*": [0]}, max_norm=1e6),
}


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


def make(wrapper, inner):
    """The wrapper called `wrapper` around a new inner optimizer called `inner`."""
    return WRAPPERS[wrapper](INNERS[inner]())


def plain(inner):
    """A new optimizer called `inner`, not wrapped."""
    return INNERS[inner]()


def trained(optimizer, epochs=1, **fit_arguments):
    """The small problem's model after training with `optimizer`, compiled as Keras' default on this backend is."""
    from support import problem

    x, y = problem.data(num_steps=3)
    model = problem.model()
    model.compile(optimizer, "mse")
    # Before `fit`, because ScheduleFreeAdamW assigns in `build`, which TensorFlow would trace into every step.
    optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=problem.BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0, **fit_arguments)
    return model


def state_of(optimizer):
    return [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
