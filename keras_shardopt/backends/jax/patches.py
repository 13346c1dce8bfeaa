"""The functions of Keras that this package replaces on JAX only. See `keras_shardopt.backends.patches`."""

PATCHES = {
    "batches": {
        "keras.src.backend.jax.trainer._distribute_data": (
            "fit.jax.batches:_distribute_data",
            "allows batches of any size, until Keras pads batches that the devices cannot divide evenly",
        ),
        "keras.src.backend.jax.trainer.JAXEpochIterator": (
            "fit.jax.batches:EpochIterator",
            "makes processes end epochs together, until Keras divides data among processes",
        ),
    },
}
