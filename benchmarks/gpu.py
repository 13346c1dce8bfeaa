"""Cost of CrossShard on a GPU, on PyTorch or JAX.

    KERAS_BACKEND=torch python benchmarks/gpu.py [--write]
    KERAS_BACKEND=jax python benchmarks/gpu.py [--write]

First it trains a small model with the optimizer's and with Keras' arithmetic, and compares the weights. Then it times
Adam updates of 1e8 and 1e9 float32 weights, in milliseconds and as a fraction of the memory bandwidth. (An update moves
28 bytes per weight: it reads gradient, weight and two slots, and writes the last three. A copy measures the bandwidth.)
Last, it measures a step of `fit` of a transformer block in bfloat16. Targets: 70 % of the bandwidth, and the time of
PyTorch's fused Adam.
`--quick` runs in seconds with small sizes, also without a GPU; its times are meaningless.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import timing
from keras import ops

import keras_shardopt as ks

BYTES_PER_WEIGHT = 28
RATE = 1e-3


def wait() -> None:
    """Waits until the device has finished. Measured functions on JAX wait themselves."""
    if keras.config.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def gpu_name() -> str | None:
    """The model of the GPU, or None if this backend has none."""
    if keras.config.backend() == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else None
    import jax

    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None


def updates(optimizer: keras.optimizers.Optimizer, grads: list[Any]) -> Callable[[], None]:
    """Updates new weights repeatedly; on JAX compiled, with donated memory."""
    variables = [keras.Variable(ops.zeros_like(grad)) for grad in grads]
    optimizer.build(variables)
    if keras.config.backend() != "jax":
        return lambda: optimizer.apply(grads, variables)
    import jax

    step = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    held = [[v.value for v in optimizer.variables], [v.value for v in variables]]

    def run() -> None:
        held[1], held[0] = step(held[0], grads, held[1])
        jax.block_until_ready(held)

    return run


def copies(arrays: list[Any]) -> Callable[[], None]:
    """Copies the arrays, which moves 8 bytes per element."""
    if keras.config.backend() == "jax":
        import jax

        copy = jax.jit(lambda given: [array + 0 for array in given])
        return lambda: jax.block_until_ready(copy(arrays))
    room = [ops.zeros_like(array) for array in arrays]
    return lambda: [target.copy_(array) for target, array in zip(room, arrays)]


def update_table(number: int, rounds: int) -> str:
    grads = [ops.ones((number // 16,), "float32") * 1e-3 for _ in range(16)]
    runs = {
        "Keras Adam": updates(keras.optimizers.Adam(RATE), grads),
        "CrossShard(Adam)": updates(ks.CrossShard(keras.optimizers.Adam(RATE)), grads),
        "a copy": copies(grads),
    }
    base = "Keras Adam"
    if keras.config.backend() == "torch":
        import torch

        parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
        base = "torch.optim.Adam(fused=True)"
        runs[base] = torch.optim.Adam(parameters, RATE, fused=True).step
    seconds = timing.in_turns(runs, rounds, wait)
    bandwidth = 8 * number / float(np.median(seconds["a copy"]))
    part = BYTES_PER_WEIGHT * number / float(np.median(seconds["CrossShard(Adam)"])) / bandwidth
    return (
        f"{number:.0e} weights, {bandwidth / 1e9:.0f} GB/s by a copy: CrossShard(Adam) reaches {part:.0%} of it.\n\n"
        f"{timing.table(seconds, [base])}"
    )


def block(width: int, length: int) -> keras.Model:
    """A transformer block that computes in bfloat16."""
    keras.utils.set_random_seed(0)
    policy = "mixed_bfloat16"
    inputs = keras.Input((length, width))
    normed = keras.layers.LayerNormalization(dtype=policy)(inputs)
    seen = keras.layers.MultiHeadAttention(8, width // 8, dtype=policy)(normed, normed)
    hidden = keras.layers.Add(dtype=policy)([inputs, seen])
    normed = keras.layers.LayerNormalization(dtype=policy)(hidden)
    wide = keras.layers.Dense(4 * width, activation="gelu", dtype=policy)(normed)
    outputs = keras.layers.Add(dtype=policy)([hidden, keras.layers.Dense(width, dtype=policy)(wide)])
    return keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(outputs))


def fit_table(width: int, length: int, steps: int, rounds: int) -> str:
    random = np.random.default_rng(0)
    x = random.normal(size=(8 * steps, length, width)).astype("float32")
    runs = {}
    for name, optimizer in {
        "Keras Adam": keras.optimizers.Adam(RATE),
        "CrossShard(Adam)": ks.CrossShard(keras.optimizers.Adam(RATE)),
    }.items():
        model = block(width, length)
        model.compile(optimizer, "mse")
        runs[name] = lambda model=model: model.fit(x, x, batch_size=8, verbose=0, shuffle=False)
        runs[name]()
    return timing.table(timing.in_turns(runs, rounds, wait), ["Keras Adam"], steps)


def check() -> str:
    """Compares the weights after training with Keras' Adam and with each arithmetic of CrossShard."""
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 8)).astype("float32")
    weights = []
    for make in (lambda o: o, ks.CrossShard, lambda o: ks.CrossShard(o, torch=ks.TorchSpeed(fused=False))):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(8)])
        model.compile(make(keras.optimizers.Adam(RATE)), "mse")
        model.fit(x, x, batch_size=16, epochs=3, verbose=0, shuffle=False)
        weights.append(np.concatenate([weight.reshape(-1) for weight in model.get_weights()]))
    apart = [float(np.abs(each - weights[0]).max()) for each in weights[1:]]
    assert apart[0] < 1e-5, apart
    assert apart[1] == 0, apart
    return f"Weights after 12 updates differ by {apart[0]:.1e} from Keras', and with `fused=False` by {apart[1]:g}."


def main() -> None:
    parser = timing.parser(__doc__, rounds=11)
    parser.add_argument("--weights", type=float, nargs="*", default=[1e8, 1e9], help="numbers of weights")
    arguments = parser.parse_args()
    if keras.config.backend() not in ("torch", "jax"):
        raise SystemExit("This benchmark is for KERAS_BACKEND=torch and KERAS_BACKEND=jax.")
    if not (arguments.quick or gpu_name()):
        raise SystemExit("This benchmark needs a GPU that the backend sees; `--quick` runs without.")
    sizes = [1600] if arguments.quick else [int(number) for number in arguments.weights]
    rounds = 2 if arguments.quick else arguments.rounds
    text = [f"{gpu_name() or 'no GPU'}. {check()}", *[update_table(number, rounds) for number in sizes]]
    text.append(fit_table(*((16, 4, 2) if arguments.quick else (1024, 512, 10)), rounds))
    backend = keras.config.backend()
    timing.report(
        f"On a GPU with {backend}" if gpu_name() else f"What a GPU would be measured with, on a CPU with {backend}",
        f"KERAS_BACKEND={backend} python benchmarks/gpu.py",
        "\n\n".join(text),
        {"Keras": keras.__version__, backend: importlib.import_module(backend).__version__},
        arguments.write,
    )


if __name__ == "__main__":
    main()
