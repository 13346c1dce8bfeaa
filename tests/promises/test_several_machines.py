"""Two machines on one: network namespaces with addresses of their own, each of which starts its part of a job."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import BACKEND
from support import launch, problem

import keras_shardopt as ks

pytestmark = [pytest.mark.exhaustive(), pytest.mark.timeout(400), pytest.mark.xdist_group("processes")]

PROGRAM = launch.SCRIPTS / "machine_program.py"
TIMEOUT = 10  # seconds


class Machines:
    """Two namespaces, and a cable between them."""

    def __init__(self):
        mark = f"ks{os.getpid()}"
        self.names = [f"{mark}a", f"{mark}b"]
        self.devices = [f"{mark}v0"[-15:], f"{mark}v1"[-15:]]
        self.addresses = ["10.77.31.1", "10.77.31.2"]

    def make(self):
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for pid in set(re.findall(r"^ks(\d+)[ab]\b", listed, re.MULTILINE)):  # of tests that were killed
            if not os.path.exists(f"/proc/{pid}"):
                for end in "ab":
                    subprocess.run(["ip", "netns", "delete", f"ks{pid}{end}"], capture_output=True)
        a, b = self.devices
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", a, "type", "veth", "peer", "name", b)
        for name, device, address in zip(self.names, self.devices, self.addresses):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                ip("-n", name, "link", "set", each, "up")
            # A machine knows itself by its address, as `ip netns exec` shows it.
            os.makedirs(f"/etc/netns/{name}")
            with open(f"/etc/netns/{name}/hosts", "w") as file:
                file.write(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def kill(self, name):
        """Ends all that runs on a machine, as a loss of power does."""
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in map(int, found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self, machine):
        """Takes a machine's address away."""
        address, device = self.addresses[machine], self.devices[machine]
        ip("-n", self.names[machine], "addr", "delete", f"{address}/24", "dev", device)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def machines():
    made = Machines()
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not allowed here: {getattr(error, 'stderr', None) or error}")
        yield made
    finally:
        made.remove()


def command(machines, machine, *arguments, options=()):
    """What a person types on one of the two machines; `options` are more of the launcher's."""
    host = f"{machines.addresses[0]}:29511"
    if BACKEND == "torch":
        start = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        start += ["--rdzv-endpoint", host, "--local-addr", machines.addresses[machine]]
    else:
        start = ["keras_shardopt.launch", "--nnodes", "2", "--node-rank", str(machine), "--coordinator", host]
        start += ["--hosts", ",".join(machines.addresses), "--devices-per-process", "2"]
    return [sys.executable, "-m", *start, *options, str(PROGRAM), *map(str, arguments)]


