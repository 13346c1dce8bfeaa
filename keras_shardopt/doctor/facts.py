"""Collects facts about one process (settings, versions, hardware), without communication, as values for JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import keras

from keras_shardopt.backends import jobs
from keras_shardopt.backends.active import processes

Facts = dict[str, Any]

PREFIXES = (
    *("CUBLAS_", "CUDA_", "GLOO_", "JAX_", "KERAS_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PJRT_", "PYTHONHASHSEED"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_", "TF_", "TORCH", "XLA_", "WORLD_SIZE", "RANK", "LOCAL_"),
    *("NPROC", "http_proxy", "https_proxy", "no_proxy"),
)
"""Prefixes of the environment variables that a report contains. Other variables may hold passwords."""


def local(directory: str, seconds: float = 10.0) -> Facts:
    """Return facts about this process by name. "failed" has an error for each that fails or takes over `seconds`."""
    collectors: dict[str, Callable[[], Any]] = {
        "process": _process,
        "versions": _versions,
        "keras": _keras,
        "environment": _environment,
        "cores": _cores,
        "memory": _memory,
        "gpus": _gpus,
        "name": _name,
        "addresses": _addresses,
        "files": lambda: _files(os.path.abspath(directory)),
    }
    found: Facts = {"failed": {}}
    for name, collect in collectors.items():
        done: list[tuple[dict[str, Any], Any]] = []

        def run(collect: Callable[[], Any] = collect, done: list[Any] = done) -> None:
            try:
                done.append((found, collect()))
            except Exception as error:
                done.append((found["failed"], f"{type(error).__name__}: {error}"))

        # Use a daemon thread, because a call to a dead file server or name server cannot be interrupted.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        where, value = done[0] if done else (found["failed"], f"no answer within {seconds:g} s")
        where[name] = value
    return found


def _process() -> Facts:
    size, rank = _place()
    task = jobs.started_by()
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "machine": boot.read_text().strip() if boot.exists() else socket.gethostname(),
        "size": size,
        "rank": rank,
        "command": None if task is None else f"{task.command} with {task.size} processes",
        "framework": next(iter(processes.versions()), "another backend"),
    }


def _place() -> tuple[int, int]:
    """Return the number of processes and the index of this process, from the environment (default: 1 and 0)."""
    variables = os.environ
    task = jobs.started_by()
    with contextlib.suppress(LookupError, ValueError, TypeError):
        if "WORLD_SIZE" in variables:
            return int(variables["WORLD_SIZE"]), int(variables.get("RANK", 0))
        if "KERAS_DISTRIBUTION_NUM_PROCESSES" in variables:
            number = variables["KERAS_DISTRIBUTION_NUM_PROCESSES"], variables.get("KERAS_DISTRIBUTION_PROCESS_ID", 0)
            return int(number[0]), int(number[1])
        if "TF_CONFIG" in variables:
            addresses, rank = _tf_tasks()
            return len(addresses), rank
    return (1, 0) if task is None else (task.size, task.rank)


def _tf_tasks() -> tuple[list[str], int]:
    """Return the addresses of TensorFlow's processes (a chief first), and the index of this process."""
    config = json.loads(os.environ["TF_CONFIG"])
    chiefs = config["cluster"].get("chief", [])
    is_chief = config["task"].get("type") == "chief"
    return [*chiefs, *config["cluster"].get("worker", [])], int(config["task"]["index"]) + len(chiefs) * (not is_chief)


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "keras_shardopt": sys.modules["keras_shardopt"].__version__}
    for name in ("keras", "numpy", "tensorflow", "tensorflow-cpu", "jax", "jaxlib", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _keras() -> dict[str, str]:
    settings = ("floatx", "dtype_policy", "image_data_format", "epsilon")
    values = {name: getattr(keras.config, name)() for name in settings}
    return {name: str(getattr(value, "name", value)) for name, value in values.items()}


def _environment() -> dict[str, str]:
    shown = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return {
        name: re.sub("//[^/@]*@", "//...@", value)  # hides user and password of a proxy
        for name, value in shown.items()
        if not re.search("KEY|PASSW|SECRET|TOKEN|CREDENTIAL|_URL", name)
    }


def _cores() -> Facts:
    with_affinity = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if with_affinity else list(range(os.cpu_count() or 1))
    limits = [int(quota) / int(period) for quota, period in map(str.split, _cgroup("cpu.max")) if quota != "max"]
    pairs = zip(_cgroup("cpu.cfs_quota_us", "cpu"), _cgroup("cpu.cfs_period_us", "cpu"))
    limits += [int(quota) / int(period) for quota, period in pairs if int(quota) > 0]
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), model)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {"ids": cores, "limit": min(limits, default=None), "model": model, "load": round(load, 1)}


