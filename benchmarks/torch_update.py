"""Cost of an update on PyTorch: Keras' optimizer, CrossShard, and `torch.optim` (fused), with the same parameters.

    python benchmarks/torch_update.py [--write]

Targets, with 16.8 million parameters and `--threads 1`: Adam, AdamW and SGD at most 1.1 times the fused optimizers of
`torch.optim`, other optimizers at most 1.2 times its foreach optimizers. It has no Lion: compared with its SGD with
momentum, or with a copy of the same number of bytes. `--cpu` measures CPU time, which depends less on other load.
`--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import os
import time

os.environ["KERAS_BACKEND"] = "torch"

import keras
import timing
import torch

import keras_shardopt as ks

RATE = 1e-3


def kinds() -> dict[str, tuple]:
    o, t = keras.optimizers, torch.optim
    foreach = {"foreach": True}
    return {
        "Adam": (lambda: o.Adam(RATE), lambda p: t.Adam(p, RATE, fused=True)),
        "AdamW": (lambda: o.AdamW(RATE), lambda p: t.AdamW(p, RATE, fused=True)),
        "SGD momentum": (lambda: o.SGD(RATE, momentum=0.9), lambda p: t.SGD(p, RATE, momentum=0.9, fused=True)),
        "Adagrad": (lambda: o.Adagrad(RATE), lambda p: t.Adagrad(p, RATE, **foreach)),
        "RMSprop": (lambda: o.RMSprop(RATE), lambda p: t.RMSprop(p, RATE, **foreach)),
        "Adamax": (lambda: o.Adamax(RATE), lambda p: t.Adamax(p, RATE, **foreach)),
        "Nadam": (lambda: o.Nadam(RATE), lambda p: t.NAdam(p, RATE, **foreach)),
        "Adadelta": (lambda: o.Adadelta(RATE), lambda p: t.Adadelta(p, RATE, **foreach)),
        "Lion": (lambda: o.Lion(RATE), lambda p: t.SGD(p, RATE, momentum=0.9, **foreach)),
    }


def main() -> None:
    parser = timing.parser(__doc__, rounds=11)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time instead of wall time")
    parser.add_argument("--only", nargs="*", default=list(kinds()), choices=kinds(), help="optimizers to measure")
    parser.add_argument("--threads", type=int, default=0, help="number of threads (default: PyTorch's choice)")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of each of the 16 matrices")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size, rounds = (64, 2) if arguments.quick else (arguments.size, arguments.rounds)
    shapes = [(size, size)] * 16
    random = torch.Generator().manual_seed(0)
    grads = [0.01 * torch.randn(shape, generator=random) for shape in shapes]
    text = []
    for name in arguments.only:
        make, make_torch = kinds()[name]
        parameters = [torch.nn.Parameter(0.1 * torch.randn(shape, generator=random)) for shape in shapes]
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad.clone()
        optimizers = {
            "Keras": make(),
            "CrossShard": ks.CrossShard(make()),
            "CrossShard(fused=False)": ks.CrossShard(make(), torch=ks.TorchSpeed(fused=False)),
        }
        reference = make_torch(parameters)
        way = "fused" if reference.defaults.get("fused") else "foreach"
        runs = {f"torch.optim.{type(reference).__name__}({way}=True)": reference.step}
        for label, optimizer in optimizers.items():
            weights = [keras.Variable(p.detach()) for p in parameters]
            optimizer.build(weights)
            runs[f"{label} {name}"] = lambda o=optimizer, w=weights: o.apply(grads, w)
        if name == "Lion":
            # Lion reads weights, gradients and momentums, and writes two of them: the traffic of copying 2.5 arrays.
            sources = [torch.ones(shape) for shape in [*shapes, *shapes, *shapes[::2]]]
            targets = [torch.zeros_like(source) for source in sources]
            runs["a copy of as many bytes"] = lambda t=targets, s=sources: torch._foreach_copy_(t, s)
        seconds = timing.in_turns(runs, rounds, clock=time.process_time if arguments.cpu else time.perf_counter)
        text.append(timing.table(seconds, [next(iter(runs))]))
    number = sum(grad.numel() for grad in grads)
    timing.report(
        f"Updates of {number / 1e6:.3g} million parameters on PyTorch",
        "python benchmarks/torch_update.py"
        + (f" --size {size}" if size != 1024 else "")
        + (f" --threads {arguments.threads}" if arguments.threads else "")
        + (" --cpu" if arguments.cpu else ""),
        "\n\n".join(text),
        {"Keras": keras.__version__, "PyTorch": f"{torch.__version__}, {torch.get_num_threads()} threads"},
        arguments.write,
    )


if __name__ == "__main__":
    main()
