"""Each check finds its fault in the facts of two processes, gives a remedy, and finds nothing in a sound job."""

import copy
import errno
import json
import time

import pytest

from keras_shardopt.backends.phases import rounded
from keras_shardopt.doctor import __main__ as command
from keras_shardopt.doctor import checks, facts

pytestmark = pytest.mark.neutral


def rank(number):
    machine = f"m{number}"
    return {
        "failed": {},
        "process": {
            "host": f"node{number}",
            "machine": machine,
            "size": 2,
            "rank": number,
            "command": None,
            "framework": "PyTorch",
        },
        "world": {"process": number, "processes": 2, "replicas": 2, "devices": ["cpu"]},
        "versions": {"Python": "3.12.1", "keras": "3.15.1", "torch": "2.13.0"},
        "keras": {"floatx": "float32", "epsilon": "1e-07"},
        "environment": {
            "WORLD_SIZE": "2",
            "RANK": str(number),
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "4",
        },
        "cores": {"ids": [0, 1, 2, 3], "limit": None, "model": "Xeon", "load": 0.2},
        "memory": {"available": 8e9, "kills": 0, "shared": 8e9, "files": 65536},
        "gpus": {"visible": [], "models": []},
        "name": {
            "host": f"node{number}",
            "resolves": [f"10.0.0.{number}"],
            "interfaces": {"lo": "unknown", "eth0": "up"},
        },
        "addresses": [
            {"address": "node0:29500", "serves": number == 0, "resolves": ["10.0.0.0"], "port": "29500", "error": None}
        ],
        "files": {
            "path": "/data",
            "kind": "nfs4",
            "error": None,
            "renames": True,
            "locks": True,
            "free": 5e11,
        },
        "shares": [0, 1],
        "memory_speed": 1e10,
        "clock": [100.0, 101.0, 102.0],
        "reduce": {"1 KB": 2e-4, "1 MB": 2e-3, "64 MB": 6e-2},
    }


def not_ok(ranks):
    return [(name, finding) for name, finding in checks.findings(ranks) if finding.level != checks.OK]


def test_a_sound_job_has_no_findings():
    found = checks.findings([rank(0), rank(1)])
    assert all(finding.level == checks.OK and not finding.remedy for _, finding in found), found
    silent = {"facts", "connection", "memory speed"}  # these name faults only
    assert {name for name, _ in found} == checks.CHECKS.keys() - silent


