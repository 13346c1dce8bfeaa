"""The checks of a job. A check gets facts (a dict of settings and measurements per process), and yields findings.

A new check is a function and a row of `CHECKS`. If processes could not connect, a check gets the facts of one process.
"""

from __future__ import annotations

import errno
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from keras_shardopt.backends.phases import rounded
from keras_shardopt.doctor.facts import Facts
from keras_shardopt.doctor.together import SIZES

OK, WARNING, ERROR = "OK", "warning", "error"
Ranks = Sequence[Facts]


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    """`OK`, `WARNING` or `ERROR`."""

    text: str
    remedy: str = ""


def findings(ranks: Ranks) -> list[tuple[str, Finding]]:
    """Return the findings of all checks, each with the name of its check. Never raises."""
    found: list[tuple[str, Finding]] = []
    for name, (fact, check) in CHECKS.items():
        able = [rank for rank in ranks if fact in rank]
        try:
            found += [(name, finding) for finding in (check(able) if able else ())]
        except Exception as error:
            text = f"the check failed with {type(error).__name__}: {error}"
            found.append((name, Finding(WARNING, text, "Report this, with the output of `--json`.")))
    return found


def number_of(rank: Facts) -> int:
    """Return the number of the process that the facts `rank` describe."""
    return int(rank.get("world", {}).get("process", rank.get("process", {}).get("rank", 0)))


def on(ranks: Ranks) -> str:
    """Return the numbers of the processes in `ranks` as text, such as "processes 0, 2" (at most 8 numbers)."""
    numbers = sorted(map(number_of, ranks))
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"


def _groups(ranks: Ranks, value: Callable[[Facts], Any]) -> list[tuple[Any, list[Facts]]]:
    """Return the different results of `value`, each with the processes that have this result."""
    found: list[tuple[Any, list[Facts]]] = []
    for rank in ranks:
        mine = value(rank)
        same = next((group for other, group in found if other == mine), None)
        if same is None:
            found.append((mine, [rank]))
        else:
            same.append(rank)
    return found


def _by_value(ranks: Ranks, value: Callable[[Facts], Any]) -> str:
    return "; ".join(f"{text} on {on(group)}" for text, group in _groups(ranks, value))


