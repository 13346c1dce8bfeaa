"""Cost of a step of `fit` of two processes on two machines (network namespaces), relative to one machine.

    KERAS_BACKEND=torch python benchmarks/machines.py [--write]

Four layers `Dense(512)`, 64 rows, SGD with momentum, two processes with one CPU device each. It creates the namespaces
(as root) and removes them. `--quick` runs in seconds with small sizes; its times are meaningless.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import timing

NAMES = [f"ksb{os.getpid()}{end}" for end in "ab"]
ADDRESSES = ["10.77.32.1", "10.77.32.2"]
BLOCKS = 9


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """Creates two namespaces with a virtual cable between them."""
    devices = [f"{name}v"[-15:] for name in NAMES]
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, address in zip(NAMES, devices, ADDRESSES):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                ip("-n", name, "link", "set", each, "up")
            folder = pathlib.Path("/etc/netns", name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False)
            with contextlib.suppress(FileNotFoundError):
                pathlib.Path("/etc/netns", name, "hosts").unlink()
                pathlib.Path("/etc/netns", name).rmdir()


def run(machines: int, options: Sequence[str]) -> list[float]:
    """Returns the seconds per step in each block, of a job on one machine or on two."""
    launch = [sys.executable, "-m", "keras_shardopt.launch", "--nproc", str(2 // machines)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        program = [__file__, *options, "--result", f"{folder}/result.json"]
        if machines == 1:  # also in a namespace
            commands = [["ip", "netns", "exec", NAMES[0], *launch, *program]]
        else:
            whole = ["--nnodes", "2", "--coordinator", f"{ADDRESSES[0]}:29533", "--hosts", ",".join(ADDRESSES)]
            commands = [
                ["ip", "netns", "exec", name, *launch, *whole, "--node-rank", str(i), *program]
                for i, name in enumerate(NAMES)
            ]
        processes = [subprocess.Popen(command, env=environment) for command in commands]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise SystemExit(f"a process failed: {statuses}")
        found: list[float] = json.loads(pathlib.Path(folder, "result.json").read_text())
        return found


def measure(steps: int, units: int, blocks: int, result: pathlib.Path) -> None:
    """Trains in one process of a job, and writes the seconds per step."""
    import keras
    import numpy as np

    import keras_shardopt as ks

    with ks.data_parallel() as replicas:
        layers = [keras.layers.Dense(units, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((units,)), *layers])
        model.compile(ks.CrossShard(keras.optimizers.SGD(1e-3, momentum=0.9)), "mse")
    x = np.random.default_rng(0).normal(size=(64 * steps, units)).astype("float32")
    seconds = []
    for _ in range(blocks):
        begin = time.perf_counter()
        model.fit(x, x, batch_size=64, shuffle=False, verbose=0)
        seconds.append((time.perf_counter() - begin) / steps)
    if replicas.is_chief:
        result.write_text(json.dumps(seconds[1:]))  # the first includes compilation
    replicas.close()


def main() -> None:
    parser = timing.parser(__doc__, rounds=2)
    parser.add_argument("--steps", type=int, default=40, help="steps per block")
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    steps, units, blocks = (2, 8, 2) if given.quick else (given.steps, 512, BLOCKS)
    if given.result is not None:
        measure(steps, units, blocks, given.result)
        return
    options = ["--quick"] if given.quick else ["--steps", str(steps)]
    one, two = "one machine", "two machines"
    seconds: dict[str, list[float]] = {one: [], two: []}
    with namespaces():
        for _ in range(1 if given.quick else given.rounds):
            for number, name in enumerate(seconds, 1):
                seconds[name] += run(number, options)
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    package = "tensorflow-cpu" if backend == "tensorflow" else backend
    versions = {name: importlib.metadata.version(name) for name in ("keras", package)}
    title = f"A step of fit on two machines (network namespaces) against one, {backend}, 2 processes"
    command = f"KERAS_BACKEND={backend} python benchmarks/machines.py"
    timing.report(title, command, timing.table(seconds, [one]), versions, given.write)


if __name__ == "__main__":
    main()
