"""`python -m keras_shardopt.doctor` measures a sound job on every backend, and names the faults of others."""

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import time

import pytest
from conftest import BACKEND
from support import launch

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]

MEASURED = {"devices", "threads", "network", "all-reduce", "clocks", "directory", "reproducible"}


@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_processes_of_a_job_measure_it_together(tmp_path):
    start = {"torch": launch.torchrun, "jax": launch.jax_processes, "tensorflow": launch.tensorflow_workers}[BACKEND]
    printed = start("doctor_program.py", 2, tmp_path)
    printed = printed if BACKEND == "torch" else printed[1]
    rows = dict(json.loads(re.search("FINDINGS (.*)", printed)[1]))
    assert rows.keys() >= MEASURED and rows["directory"][1].endswith("shared by all processes")
    speeds = re.search(r"1 KB (\S+) ms, 1 MB (\S+) ms, 64 MB (\S+) ms: .* GB/s", rows["all-reduce"][1])
    assert 0 < float(speeds[1]) < float(speeds[3]), rows["all-reduce"]
    assert re.fullmatch(r"within \S+ ms", rows["clocks"][1])
    assert not [finding for check, finding in rows.items() if finding[0] == "error"]
    assert not list(tmp_path.iterdir()), "files are left over"


def addressed(size, port):
    """The variables of each process of a job of this backend."""
    if BACKEND == "torch":
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    if BACKEND == "jax":
        common = {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port}",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(size),
        }
        return [{**common, "KERAS_DISTRIBUTION_PROCESS_ID": str(rank)} for rank in range(size)]
    workers = [f"127.0.0.1:{each}" for each in (port, *launch.free_ports(size - 1))]
    tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}} for rank in range(size)]
    return [{"TF_CONFIG": json.dumps(task)} for task in tasks]


