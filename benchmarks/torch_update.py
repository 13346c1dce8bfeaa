"""What an update costs on PyTorch: Keras' own, CrossShard's and `torch.optim`'s fused one, of the same parameters.

    python benchmarks/torch_update.py [--write]

Targets: `CrossShard(Adam())` within 1.5 times `torch.optim.Adam(fused=True)`, with 16.8 million parameters.
`--quick` runs in seconds, on sizes that say nothing.
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import timing
import torch

import keras_shardopt as ks

RATE = 1e-3


def kinds() -> dict[str, tuple]:
    o, t = keras.optimizers, torch.optim
    return {
        "Adam": (lambda: o.Adam(RATE), lambda p: t.Adam(p, RATE, fused=True)),
        "AdamW": (lambda: o.AdamW(RATE), lambda p: t.AdamW(p, RATE, fused=True)),
        "SGD momentum": (lambda: o.SGD(RATE, momentum=0.9), lambda p: t.SGD(p, RATE, momentum=0.9, fused=True)),
        "Adagrad": (lambda: o.Adagrad(RATE), lambda p: t.Adagrad(p, RATE, fused=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=0, help="0: as PyTorch chooses")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size, rounds = (64, 2) if arguments.quick else (1024, arguments.rounds)
    shapes = [(size, size)] * 16
    random = torch.Generator().manual_seed(0)
    grads = [0.01 * torch.randn(shape, generator=random) for shape in shapes]
    text = []
    for name, (make, make_torch) in kinds().items():
        parameters = [torch.nn.Parameter(0.1 * torch.randn(shape, generator=random)) for shape in shapes]
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad.clone()
        optimizers = {"Keras": make(), "CrossShard": ks.CrossShard(make())}
        runs = {f"torch.optim {name}(fused=True)": make_torch(parameters).step}
        for label, optimizer in optimizers.items():
            weights = [keras.Variable(p.detach()) for p in parameters]
            optimizer.build(weights)
            runs[f"{label} {name}"] = lambda o=optimizer, w=weights: o.apply(grads, w)
        seconds = timing.in_turns(runs, rounds)
        text.append(timing.table(seconds, [next(iter(runs))]))
    number = sum(grad.numel() for grad in grads)
    timing.report(
        f"Updates of {number / 1e6:.1f} million parameters on PyTorch",
        "python benchmarks/torch_update.py",
        "\n\n".join(text),
        {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, {torch.get_num_threads()} threads"},
        arguments.write,
    )


if __name__ == "__main__":
    main()
