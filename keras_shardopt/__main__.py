"""Prints versions, devices and replicas, for bug reports: `python -m keras_shardopt`."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import keras

import keras_shardopt as ks
from keras_shardopt.backends.active import processes

_PACKAGES = ("keras", "numpy", "tensorflow", "tensorflow-cpu", "jax", "jaxlib", "torch")


def report() -> str:
    """Returns versions, devices and replicas for bug reports, one item per line."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    with ks.data_parallel() as replicas:
        world = f"{replicas.num_replicas}; processes: {replicas.num_processes}"
    replicas.close()
    rows = {
        "keras_shardopt": ks.__version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "backend": " ".join(next(iter(processes.versions().items()))),
        "device": f"{keras.ops.zeros(1).device} first",
        "precision": f"{keras.config.floatx()}, policy {keras.config.dtype_policy().name}",
        "replicas": world,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m keras_shardopt",
        description="Prints versions, devices and replicas, for bug reports.",
        epilog="To start a program in several processes: python -m keras_shardopt.launch --help",
    ).parse_args()
    print(report())