def reports(environments, *arguments, before=("", ""), status=1):
    """The findings that the first process of a job prints, as `(level, check, text, remedy)`."""
    doctor = f"exec {shlex.quote(sys.executable)} -m keras_shardopt.doctor --json {shlex.join(map(str, arguments))}"
    started = [
        subprocess.Popen(
            ["unshare", "--mount", "--uts", "sh", "-c", f"{prefix}\n{doctor}"],
            env=launch.variables(BACKEND, XLA_FLAGS="", **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment, prefix in zip(environments, before)
    ]
    try:
        printed = [process.communicate(timeout=launch.patient(200)) for process in started]
    finally:
        for process in started:
            process.kill()
    assert started[0].returncode == status, printed
    rows = json.loads(printed[0][0])["findings"]
    return [(row["level"], row["check"], row["text"], row["remedy"]) for row in rows]


def assert_names(found, *expected):
    """Each expected (level, check, text) is found, with a remedy, and no other error is."""
    rows = [row for row in found if row[0] != "OK"]
    print(*rows, sep="\n")
    for level, check, text in expected:
        match = [row for row in rows if row[:2] == (level, check) and re.search(text, row[2])]
        assert match and match[0][3].endswith((".", "`")), (level, check, text, rows)
    others = [row for row in rows if row[0] == "error" and (row[1] not in {check for _, check, _ in expected})]
    assert not others


def may_unshare():
    command = ["unshare", "--mount", "--uts", "--net", "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


planted = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not may_unshare(), reason="needs the right to create namespaces"),
]


class TestPlantedFaults:
    """Faults that processes really have. `tests/unit/doctor/test_checks.py` has more, from facts alone."""

    pytestmark = planted
    NOT_CONNECTED = ("error", "connection", "")

    @pytest.mark.backends("torch")
    def test_a_connected_job(self, tmp_path):
        numpy = tmp_path / "path" / "numpy-1.0.dist-info"
        numpy.mkdir(parents=True)
        (numpy / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
        (tmp_path / "path" / "sitecustomize.py").write_text(
            "import time\nreal = time.time\ntime.time = lambda: real() + 100\n"
        )
        (tmp_path / "keras.json").write_text('{"floatx": "float16"}')
        shared = tmp_path / "shared"
        shared.mkdir()
        (port,) = launch.free_ports(1)
        common = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "http_proxy": "http://proxy:3128"}
        first, second = ({**job, **common} for job in addressed(2, port))
        first["OMP_NUM_THREADS"] = "64"
        path = launch.variables(BACKEND)["PYTHONPATH"]
        second |= {"PYTHONPATH": f"{tmp_path}/path:{path}", "KERAS_HOME": str(tmp_path)}
        mounts = f"mount -t tmpfs -o size=32m x {shared} && mount -t tmpfs -o size=1m x /dev/shm && ulimit -n 500"
        assert_names(
            reports([first, second], "--directory", shared, before=("", mounts)),
            ("error", "versions", r"numpy \d.* on process 0; numpy 1\.0 on process 1"),
            ("error", "Keras", "floatx float32 on process 0; floatx float16 on process 1"),
            ("warning", "environment", "TORCH_DISTRIBUTED_DEBUG=DETAIL slows"),
            ("warning", "environment", "a proxy is set without no_proxy"),
            ("warning", "threads", r"more threads than cores: 65 threads of 2 processes on \d+ cores"),
            ("warning", "memory", r"/dev/shm has only 1 MB.*\(process 1\)"),
            ("warning", "memory", r"can open only 500 files and connections \(process 1\)"),
            ("warning", "clocks", r"clocks differ by 100 s"),
            ("warning", "directory", r"is a different directory on process 0 / process 1"),
            ("warning", "reproducible", "different numbers of threads, 64 on process 0; 1 on process 1"),
        )

    @pytest.mark.backends("torch")
    def test_variables_without_their_companions(self, tmp_path):
        mount = f"mount -t tmpfs x {tmp_path} && mount -o remount,ro {tmp_path}"
        found = reports([{"WORLD_SIZE": "2", "TF_CONFIG": "{"}], "--directory", tmp_path, before=[mount])
        assert_names(
            found,
            self.NOT_CONNECTED,
            ("error", "environment", "WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT"),
            ("error", "environment", "TF_CONFIG is for TensorFlow, but Keras uses PyTorch"),
            ("error", "environment", "WORLD_SIZE and TF_CONFIG describe two different jobs"),
            ("error", "environment", "TF_CONFIG does not describe this worker"),
            ("error", "directory", "Read-only file system"),
        )

    @pytest.mark.backends("torch")
    def test_ports_and_interfaces(self):
        begin = time.monotonic()
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            first, _ = addressed(2, other.getsockname()[1])
            found = reports([{**first, "GLOO_SOCKET_IFNAME": "eth9"}], "--timeout", 3)
        assert time.monotonic() - begin < launch.patient(60)
        assert_names(
            found,
            self.NOT_CONNECTED,
            ("error", "addresses", r"another program uses the port of 127\.0\.0\.1:\d+"),
            ("error", "network", "GLOO_SOCKET_IFNAME names the interface eth9"),
        )

    @pytest.mark.backends("torch")
    def test_addresses_of_other_machines(self, tmp_path):
        first, _ = addressed(2, *launch.free_ports(1))
        found = reports([{**first, "MASTER_ADDR": "192.0.2.1"}], "--timeout", 3, "--directory", tmp_path / "missing")
        assert_names(
            found,
            self.NOT_CONNECTED,
            ("error", "addresses", "must listen at 192.0.2.1:.*, but its machine has no such address"),
            ("error", "directory", "No such file or directory"),
        )

    @pytest.mark.backends("torch")
    def test_names_that_do_not_resolve(self, tmp_path):
        first, _ = addressed(2, *launch.free_ports(1))
        prefix = f"hostname no-such-host.invalid && ip link set lo up; mount -t tmpfs -o size=64k x {tmp_path}"
        job = {**first, "MASTER_ADDR": "missing.invalid"}
        assert_names(
            reports([job], "--timeout", 3, "--directory", tmp_path, before=[prefix]),
            self.NOT_CONNECTED,
            ("error", "network", "the name of this machine, no-such-host.invalid, does not resolve"),
            ("error", "addresses", "missing.invalid of the job's address .* does not resolve"),
            ("error", "directory", "No space left on device"),
        )

    @pytest.mark.backends("torch")
    def test_numbers_out_of_range(self):
        first, _ = addressed(2, *launch.free_ports(1))
        job = {**first, "RANK": "5", "MASTER_PORT": "abc", "OMP_NUM_THREADS": "many"}
        assert_names(
            reports([job], "--timeout", 3),
            self.NOT_CONNECTED,
            ("error", "environment", "rank 5 of 2 processes"),
            ("error", "environment", "OMP_NUM_THREADS=many is not a number"),
            ("error", "addresses", "has no valid port"),
        )

    def test_another_backend(self):
        variables = {
            "torch": {"KERAS_DISTRIBUTION_NUM_PROCESSES": "2", "KERAS_DISTRIBUTION_JOB_ADDRESSES": "127.0.0.1:1"},
            "jax": addressed_for_torch(),
            "tensorflow": addressed_for_torch(),
        }[BACKEND]
        assert_names(
            reports([variables], "--timeout", 3),
            self.NOT_CONNECTED,
            ("error", "environment", f"is for {'JAX' if BACKEND == 'torch' else 'PyTorch'}, but Keras uses"),
        )

    @pytest.mark.backends("jax", "tensorflow")
    def test_a_process_that_does_not_start(self):
        """JAX aborts such a process, and TensorFlow waits in C++. On PyTorch, tests above have no second process."""
        first, _ = addressed(2, *launch.free_ports(1))
        begin = time.monotonic()
        assert_names(reports([first], "--timeout", 3), self.NOT_CONNECTED)
        assert time.monotonic() - begin < launch.patient(60)

    @pytest.mark.backends("jax")
    def test_a_process_without_its_number(self):
        first, _ = addressed(2, *launch.free_ports(1))
        del first["KERAS_DISTRIBUTION_PROCESS_ID"]
        found = reports([first], "--timeout", 3)
        wanted = "KERAS_DISTRIBUTION_NUM_PROCESSES=2 without KERAS_DISTRIBUTION_PROCESS_ID"
        assert_names(found, self.NOT_CONNECTED, ("error", "environment", wanted))

    @pytest.mark.backends("tensorflow")
    def test_tf_config_that_is_no_json(self):
        wanted = "TF_CONFIG does not describe this worker"
        assert_names(reports([{"TF_CONFIG": "{"}]), self.NOT_CONNECTED, ("error", "environment", wanted))

    @pytest.mark.backends("torch")
    def test_an_interface_that_is_down(self):
        first, _ = addressed(2, *launch.free_ports(1))
        job = {**first, "GLOO_SOCKET_IFNAME": "lo"}
        doctor = f"{sys.executable} -m keras_shardopt.doctor --json --timeout 3"
        # A new /sys, because the old one shows the interfaces of the old namespace.
        command = f"exec unshare --net --mount sh -c 'mount -t sysfs x /sys && exec {doctor}'"
        ended = subprocess.run(
            ["sh", "-c", command], env=launch.variables("torch", **job), stdout=subprocess.PIPE, text=True
        )
        rows = [tuple(row.values()) for row in json.loads(ended.stdout)["findings"]]
        found = [(level, check, text, remedy) for check, level, text, remedy in rows]
        assert_names(found, self.NOT_CONNECTED, ("error", "network", "the interface lo of GLOO_SOCKET_IFNAME is down"))


def addressed_for_torch():
    return {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(*launch.free_ports(1))}


@pytest.mark.exhaustive
def test_the_command_reports_in_one_block_under_the_launcher(tmp_path):
    command = [sys.executable, "-m", "keras_shardopt.launch", "--nproc", "2", "-m", "keras_shardopt.doctor"]
    environment = launch.variables(BACKEND, XLA_FLAGS="", OMP_NUM_THREADS="1")
    printed = launch.run([*command, "--directory", tmp_path], 250, environment)
    framework = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}[BACKEND]
    print(printed)
    assert printed.count("keras_shardopt doctor: 2 processes, 2 replicas, " + framework) == 1, printed
    assert re.search(r"\[0\] OK       directory     /.* shared by all processes", printed), printed
    assert printed.rstrip().splitlines()[-1].startswith("[0] error: 0, warning: "), printed


@pytest.mark.exhaustive
@pytest.mark.backends("torch")
def test_a_process_that_the_launcher_ends_reports_first(tmp_path):
    """Process 1 fails at once, because its MASTER_ADDR is missing; the launcher ends process 0, which waits for it."""
    program = tmp_path / "starts.py"
    program.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    del os.environ['MASTER_ADDR']\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'keras_shardopt.doctor'])\n"
    )
    command = [sys.executable, "-m", "keras_shardopt.launch", "--nproc", "2", str(program)]
    with pytest.raises(launch.WorkersFailed) as failed:
        launch.run(command, 200, launch.variables(BACKEND, XLA_FLAGS=""))
    printed = str(failed.value)
    assert "[1] error    environment   WORLD_SIZE=2 without MASTER_ADDR" in printed
    assert "[0] error    connection    Stopped before all processes answered" in printed, printed