GPU = {"world": {"process": 1, "processes": 2, "replicas": 2, "devices": ["cuda:0"]}}
GPU_0 = {"world": {**GPU["world"], "process": 0}}
JAX = {"process": {"framework": "JAX"}}
# By fault: changes of process 0 and 1, then level, check and text of the finding.
FAULTS = {
    "keras version": ({}, {"versions": {"keras": "3.12.0"}}, "error", "versions", "keras 3.12.0 on process 1"),
    "package missing": ({}, {"versions": {"jax": "0.9"}}, "error", "versions", "jax is missing on process 0"),
    "Python version": ({}, {"versions": {"Python": "3.10.1"}}, "error", "versions", "Python 3.10.1 on process 1"),
    "floatx": ({}, {"keras": {"floatx": "float16"}}, "error", "Keras", "floatx float16 on process 1"),
    "two addresses": ({}, {"environment": {"MASTER_ADDR": "b"}}, "error", "environment", "MASTER_ADDR=b on process 1"),
    "a missing variable": ({"environment": {"RANK": ""}}, {}, "error", "environment", "WORLD_SIZE=2 without RANK"),
    "debugging": ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, {}, "warning", "environment", "slows training down"),
    "srun's size": (
        {"process": {"command": "srun with 4 processes"}},
        {},
        "error",
        "environment",
        "sets 2 processes",
    ),
    "rank out of range": ({}, {"process": {"rank": 2}}, "error", "environment", "rank 2 of 2 processes"),
    "idle GPUs": ({"gpus": {"visible": ["0"]}}, {}, "warning", "devices", "process 0 uses the CPU"),
    "devices differ": ({}, {"world": {"devices": ["cpu", "cpu"]}}, "error", "devices", "2 cpu on process 1"),
    "threads": (
        {"environment": {"OMP_NUM_THREADS": "8"}},
        {},
        "warning",
        "threads",
        "more threads than cores: 8 threads",
    ),
    "container's limit": ({"cores": {"limit": 2.0}}, {}, "warning", "threads", "may use 2 of 4 cores"),
    "idle cores": ({"environment": {"OMP_NUM_THREADS": "1"}}, {}, "warning", "threads", "idle cores: 1 threads"),
    "busy machine": ({"cores": {"load": 40.0}}, {}, "warning", "threads", "other programs run on node0: load 40"),
    "little memory": ({"memory": {"available": 5e8}}, {}, "warning", "memory", "only 0.5 GB of memory"),
    "killed processes": ({"memory": {"kills": 3}}, {}, "warning", "memory", "killed 3 processes"),
    "/dev/shm": ({"memory": {"shared": 2**26}}, {}, "warning", "memory", "/dev/shm has only 67 MB"),
    "few open files": ({"memory": {"files": 256}}, {}, "warning", "memory", "only 256 files"),
    "a name": ({"name": {"resolves": "unknown"}}, {}, "error", "network", "node0, does not resolve: unknown"),
    "a name of loopback": (
        {"name": {"resolves": ["127.0.1.1"]}},
        {},
        "error",
        "network",
        "which other machines cannot",
    ),
    "interface": ({"environment": {"NCCL_SOCKET_IFNAME": "=eth"}}, {}, "error", "network", "names the interface =eth,"),
    "slow network": ({"reduce": {"64 MB": 0.6}}, {}, "warning", "all-reduce", "slow all-reduce"),
    "latency": ({}, {"reduce": {"1 KB": 0.02}}, "warning", "all-reduce", "slow start"),
    "clock": ({}, {"clock": [103.0, 104.0, 105.0]}, "warning", "clocks", "differ by 3 s"),
    "full": ({"files": {"error": [errno.ENOSPC, "No space left"]}}, {}, "error", "directory", "/data: No space left"),
    "nearly full": (
        {"files": {"free": 5e7}},
        {},
        "warning",
        "directory",
        "only 50 MB of disk space is free in /data (process 0)",
    ),
    "rename": ({"files": {"renames": False, "kind": "fuse"}}, {}, "error", "directory", "is not atomic"),
    "locks": ({"files": {"locks": False}}, {}, "warning", "directory", "has no file locks"),
    "two directories": ({"shares": [0]}, {"shares": [1]}, "warning", "directory", "process 0 / process 1"),
    "processors": ({"cores": {"model": "Epyc"}}, {}, "warning", "reproducible", "Epyc on process 0; Xeon on process 1"),
    "no connection": ({"connection": "refused"}, {}, "error", "connection", "refused"),
    "a dead server": ({"failed": {"files": "no answer"}}, {}, "error", "facts", "about files are missing: no answer"),
}


def changed(before, changes):
    after = copy.deepcopy(before)
    for fact, value in changes.items():
        if isinstance(value, dict):
            after.setdefault(fact, {}).update(value)
        else:
            after[fact] = value
    return after


