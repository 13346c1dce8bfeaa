"""The GAN of the Keras guide on custom training steps: two optimizers as attributes, none given to `compile`.

Its noise comes with the data, so that replicas and one process see the same.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

import keras_shardopt as ks

BATCH_SIZE = 12
NUM_STEPS = 5
BACKEND = keras.config.backend()


class GAN(keras.Model):
    """Of the guide, with latent vectors in place of labels."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        if BACKEND == "jax":
            # A step without side effects gets and returns the state of `model.optimizer` and of variables that the
            # model tracks; so it tracks that of these two.
            d_optimizer.build(self.discriminator.trainable_variables)
            g_optimizer.build(self.generator.trainable_variables)
            self.optimizer_state = [*d_optimizer.variables, *g_optimizer.variables]

    def train_step(self, *arguments):
        return {"jax": self._jax_step, "tensorflow": self._tensorflow_step, "torch": self._torch_step}[BACKEND](
            *arguments
        )

    def _discriminated(self, real, latent):
        """The loss of the discriminator, which takes what is generated for real half of the time."""
        images = ops.concatenate([ops.stop_gradient(self.generator(latent)), real])
        labels = ops.concatenate([ops.ones_like(latent[:, :1]), ops.zeros_like(real[:, :1])])
        return self.loss_fn(labels, self.discriminator(images))

    def _generated(self, latent):
        """The loss of the generator, which wants to be taken for real."""
        return self.loss_fn(ops.zeros_like(latent[:, :1]), self.discriminator(self.generator(latent)))

    def _torch_step(self, data):
        import torch

        real, latent = data
        logs = {}
        for name, loss, model, optimizer in (
            ("d_loss", lambda: self._discriminated(real, latent), self.discriminator, self.d_optimizer),
            ("g_loss", lambda: self._generated(latent), self.generator, self.g_optimizer),
        ):
            self.zero_grad()
            logs[name] = loss()
            logs[name].backward()
            weights = model.trainable_weights
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in weights], weights)
        return logs

    def _tensorflow_step(self, data):
        import tensorflow as tf

        real, latent = data
        with tf.GradientTape() as tape:
            d_loss = self._discriminated(real, latent)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = self._generated(latent)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def _jax_step(self, state, data):
        import jax

        weights, others, optimizer_state, metrics = state
        real, latent = data
        values = {id(v): value for v, value in zip(self.trainable_variables, weights)}
        values |= {id(v): value for v, value in zip(self.non_trainable_variables, others)}
        logs = {}
        for name, loss, model, optimizer in (
            ("d_loss", lambda: self._discriminated(real, latent), self.discriminator, self.d_optimizer),
            ("g_loss", lambda: self._generated(latent), self.generator, self.g_optimizer),
        ):

            def compute(trained, before, loss=loss, model=model):
                now = {**before, **{id(v): value for v, value in zip(model.trainable_variables, trained)}}
                with keras.StatelessScope(state_mapping=[(v, now[id(v)]) for v in self.trainable_variables]):
                    return loss()

            trained = [values[id(v)] for v in model.trainable_variables]
            slots = [values[id(v)] for v in optimizer.variables]
            logs[name], grads = jax.value_and_grad(compute)(trained, values)
            trained, slots = optimizer.stateless_apply(slots, grads, trained)
            values |= {id(v): value for v, value in zip(model.trainable_variables, trained)}
            values |= {id(v): value for v, value in zip(optimizer.variables, slots)}
        weights = [values[id(v)] for v in self.trainable_variables]
        others = [values[id(v)] for v in self.non_trainable_variables]
        return logs, (weights, others, optimizer_state, metrics)


def plain(inner, of_discriminator):
    return inner


def one_divided(inner, of_discriminator):
    """A `CrossShard` for each part of the model, one of them with divided state."""
    return ks.CrossShard(inner, shard_state=of_discriminator)


def compiled(around=plain):
    """The model, with `around(SGD, of_discriminator)` for each of its parts."""
    dense = keras.layers.Dense
    model = GAN(
        keras.Sequential([keras.Input((3,)), dense(5, "tanh"), dense(1)], name="discriminator"),
        keras.Sequential([keras.Input((2,)), dense(5, "tanh"), dense(3)], name="generator"),
    )
    random = np.random.default_rng(5)
    model.set_weights([random.normal(size=w.shape).astype("float32") * 0.5 for w in model.get_weights()])
    optimizers = [around(keras.optimizers.SGD(rate, momentum=0.9), rate == 0.1) for rate in (0.1, 0.2)]
    model.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def data():
    """Rows of which no replica's part has the mean of another's."""
    random = np.random.default_rng(9)
    rows = NUM_STEPS * BATCH_SIZE
    real, latent = (random.normal(size=(rows, size)).astype("float32") for size in (3, 2))
    real *= np.tile(np.linspace(0.3, 2.0, BATCH_SIZE, dtype="float32"), NUM_STEPS)[:, None]
    return real, latent


def fit(model, rows=None, **arguments):
    """Trains on these rows of each batch, in batches of as many."""
    batches = [array.reshape(NUM_STEPS, BATCH_SIZE, -1) for array in data()]
    if rows is not None:
        batches = [array[:, rows] for array in batches]
    real, latent = [array.reshape(-1, array.shape[-1]) for array in batches]
    model.fit(real, latent, batch_size=batches[0].shape[1], shuffle=False, verbose=0, **arguments)
    return model


def built(model):
    """The model with all its optimizers built, that of `compile` too, which stays unused: Keras loads no other."""
    for optimizer, part in (
        (model.d_optimizer, model.discriminator),
        (model.g_optimizer, model.generator),
        (model.optimizer, model),
    ):
        optimizer.build(part.trainable_variables)
    return model


def weights(model):
    """Of the two parts."""
    return [*model.discriminator.get_weights(), *model.generator.get_weights()]


def states(model):
    """The momenta of the two parts, as a file has them. All processes call it together."""
    found = []
    for optimizer in (model.d_optimizer, model.g_optimizer):
        store = {}
        optimizer.save_own_variables(store)
        found += [np.asarray(store[key]) for key in list(store)[2:]]
    return found


def difference(model, reference):
    """The largest difference between weights or momenta of two models, in units of the weights' movement."""
    start = weights(compiled())
    mine, others = [*weights(model), *states(model)], [*weights(reference), *states(reference)]
    assert len(mine) == len(others)
    found = max(np.abs(a - b).max() for a, b in zip(mine, others))
    movement = max(np.abs(a - b).max() for a, b in zip(weights(reference), start))
    assert movement > 1e-2, "the reference did not train"
    return float(found / movement)
