"""The four styles in which people train, on each backend, with CrossShard and without."""

from __future__ import annotations

import keras
import numpy as np
from support import problem

import keras_shardopt as ks
from keras_shardopt.backends.active import placement
from keras_shardopt.fit.scope import largest_difference

BACKEND = keras.config.backend()
STYLES = ["built-in step", "custom train_step", "train_on_batch", "custom training loop"]


class CustomStep(keras.Model):
    """A model with a `train_step` as Keras' guides write it, around `self(x)`."""

    if BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    elif BACKEND == "jax":

        def train_step(self, state, data):
            import jax

            weights, others, slots, metrics = state
            x, y = data

            def compute_loss(weights):
                mapping = zip([*self.trainable_variables, *self.non_trainable_variables], [*weights, *others])
                with keras.StatelessScope(state_mapping=list(mapping)):
                    return self.compute_loss(y=y, y_pred=self(x, training=True))

            loss, grads = jax.value_and_grad(compute_loss)(weights)
            weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
            return {"loss": loss}, (weights, others, slots, metrics)

    else:

        def train_step(self, data):
            import torch

            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
            variables = self.trainable_variables
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            return {"loss": loss}


def _loop_on_tensorflow(model, x, y, batch_size):
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    model.optimizer.build(model.trainable_variables)

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / strategy.num_replicas_in_sync
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    step = tf.function(lambda x, y: strategy.run(on_replica, args=(x, y)))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    for batch in strategy.experimental_distribute_dataset(data):
        step(*batch)


def _loop_on_jax(model, x, y, batch_size):
    import jax

    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    variables = [*model.trainable_variables, *optimizer.variables]

    def update(values, x, y):
        weights, slots = values[:4], values[4:]

        def compute_loss(weights):
            outputs, _ = model.stateless_call(weights, [], x, training=True)
            return keras.ops.mean(keras.ops.square(outputs - y))

        weights, slots = optimizer.stateless_apply(slots, jax.grad(compute_loss)(weights), weights)
        return [*weights, *slots]

    distribution = keras.distribution.distribution()
    if distribution is not None:
        P = jax.sharding.PartitionSpec
        mesh = model.trainable_variables[0].value.sharding.mesh
        update = jax.shard_map(
            update, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P(), check_vma=False
        )
    update = jax.jit(update)
    values = [variable.value for variable in variables]
    for start in range(0, len(x), batch_size):
        values = update(values, x[start : start + batch_size], y[start : start + batch_size])
    for variable, value in zip(variables, values):
        variable._value = value  # as it is on each device: `assign` would make the copies equal


def _loop_on_torch(model, x, y, batch_size):
    import torch

    variables = model.trainable_variables
    model.optimizer.build(variables)
    for start in range(0, len(x), batch_size):
        model.zero_grad()
        outputs = model(x[start : start + batch_size], training=True)
        torch.mean(torch.square(outputs - torch.from_numpy(y[start : start + batch_size]))).backward()
        model.optimizer.apply([v.value.grad for v in variables], variables)


_LOOPS = {"tensorflow": _loop_on_tensorflow, "jax": _loop_on_jax, "torch": _loop_on_torch}


def trained(style, optimizer, x, y, batch_size):
    """The small problem's model after training in that style, on the replicas of the scope around the call."""
    model = problem.model()
    if style == "custom train_step":
        model = CustomStep(model.inputs, model.outputs)
    model.compile(optimizer, "mse")
    if style == "custom training loop":
        _LOOPS[BACKEND](model, x, y, batch_size)
    elif style == "train_on_batch":
        for start in range(0, len(x), batch_size):
            model.train_on_batch(x[start : start + batch_size], y[start : start + batch_size])
    else:
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return model


def on_replicas(replicas, style):
    """The largest difference between replicas, and what they came to."""
    model = trained(style, ks.CrossShard(problem.sgd_momentum()), *problem.rows_here(replicas))
    variables = [*model.trainable_variables, *model.optimizer.variables]
    if replicas.num_processes == 1:
        assert placement.fingerprints(variables).shape == (replicas.num_replicas, len(variables))
    return largest_difference(variables), outcome(model)


def outcome(model):
    """The weights, then the optimizer's counter, rate and slots, as arrays."""
    return [keras.ops.convert_to_numpy(v) for v in [*model.trainable_variables, *model.optimizer.variables]]


def check_equal(found, reference):
    """Weights and slots against those of one process with the whole batch."""
    assert problem.relative_difference(found[:4], reference[:4]) <= problem.TOLERANCE
    assert found[4] == reference[4] == problem.NUM_STEPS
    start = [np.zeros_like(slot) for slot in reference[6:]]
    assert problem.relative_difference(found[6:], reference[6:], start) <= problem.TOLERANCE
