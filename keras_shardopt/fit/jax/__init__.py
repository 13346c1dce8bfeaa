"""Training with Keras's JAX trainer under a `keras.distribution`."""

from keras_shardopt.fit.jax.trainer import prepare

__all__ = ["prepare"]
