"""The functions of PyTorch, and of Keras on PyTorch, that this package replaces. See `backends/patches.py`."""

_DRAWS = (
    "backends.torch.random_numbers:_draw_seed",
    "makes ranks draw different dropout masks, until Keras adds the rank to its seeds",
)

PATCHES = {
    "optimizers": {
        "torch.nn.parallel.DistributedDataParallel.__init__": (
            "backends.torch.ddp:noting_forward()",
            "detects gradients that DDP has averaged, until a parameter refers to its DDP module",
        ),
    },
    "prepare": {
        "keras.src.backend.torch.trainer.TorchEpochIterator": (
            "fit.torch.batches:EpochIterator",
            "makes ranks end epochs together, until Keras divides data among ranks",
        ),
        "keras.src.backend.torch.trainer.Trainer.get_metrics_result": (  # from Keras 3.16 on
            "fit.torch.trainer:_metrics_result",
            "keeps Keras from summing metrics, which prepared models do, until a model can override this method",
        ),
    },
    "randomness": {
        "keras.src.backend.torch.random.draw_seed": _DRAWS,
        "keras.src.backend.torch.image.draw_seed": _DRAWS,
        "keras.src.backend.torch.ops.image.draw_seed": _DRAWS,  # from Keras 3.16 on
    },
}
