"""The functions of TensorFlow, and of Keras on TensorFlow, that this package replaces. See `backends/patches.py`."""

_LOSSES = "backends.tensorflow.losses"
_WHY = "detects whether a step divides its loss by the number of replicas, until Keras passes this to the optimizer"
_DRAWS = (
    "backends.tensorflow.random_numbers:_draw_seed",
    "makes replicas draw different dropout masks, until Keras adds the replica to its seeds",
)

PATCHES = {
    "reduction": {
        "keras.optimizers.Optimizer._all_reduce_sum_gradients": (
            "backends.tensorflow.runtime:reducing_once()",
            "leaves reduced gradients unchanged, until Keras' optimizers have an argument for this",
        ),
        "keras.src.losses.loss.reduce_values": (f"{_LOSSES}:_reduce_values", _WHY),
        "keras.src.losses.loss.scale_loss_for_distribution": (f"{_LOSSES}:_scale_loss_for_distribution", _WHY),
        "tensorflow:nn.compute_average_loss": (f"{_LOSSES}:noting_result()", _WHY),
        "tensorflow:nn.scale_regularization_loss": (f"{_LOSSES}:noting_result()", _WHY),
        "tensorflow:GradientTape.gradient": (f"{_LOSSES}:noting_bare_losses()", _WHY),
        "tensorflow:distribute.Strategy.num_replicas_in_sync": (f"{_LOSSES}:noting_reads()", _WHY),
    },
    "prepare": {
        "keras.src.backend.tensorflow.trainer.TFEpochIterator": (
            "fit.tensorflow.trainer:_EpochIterator",
            "makes workers end epochs together, until Keras divides data among workers",
        ),
        "keras.src.backend.tensorflow.trainer._collective_all_reduce_multi_worker": (
            "fit.tensorflow.workers:_splits_logs",
            "keeps Keras from splitting logs that are equal on all workers, until Keras leaves such logs unchanged",
        ),
    },
    "randomness": {
        "keras.src.backend.tensorflow.random.draw_seed": _DRAWS,
        "keras.src.backend.tensorflow.image.draw_seed": _DRAWS,
        "keras.src.backend.tensorflow.ops.image.draw_seed": _DRAWS,  # from Keras 3.16 on
    },
}