# A finding that comes with another one.
WITH = {"threads": "reproducible", "idle cores": "reproducible"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_a_remedy(fault):
    first, second, level, check, text = FAULTS[fault]
    found = not_ok([changed(rank(0), first), changed(rank(1), second)])
    assert {name for name, _ in found} == {check, WITH.get(fault, check)}, found
    (finding,) = [finding for name, finding in found if name == check]
    assert finding.level == level and text in finding.text and len(finding.remedy) > 10, finding


def test_gpus():
    on_gpus = [changed(rank(number), each) for number, each in enumerate((GPU_0, GPU))]
    for each in on_gpus:
        each["environment"]["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    assert not not_ok(on_gpus)
    on_gpus[1]["process"]["machine"] = "m0"
    assert [finding.text for name, finding in not_ok(on_gpus) if name == "devices"] == ["processes 0, 1 share cuda:0"]
    del on_gpus[0]["environment"]["CUBLAS_WORKSPACE_CONFIG"]
    assert "CUBLAS_WORKSPACE_CONFIG" in next(f.remedy for name, f in not_ok(on_gpus) if name == "reproducible")


def test_a_slow_memory_is_that_of_one_process():
    ranks = [changed(rank(number), {"memory_speed": speed}) for number, speed in enumerate((1e10, 1e10, 4e9))]
    ranks[2]["process"].update(rank=1, size=3)
    (finding,) = [finding for name, finding in not_ok(ranks) if name == "memory speed"]
    assert finding.level == "warning" and "copies memory at 4 GB/s" in finding.text


def test_a_check_that_fails_is_a_finding():
    broken = changed(rank(0), {})
    del broken["memory"]["kills"]
    ((name, finding),) = not_ok([broken])
    assert name == "memory" and "KeyError" in finding.text


def test_a_collector_that_hangs_leaves_the_facts_of_others(monkeypatch, tmp_path):
    monkeypatch.setattr(facts, "_files", lambda path: time.sleep(3))
    found = facts.local(str(tmp_path), seconds=0.5)
    assert found["failed"]["files"] == "no answer within 0.5 s" and "files" not in found
    assert {"process", "versions", "cores", "name"} <= found.keys()


def test_secrets_are_not_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("KERAS_HUB_KEY", "hidden")
    monkeypatch.setenv("TORCHSERVE_TOKEN", "hidden")
    monkeypatch.setenv("http_proxy", "http://user:hidden@proxy:3128")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = facts.local(str(tmp_path))["environment"]
    assert found["http_proxy"] == "http://...@proxy:3128"
    assert found["OMP_NUM_THREADS"] == "3" and "hidden" not in found.values()


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (
            "Traceback\n  File\nRuntimeError: All 2 ranks must be started.\n",
            "RuntimeError: All 2 ranks must be started.",
        ),
        ("Timeout (0:00:03)!\nThread 0x1\n  File", "no answer from all processes within 3 s"),
        ("F0 client.h:80] DEADLINE_EXCEEDED: late\nin abort", "F0 client.h:80] DEADLINE_EXCEEDED: late"),
        ("", "exit status 1"),
    ],
)
def test_the_error_of_a_child_is_found(output, error):
    assert command._error_in(output, 1, 3) == error


def test_the_table_has_a_line_per_finding_and_remedy():
    ranks = [rank(0), changed(rank(1), {"keras": {"floatx": "float16"}})]
    lines = command._table(ranks, checks.findings(ranks)).splitlines()
    assert lines[0] == "keras_shardopt doctor: 2 processes, 2 replicas, PyTorch"
    (at,) = [number for number, line in enumerate(lines) if line.startswith("error    Keras         floatx float32 on")]
    assert lines[at + 1].strip().startswith("-> Set one value in the program")
    assert lines[-1].startswith("error: 1, warning: 0, OK: ")


def test_a_chief_is_the_first_process_of_tensorflow(monkeypatch, tmp_path):
    config = {"cluster": {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}}
    for kind, index, rank in [("chief", 0, 0), ("worker", 1, 2)]:
        monkeypatch.setenv("TF_CONFIG", json.dumps({**config, "task": {"type": kind, "index": index}}))
        found = facts.local(str(tmp_path))
        assert (found["process"]["size"], found["process"]["rank"]) == (3, rank)
        assert [each["serves"] for each in found["addresses"]] == [number == rank for number in range(3)]


@pytest.mark.parametrize("seconds", ["0", "-5", "nan", "inf", "soon"])
def test_a_timeout_that_is_no_time(seconds, capsys):
    with pytest.raises(SystemExit):
        command.main(["--timeout", seconds])
    assert "--timeout" in capsys.readouterr().err


def test_numbers_have_no_exponent():
    found = [rounded(number, 2) for number in (0.000491, 0.0496, 2.0, 131.2, 1340.0)]
    assert found == ["0.00049", "0.05", "2", "130", "1300"]