def _cgroup(name: str, controller: str = "") -> Iterator[str]:
    """Yield the texts of file `name` in this process's control group and its parents. Version 2 has no `controller`."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                root = pathlib.Path("/sys/fs/cgroup", controller)
                group = root / path.lstrip("/")
                for folder in (group, *group.parents):
                    with contextlib.suppress(OSError):
                        yield (folder / name).read_text()
                    if folder == root:
                        break


def _memory() -> Facts:
    found: Facts = {"kills": 0}
    with contextlib.suppress(OSError):
        rows = pathlib.Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (row.partition(":") for row in rows)}
        found["available"] = sizes["MemAvailable"]
    for text in (*_cgroup("memory.events"), *_cgroup("memory.oom_control", "memory")):
        counts = dict(line.split() for line in text.splitlines())
        found["kills"] = max(found["kills"], int(counts.get("oom_kill", 0)))
    with contextlib.suppress(OSError):
        found["shared"] = shutil.disk_usage("/dev/shm").total
    with contextlib.suppress(ImportError):
        import resource

        found["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return found


def _gpus() -> Facts:
    models = sorted(pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [file.read_text().partition("Model:")[2].partition("\n")[0].strip() for file in models]
    return {"visible": jobs.visible_gpus(), "models": names}


def _name() -> Facts:
    host = socket.gethostname()
    return {"host": host, "resolves": _resolved(host), "interfaces": _interfaces()}


def _interfaces() -> dict[str, str]:
    """Return the state of each network interface, such as "up" or "down"."""
    states = {name: pathlib.Path("/sys/class/net", name, "operstate") for _, name in socket.if_nameindex()}
    return {name: file.read_text().strip() if file.exists() else "unknown" for name, file in states.items()}


def _resolved(host: str) -> list[str] | str:
    """Return the IP addresses of a host name, or the error as text."""
    try:
        return sorted({str(row[4][0]) for row in socket.getaddrinfo(host, None)})
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)


def _addresses() -> list[Facts]:
    """Return the addresses that environment variables contain. Test whether this process can listen on its own."""
    rank, variables, named = _place()[1], os.environ, list[tuple[str, bool]]()
    if "MASTER_ADDR" in variables:
        serves = rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        named.append((f"{variables['MASTER_ADDR']}:{variables.get('MASTER_PORT', '')}", serves))
    if "KERAS_DISTRIBUTION_JOB_ADDRESSES" in variables:
        named.append((variables["KERAS_DISTRIBUTION_JOB_ADDRESSES"].partition(",")[0], rank == 0))
    with contextlib.suppress(LookupError, ValueError, TypeError):
        named += [(address, number == rank) for number, address in enumerate(_tf_tasks()[0])]
    found = []
    for address, serves in named:
        host, _, port = address.rpartition(":")
        fact: Facts = {"address": address, "serves": serves, "resolves": _resolved(host), "port": port, "error": None}
        if serves and port.isdecimal() and not isinstance(fact["resolves"], str):
            fact["error"] = _bind_error(fact["resolves"][0], int(port))
        found.append(fact)
    return found


def _bind_error(host: str, port: int) -> list[Any] | None:
    """Return number and text of the error that prevents this machine from serving an address, or None."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return [getattr(error, "errno", None), str(error)]
    return None


def _files(path: str) -> Facts:
    found: Facts = {"path": path, "kind": "", "error": None, "renames": True, "locks": True}
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
        inside = [(len(point), kind) for point, kind in mounts if os.path.commonpath([point, path]) == point]
        found["kind"] = max(inside)[1]
    try:
        found["free"] = shutil.disk_usage(path).free
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=path) as folder:
            new, old = pathlib.Path(folder, "new"), pathlib.Path(folder, "old")
            old.write_bytes(b"old")
            with open(new, "wb") as file:
                file.write(b"new" * 2**20)
                file.flush()
                os.fsync(file.fileno())
            with open(old, "rb") as reader:  # a file that is open must keep the old content when it is replaced
                os.replace(new, old)
                found["renames"] = reader.read() == b"old" and old.read_bytes()[:3] == b"new" and not new.exists()
            with contextlib.suppress(ImportError), open(old, "rb+") as file:
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    found["locks"] = False
    except OSError as error:
        found["error"] = [error.errno, error.strerror or str(error)]
    return found