def _each(ranks: Ranks, check: Callable[[Facts], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of `check` for each process. Equal findings appear once, with their processes."""
    pairs = [(finding, rank) for rank in ranks for finding in dict.fromkeys(check(rank))]
    for finding in dict.fromkeys(finding for finding, _ in pairs):
        group = [rank for other, rank in pairs if other == finding]
        suffix = f" ({on(group)})" if len(group) < len(ranks) else ""
        yield finding._replace(text=finding.text + suffix)


def _difference(ranks: Ranks, fact: str, level: str, remedy: str) -> Iterator[Finding]:
    """Compare a fact (a dict) of all processes. Yield a finding per key with different values, or one OK finding."""
    entries = list(dict.fromkeys(entry for rank in ranks for entry in rank[fact]))
    differing = [entry for entry in entries if len(_groups(ranks, lambda rank: rank[fact].get(entry))) > 1]  # noqa: B023
    for entry in differing:
        text = _by_value(ranks, lambda rank: f"{entry} {rank[fact].get(entry, 'is missing')}")  # noqa: B023
        yield Finding(level, text, remedy)
    if not differing:
        yield Finding(OK, ", ".join(f"{entry} {value}" for entry, value in ranks[0][fact].items()))


# -- one check per function -----------------------------------------------------------------------------------------


def _failed(ranks: Ranks) -> Iterator[Finding]:
    def of_one(rank: Facts) -> Iterator[Finding]:
        for name, error in rank["failed"].items():
            remedy = "Look for a file server or name server that does not answer."
            yield Finding(ERROR, f"the facts about {name} are missing: {error}", remedy)

    return _each(ranks, of_one)


def _connection(ranks: Ranks) -> Iterator[Finding]:
    size = ranks[0]["process"]["size"]
    remedy = (
        f"Fix the other errors, start all {size} processes at about the same time with the same address, and open the "
        "port of this address in firewalls."
    )
    return _each(ranks, lambda rank: [Finding(ERROR, rank["connection"], remedy)])


def _versions(ranks: Ranks) -> Iterator[Finding]:
    return _difference(ranks, "versions", ERROR, "Install the same versions everywhere, as listed by `pip freeze`.")


def _config(ranks: Ranks) -> Iterator[Finding]:
    remedy = "Set one value in the program, or use one keras.json everywhere."
    return _difference(ranks, "keras", ERROR, remedy)


_SIZES = {
    "WORLD_SIZE": ("RANK", "MASTER_ADDR", "MASTER_PORT"),
    "KERAS_DISTRIBUTION_NUM_PROCESSES": ("KERAS_DISTRIBUTION_PROCESS_ID", "KERAS_DISTRIBUTION_JOB_ADDRESSES"),
    "TF_CONFIG": (),
}
"""Environment variables that make a process part of a job, each with the other variables that it needs."""

_READERS = {"WORLD_SIZE": "PyTorch", "KERAS_DISTRIBUTION_NUM_PROCESSES": "JAX", "TF_CONFIG": "TensorFlow"}

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "JAX_DISABLE_JIT": "1",
    "JAX_DEBUG_NANS": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
"""Settings for debugging that slow training down."""


def _environment(ranks: Ranks) -> Iterator[Finding]:
    found = list(_each(ranks, lambda rank: _contradictions(rank["environment"], rank["process"])))
    for name in ("KERAS_BACKEND", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "KERAS_DISTRIBUTION_JOB_ADDRESSES"):
        if len(_groups(ranks, lambda rank: rank["environment"].get(name))) > 1:  # noqa: B023
            text = _by_value(ranks, lambda rank: f"{name}={rank['environment'].get(name, '')}")  # noqa: B023
            found.append(Finding(ERROR, text, f"Set the same {name} for all processes."))
    yield from found or [Finding(OK, "no contradicting variables")]


def _contradictions(variables: dict[str, str], process: Facts) -> Iterator[Finding]:
    jobs = [name for name in _SIZES if name in variables]
    for name in jobs:
        missing = [other for other in _SIZES[name] if not variables.get(other)]
        if missing and variables[name] != "1":
            start = "Start the program with `python -m keras_shardopt.launch`, or set all these variables."
            yield Finding(ERROR, f"{name}={variables[name]} without {', '.join(missing)}", start)
        if _READERS[name] != process["framework"] and variables[name] != "1":
            fix = f"Unset {name}, or set KERAS_BACKEND={_READERS[name].lower().replace('py', '')} in all processes."
            yield Finding(ERROR, f"{name} is for {_READERS[name]}, but Keras uses {process['framework']}", fix)
    if len(jobs) > 1:
        yield Finding(ERROR, f"{' and '.join(jobs)} describe two different jobs", f"Unset {' or '.join(jobs)}.")
    if process["command"] and jobs and f" {process['size']} " not in process["command"]:
        text = f"{jobs[0]} sets {process['size']} processes, which contradicts the job's command: {process['command']}"
        yield Finding(ERROR, text, f"Unset {jobs[0]}, because `data_parallel()` sets it.")
    if not 0 <= process["rank"] < process["size"]:
        text = f"rank {process['rank']} of {process['size']} processes"
        yield Finding(ERROR, text, "Number the processes from 0 to the number of processes minus 1.")
    try:
        task = json.loads(variables.get("TF_CONFIG", '{"cluster": {"worker": [0]}, "task": {"index": 0}}'))
        task["cluster"][task["task"].get("type", "worker")][task["task"]["index"]]
    except (ValueError, LookupError, TypeError) as error:
        text = f"TF_CONFIG does not describe this worker ({type(error).__name__}: {error})"
        yield Finding(
            ERROR, text, 'Write JSON: {"cluster": {"worker": ["host:port"]}, "task": {"type": .., "index": ..}}.'
        )
    for name, value in _SLOW.items():
        if variables.get(name, "").upper() in (value, *(["TRUE"] if value == "1" else [])):
            yield Finding(WARNING, f"{name}={variables[name]} slows training down", f"Unset {name}.")
    threads = variables.get("OMP_NUM_THREADS", "1").split(",")[0]
    if not threads.isdecimal() or int(threads) < 1:
        yield Finding(ERROR, f"OMP_NUM_THREADS={threads} is not a number of threads", "Set a number of at least 1.")
    if {"http_proxy", "https_proxy"} & variables.keys() and "no_proxy" not in variables:
        text = "a proxy is set without no_proxy, and TensorFlow's and JAX's connections can go through it"
        yield Finding(WARNING, text, "Set no_proxy to the names and addresses of all machines.")


def _kind(rank: Facts) -> tuple[int, str]:
    devices = rank["world"]["devices"]
    return len(devices), devices[0].partition(":")[0]


def _devices(ranks: Ranks) -> Iterator[Finding]:
    text = "; ".join(f"{n} {kind} on {on(group)}" for (n, kind), group in _groups(ranks, _kind))
    models = sorted({model for rank in ranks for model in rank.get("gpus", {}).get("models", ())})
    found = []
    if len(_groups(ranks, _kind)) > 1:
        remedy = "Give each process the same devices: CUDA_VISIBLE_DEVICES, or `--devices-per-process` of the launcher."
        found.append(Finding(ERROR, f"different devices: {text}", remedy))
    idle = [rank for rank in ranks if rank.get("gpus", {}).get("visible") and _kind(rank)[1] == "cpu"]
    if idle:
        remedy = "Install the framework's build for GPUs and its driver, or set CUDA_VISIBLE_DEVICES= to use the CPU."
        found.append(Finding(WARNING, f"GPUs are visible, and {on(idle)} uses the CPU", remedy))
    used = _groups(
        ranks, lambda r: (r["process"]["machine"], r["environment"].get("CUDA_VISIBLE_DEVICES"), *r["world"]["devices"])
    )
    if _kind(ranks[0])[1] == "cuda":  # PyTorch: ranks can share a GPU. JAX gives each device of a job its own name
        for (*_, device), group in used:
            if len(group) > 1:
                remedy = "Start one process per GPU, with LOCAL_RANK from 0, as torchrun and the launcher set it."
                found.append(Finding(ERROR, f"{on(group)} share {device}", remedy))
    yield from found or [Finding(OK, ", ".join([text, *models]))]


_THREADS = {"PyTorch": "OMP_NUM_THREADS", "TensorFlow": "TF_NUM_INTRAOP_THREADS", "JAX": "NPROC"}
"""By framework, the environment variable for its number of threads. Without it, a framework uses all cores."""


def _threads(ranks: Ranks) -> Iterator[Finding]:
    for _, group in _groups(ranks, lambda rank: rank["process"]["machine"]):
        first = group[0]
        allowed = [len({core for rank in group for core in rank["cores"]["ids"]}), first["cores"]["limit"] or 1e9]
        cores, name = max(1, int(min(allowed))), _THREADS.get(first["process"]["framework"], "")
        given = [rank["environment"].get(name, "") for rank in group]
        threads = [int(n) if n.isdecimal() else len(rank["cores"]["ids"]) for n, rank in zip(given, group)]
        text = f"{sum(threads)} threads of {len(group)} processes on {cores} cores of {first['process']['host']}"
        if cores < allowed[0]:
            text += f" (the container may use {allowed[1]:g} of {allowed[0]} cores)"
        each = max(1, cores // len(group))
        fix = f"Set {name}={each} for each process."
        if name == "NPROC":
            fix = (
                "Give each process some of the cores (`taskset -c`, `srun --cpus-per-task`), or start fewer processes."
            )
        on_cpu = all(rank.get("world", {}).get("devices", ["cpu"])[0].startswith("cpu") for rank in group)
        if sum(threads) > cores and sum(threads) > len(group):
            yield Finding(WARNING, f"more threads than cores: {text}", fix)
        elif len(group) > cores:
            yield Finding(WARNING, f"more processes than cores: {text}", "Start fewer processes, or raise the limit.")
        elif on_cpu and sum(threads) <= cores // 2 and any(given):
            yield Finding(WARNING, f"idle cores: {text}", fix)
        elif first["cores"]["load"] > 2 * cores + sum(threads):
            busy = f"other programs run on {first['process']['host']}: load {first['cores']['load']:g} on {cores} cores"
            yield Finding(WARNING, busy, "End these programs (find them with `top`), or use another machine.")
        else:
            yield Finding(OK, text)


def _memory(ranks: Ranks) -> Iterator[Finding]:
    def of_one(rank: Facts) -> Iterator[Finding]:
        memory = rank["memory"]
        if memory.get("available", 1e12) < 1e9:
            text = f"only {_size(memory['available'])} of memory is available"
            yield Finding(WARNING, text, "End other programs, or start fewer processes.")
        if memory["kills"]:
            text = f"the kernel has killed {memory['kills']} processes here for lack of memory"
            yield Finding(WARNING, text, "Raise the memory limit of the container or job, or start fewer processes.")
        if memory.get("shared", 1e12) <= 2**26:
            text = f"/dev/shm has only {_size(memory['shared'])}, which NCCL and data loaders need"
            yield Finding(WARNING, text, "Start the container with `--shm-size=8g` or `--ipc=host`.")
        if 0 <= memory.get("files", -1) < 1024:
            text = f"a process can open only {memory['files']} files and connections"
            yield Finding(WARNING, text, "Run `ulimit -n 65536`.")

    available = min(rank["memory"].get("available", 0) for rank in ranks)
    yield from list(_each(ranks, of_one)) or [Finding(OK, f"{_size(available)} available")]


def _network(ranks: Ranks) -> Iterator[Finding]:
    num_machines = len(_groups(ranks, lambda rank: rank["process"]["machine"]))
    wanted = "Set it to one of"

    def of_one(rank: Facts) -> Iterator[Finding]:
        name, variables = rank["name"], rank["environment"]
        interfaces, host = name["interfaces"], name["host"]
        if isinstance(name["resolves"], str):
            text = f"the name of this machine, {host}, does not resolve: {name['resolves']}"
            yield Finding(ERROR, text, f"Add a line to /etc/hosts: `<address> {host}`.")
        elif num_machines > 1 and not variables.get("GLOO_SOCKET_IFNAME"):
            local = [address for address in name["resolves"] if address.startswith(("127.", "::1"))]
            if local == name["resolves"]:
                text = f"{host} resolves to {name['resolves'][0]}, which other machines cannot reach"
                yield Finding(ERROR, text, "Correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the network's interface.")
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            given = variables.get(variable, "")
            for each in given.split(",") if given and given[0] != "^" else ():
                prefix = each.removeprefix("=").partition(":")[0]
                is_prefix = variable[:4] == "NCCL" and each[0] != "="
                found = [name for name in interfaces if name == prefix or (is_prefix and name.startswith(prefix))]
                if not found:
                    fix = f"{wanted}: {', '.join(interfaces)}."
                    yield Finding(ERROR, f"{variable} names the interface {each}, which does not exist", fix)
                elif all(interfaces[name] == "down" for name in found):
                    yield Finding(
                        ERROR, f"the interface {found[0]} of {variable} is down", f"`ip link set {found[0]} up`"
                    )

    names = "; ".join(dict.fromkeys(rank["name"]["host"] for rank in ranks))
    listed = ", ".join(dict.fromkeys(name for rank in ranks for name in rank["name"]["interfaces"]))
    yield from list(_each(ranks, of_one)) or [Finding(OK, f"{names} resolves; interfaces {listed}")]


def _addresses(ranks: Ranks) -> Iterator[Finding]:
    def of_one(rank: Facts) -> Iterator[Finding]:
        for fact in rank["addresses"]:
            address, host = fact["address"], fact["address"].rpartition(":")[0]
            number, why = fact["error"] or (None, "")
            if isinstance(fact["resolves"], str):
                text = f"{host} of the job's address {address} does not resolve: {fact['resolves']}"
                yield Finding(ERROR, text, "Correct the name, use an IP address, or add the name to /etc/hosts.")
            elif not fact["port"].isdecimal() or not 0 < int(fact["port"]) < 65536:
                text = f"the job's address {address} has no valid port"
                yield Finding(ERROR, text, "Use HOST:PORT with a free port, such as 29500.")
            elif number == errno.EADDRINUSE:
                fix = f"Choose another port, or end the program that `ss -ltnp 'sport = :{fact['port']}'` names."
                yield Finding(ERROR, f"another program uses the port of {address}", fix)
            elif number == errno.EADDRNOTAVAIL:
                # Only warn if the processes are connected nevertheless, such as by address translation.
                level = WARNING if "world" in rank else ERROR
                text = f"this process must listen at {address}, but its machine has no such address"
                yield Finding(level, text, "Use an address of this machine, or start process 0 on that machine.")
            elif number is not None:
                yield Finding(ERROR, f"this process cannot listen at {address}: {why}", "Choose another port.")

    addresses = dict.fromkeys(fact["address"] for rank in ranks for fact in rank["addresses"])
    ok = [Finding(OK, ", ".join(addresses))] if addresses else []
    yield from list(_each(ranks, of_one)) or ok


def _all_reduce(ranks: Ranks) -> Iterator[Finding]:
    replicas = ranks[0]["world"]["replicas"]
    times = {name: max(rank["reduce"][name] for rank in ranks) for name in ranks[0]["reduce"]}
    memory = min(rank["memory_speed"] for rank in ranks)
    sent = 2 * (replicas - 1) / replicas
    text = ", ".join(f"{name} {rounded(1e3 * seconds, 2)} ms" for name, seconds in times.items())
    name, seconds = list(times.items())[-1]
    speed = sent * SIZES[name][0] / seconds
    text += (
        f": a replica sends {rounded(speed / 1e9, 2)} GB/s; a copy in memory reaches {rounded(memory / 1e9, 2)} GB/s"
    )
    fix = "Set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the fastest network; see the page Slow network."
    if "64 MB" not in times or speed < 0.02 * memory:
        yield Finding(WARNING, f"slow all-reduce: {text}", fix)
    elif times["1 KB"] > 0.01:
        fix = "Look for busy machines and for a detour of the network (`ping`); see the page Slow network."
        yield Finding(WARNING, f"slow start of an all-reduce: {text}", fix)
    else:
        yield Finding(OK, text)


def _memory_speed(ranks: Ranks) -> Iterator[Finding]:
    median = statistics.median(rank["memory_speed"] for rank in ranks)
    slow = [rank for rank in ranks if rank["memory_speed"] < median / 2]
    if slow:
        speeds = ", ".join(rounded(rank["memory_speed"] / 1e9, 2) for rank in slow)
        text = f"{on(slow)} copies memory at {speeds} GB/s, less than half the median ({rounded(median / 1e9, 2)} GB/s)"
        yield Finding(WARNING, text, "Look for other programs, swapping or throttling on that machine.")


def _clocks(ranks: Ranks) -> Iterator[Finding]:
    ticks = [rank["clock"] for rank in ranks]
    offsets = [statistics.median(a - b for a, b in zip(mine, ticks[0])) for mine in ticks]
    spread = max(offsets) - min(offsets)
    late = max(ranks, key=lambda rank: abs(offsets[ranks.index(rank)] - statistics.median(offsets)))
    if spread > 1:
        text = f"clocks differ by {spread:.3g} s, mostly the clock of {on([late])} on {late['process']['host']}"
        fix = "Synchronize the clocks: `timedatectl set-ntp true`, or chrony. Logs and file times disagree until then."
        yield Finding(WARNING, text, fix)
    elif len(ranks) > 1:
        yield Finding(OK, f"within {1e3 * spread:.2g} ms")


_REMEDIES = {
    errno.ENOSPC: "Free space there, or choose another directory.",
    errno.EDQUOT: "Free space in your quota, or choose another directory.",
    errno.EROFS: "Mount the file system writable, or choose another directory.",
    errno.EACCES: "Change the owner or mode of the directory (`ls -ld`), or choose another directory.",
    errno.ENOENT: "Create the directory on every machine, or correct `--directory`.",
    errno.ENOTDIR: "Name a directory with `--directory`.",
    errno.ESTALE: "Mount the file system again.",
}


def _files(ranks: Ranks) -> Iterator[Finding]:
    def of_one(rank: Facts) -> Iterator[Finding]:
        files = rank["files"]
        path, (number, why) = files["path"], files["error"] or (None, "")
        if number is not None:
            yield Finding(ERROR, f"cannot write in {path}: {why}", _REMEDIES.get(number, "Choose another directory."))
            return
        if files["free"] < 1e9:
            text = f"only {_size(files['free'])} of disk space is free in {path}"
            yield Finding(WARNING, text, _REMEDIES[errno.ENOSPC])
        if not files["renames"]:
            text = f"a rename in {path} ({files['kind']}) is not atomic, so a killed job can damage its files"
            yield Finding(ERROR, text, "Save to a local disk or a POSIX file system, and copy from there.")
        if not files["locks"]:
            text = f"{path} ({files['kind']}) has no file locks, so temporary files of killed jobs stay for an hour"
            yield Finding(WARNING, text, "Mount the file system with locks, or choose another directory.")

    found = list(_each(ranks, of_one))
    first = ranks[0]["files"]
    groups = _groups([rank for rank in ranks if "shares" in rank], lambda rank: rank["shares"])
    apart = len(groups) > 1 and not any(finding.level == ERROR for finding in found)
    if apart:
        text = f"{first['path']} is a different directory on {' / '.join(on(group) for _, group in groups)}"
        fix = "Name a shared directory, or use `ks.callbacks.BackupAndRestore`, where only process 0 writes."
        found.append(Finding(WARNING, text, fix))
    shared = ", shared by all processes" if len(ranks) > 1 and not apart else ""
    yield from found or [Finding(OK, f"{first['path']} ({first['kind']}), {_size(first['free'])} free{shared}")]


_DETERMINISTIC = {
    "PyTorch": ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", " Call `torch.use_deterministic_algorithms(True)`."),
    "TensorFlow": ("TF_DETERMINISTIC_OPS", "1", ""),
    "JAX": ("XLA_FLAGS", "--xla_gpu_deterministic_ops=true", ""),
}


def _reproducible(ranks: Ranks) -> Iterator[Finding]:
    framework = ranks[0]["process"]["framework"]
    models = _groups(ranks, lambda rank: rank["cores"]["model"])
    found = []
    if len(models) > 1:
        text = _by_value(ranks, lambda rank: rank["cores"]["model"])
        fix = "Use equal machines, or accept different rounding if processes move to other machines."
        found.append(Finding(WARNING, f"results may differ in their last bits: different processors, {text}", fix))
    name = _THREADS.get(framework, "")

    def threads(rank: Facts) -> str:
        return rank["environment"].get(name) or f"{len(rank['cores']['ids'])} (its cores)"

    if len(_groups(ranks, threads)) > 1:
        text = f"results may differ in their last bits: different numbers of threads, {_by_value(ranks, threads)}"
        found.append(Finding(WARNING, text, f"Set the same {name} for all processes."))
    variable, value, more = _DETERMINISTIC.get(framework, ("", "", ""))
    on_gpu = [rank for rank in ranks if not rank["world"]["devices"][0].startswith("cpu")]
    if any(value not in rank["environment"].get(variable, "") for rank in on_gpu):
        text = "results may differ in their last bits: operations on accelerators can be nondeterministic"
        found.append(Finding(WARNING, text, f"For equal results, set {variable}={value}.{more}"))
    same = f"runs with {ranks[0]['world']['replicas']} replicas, {name}={threads(ranks[0])} and one seed"
    yield from found or [Finding(OK, f"{same} are bitwise equal; see the page Reproducibility")]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2g} MB"


CHECKS: dict[str, tuple[str, Callable[[Ranks], Iterator[Finding]]]] = {
    "facts": ("failed", _failed),
    "connection": ("connection", _connection),
    "versions": ("versions", _versions),
    "Keras": ("keras", _config),
    "environment": ("environment", _environment),
    "devices": ("world", _devices),
    "threads": ("cores", _threads),
    "memory": ("memory", _memory),
    "network": ("name", _network),
    "addresses": ("addresses", _addresses),
    "all-reduce": ("reduce", _all_reduce),
    "memory speed": ("memory_speed", _memory_speed),
    "clocks": ("clock", _clocks),
    "directory": ("files", _files),
    "reproducible": ("world", _reproducible),
}
"""The checks by name, each with the fact that it needs. A check gets only the processes that have this fact."""