@contextlib.contextmanager
def started(machines, folder, *arguments, options=()):
    """Starts the job on both; afterwards none of it is left. Yields the processes and the files of what they print."""
    outputs, processes = [folder / f"machine{i}.txt" for i in range(2)], []
    try:
        for machine, output in enumerate(outputs):
            environment = launch.variables(
                BACKEND, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=machines.devices[machine], PYTHONUNBUFFERED="1"
            )
            there = ["ip", "netns", "exec", machines.names[machine]]
            with open(output, "w") as file:
                process = subprocess.Popen(
                    [*there, *command(machines, machine, folder, *arguments, options=options)],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
        yield processes, outputs
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process, name in zip(processes, machines.names):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            machines.kill(name)
            process.wait(5)


def run(machines, folder, *arguments):
    with started(machines, folder, *arguments) as (processes, outputs):
        statuses = [process.wait(launch.patient(150)) for process in processes]
    printed = [output.read_text() for output in outputs]
    assert statuses == [0, 0], "\n".join(printed)
    return printed


def values(folder):
    return list(np.load(folder / "values.npz").values())


def expected(**options):
    """The weights of one process."""
    model = problem.model()
    optimizer = problem.sgd_momentum()
    model.compile(ks.CrossShard(optimizer, **options) if options else optimizer, "mse")
    x, y = problem.data()
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def test_two_machines_train_as_one_process_and_go_on_after_a_death(machines, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    printed = run(machines, whole)
    assert sum(text.count("4 replicas, ") for text in printed) == 1, printed
    assert problem.relative_difference(values(whole)[:4], expected()) <= problem.TOLERANCE
    assert (whole / "model.keras").is_file()
    last = 3 if BACKEND == "torch" else 1
    with started(machines, broken, "timeout", TIMEOUT, "dies", last, 2) as (processes, outputs):
        statuses = [process.wait(launch.patient(120)) for process in processes]
    assert 0 not in statuses, [output.read_text() for output in outputs]
    printed = run(machines, broken, "dies", last, 2)
    assert any("begins with epoch 2 on 4 replicas" in text for text in printed), printed
    for one, other in zip(values(whole), values(broken), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.backends("torch")
@pytest.mark.parametrize("parts", [None, 4])
def test_a_job_that_loses_a_machine_goes_on_with_the_other(machines, tmp_path, parts):
    # After a failure torchrun waits a while for machines that may come back, by default for 30 s.
    options = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3"]
    words = ["slow", "timeout", TIMEOUT, *(["parts", parts] if parts else [])]
    with started(machines, tmp_path, *words, options=options) as (processes, outputs):
        wait_for(lambda: num_updates(tmp_path) > problem.NUM_STEPS + 2)
        (tmp_path / "died").write_text(str(time.time()))
        machines.kill(machines.names[1])
        status = processes[0].wait(launch.patient(150))
    printed = outputs[0].read_text()
    assert status == 0, printed
    assert "begins with epoch 0 on 4 replicas" in printed and "begins with epoch 1 on 2 replicas" in printed, printed
    found = values(tmp_path)[:4]
    assert problem.relative_difference(found, expected()) <= problem.TOLERANCE
    if parts:
        for one, other in zip(found, expected(virtual_replicas=parts), strict=True):
            np.testing.assert_array_equal(one, other)
    died, resumed = (float((tmp_path / name).read_text()) for name in ("died", "resumed"))
    print(f"{resumed - died:.1f} s from the loss of a machine to the next update")


def test_all_raise_where_a_link_is_cut(machines, tmp_path):
    with started(machines, tmp_path, "waits", "timeout", TIMEOUT) as (processes, outputs):
        wait_for(lambda: num_updates(tmp_path) > 1)
        begin = time.time()
        machines.cut(1)

        def have_all_raised():
            # torchrun's own process stays longer on a machine that does not reach the other.
            raised = [len(re.findall(r"at \d+\.\d: ", output.read_text())) for output in outputs]
            return all(p.poll() is not None or n == ranks for p, n in zip(processes, raised))

        ranks = 2 if BACKEND == "torch" else 1
        wait_for(have_all_raised, TIMEOUT + 50)
        seconds = time.time() - begin
    printed = [output.read_text() for output in outputs]
    print(f"{BACKEND}: all have raised {seconds:.1f} s after the cut")
    # What is left of the job says who is missing: each machine the other.
    named = {
        "torch": (r"no answer from ranks 2, 3,", r"no answer from the launcher's store at 10\.77\.31\.1:\d+,"),
        "jax": (r"tasks are unhealthy[^:]*:\n\[0\] 1\n", r"process 0 \(10\.77\.31\.1:29511\) does not answer"),
        "tensorflow": tuple(rf"no answer from worker {i} \(10\.77\.31\.{i + 1}:29511\)" for i in (1, 0)),
    }[BACKEND]
    assert all(re.search(words, text) for words, text in zip(named, printed)), printed


def num_updates(folder):
    """How many the program has made so far."""
    try:
        return int((folder / "update").read_text().split()[1])
    except (FileNotFoundError, IndexError):  # or it is being written
        return 0


def wait_for(condition, seconds=120):
    limit = time.monotonic() + launch.patient(seconds)
    while not condition():
        assert time.monotonic() < limit, f"not after {seconds} s"
        time.sleep(0.1)
