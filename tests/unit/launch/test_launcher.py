"""`python -m keras_shardopt.launch`: what each process is given, and what becomes of them."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from keras_shardopt.launch import __main__ as command
from keras_shardopt.launch import jax, job, supervisor, tensorflow

pytestmark = pytest.mark.neutral

PACKAGE = pathlib.Path(job.__file__).parents[2]


def made(tmp_path, text, nproc=2, **more):
    program = tmp_path / "program.py"
    program.write_text(text)
    return job.Job([str(program), "an argument"], nproc, **more)


def numbered(nproc):
    return [{"NUMBER": str(i)} for i in range(nproc)]


def test_output_has_the_rank_in_front_of_each_line(tmp_path, capfd):
    text = "import os, sys\nprint('first\\nand', sys.argv[1]); print('bad', file=sys.stderr)\nsys.stdout.write('end')"
    assert supervisor.supervise(made(tmp_path, text), numbered(2)) == 0
    out, err = capfd.readouterr()
    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] first", f"[{rank}] and an argument", f"[{rank}] end"]
    assert sorted(err.splitlines()) == ["[0] bad", "[1] bad"]


def test_one_that_fails_ends_all_and_its_status_is_that_of_the_job(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 0.2)
    text = (
        "import os, pathlib, signal, sys, time\n"
        "ready = pathlib.Path(__file__).with_name('ready')\n"
        "while os.environ['NUMBER'] == '1' and not ready.exists(): time.sleep(0.01)\n"
        "if os.environ['NUMBER'] == '1': sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "ready.touch(); time.sleep(600)\n"
    )
    assert supervisor.supervise(made(tmp_path, text), numbered(2)) == 7
    assert "process 1 ended with status 7" in capfd.readouterr().err


def test_one_that_does_not_end_is_killed_with_what_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 0.5)
    monkeypatch.setattr(supervisor, "_SECONDS_TO_END", 0.5)
    text = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "file = pathlib.Path(__file__).with_name('child')\n"
        "while os.environ['NUMBER'] == '1' and not file.exists(): time.sleep(0.01)\n"
        "if os.environ['NUMBER'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "file.with_suffix('.new').write_text(str(child.pid)); file.with_suffix('.new').rename(file)\n"
        "time.sleep(600)\n"
    )
    assert supervisor.supervise(made(tmp_path, text), numbered(2)) == 128 + signal.SIGKILL
    child = pathlib.Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    time.sleep(0.2)
    assert not child.exists() or child.read_text().split()[2] == "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_handed_on(tmp_path, number):
    text = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('got it', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    made(tmp_path, text)
    # Without the package around it, whose import takes longer than all of this.
    starts = (
        # As in a terminal, also where the tests run without one, and such signals are ignored.
        f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"
        f"import importlib.util, sys, types; sys.path.insert(0, {str(PACKAGE)!r})\n"
        "parent = types.ModuleType('keras_shardopt'); parent.__path__ = [sys.path[0] + '/keras_shardopt']\n"
        "sys.modules['keras_shardopt'] = parent\n"
        "from keras_shardopt.launch import job, supervisor\n"
        f"sys.exit(supervisor.supervise(job.Job([{str(tmp_path / 'program.py')!r}], 2), [{{}}, {{}}]))\n"
    )
    process = subprocess.Popen([sys.executable, "-u", "-c", starts], stdout=subprocess.PIPE, text=True)
    try:
        printed = [process.stdout.readline() for _ in range(2)]
        process.send_signal(number)
        printed += process.communicate(timeout=100)[0].splitlines(keepends=True)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    wanted = ["[0] got it\n", "[0] ready\n", "[1] got it\n", "[1] ready\n"]
    assert sorted(printed) == wanted


def test_what_processes_of_jax_are_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first, second = jax.environments(made(tmp_path, "", devices_per_process=3))
    assert first["KERAS_DISTRIBUTION_PROCESS_ID"] == "0" and second["KERAS_DISTRIBUTION_PROCESS_ID"] == "1"
    assert first["KERAS_DISTRIBUTION_JOB_ADDRESSES"] == second["KERAS_DISTRIBUTION_JOB_ADDRESSES"]
    assert first["KERAS_DISTRIBUTION_NUM_PROCESSES"] == "2" and first["JAX_NUM_CPU_DEVICES"] == "3"
    (second,) = jax.environments(made(tmp_path, "", 1, nnodes=2, node_rank=1, coordinator="10.0.0.1:99"))
    assert second["KERAS_DISTRIBUTION_JOB_ADDRESSES"] == "10.0.0.1:99"
    assert second["KERAS_DISTRIBUTION_PROCESS_ID"] == "1"
    assert jax.environments(made(tmp_path, "", 1)) == [{}]


def test_what_workers_of_tensorflow_are_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    nodes = {"nnodes": 2, "node_rank": 1, "coordinator": "10.0.0.1:99"}
    found = tensorflow.environments(made(tmp_path, "", hosts=["10.0.0.1", "10.0.0.2"], **nodes))
    configs = [json.loads(each["TF_CONFIG"]) for each in found]
    assert configs[0]["cluster"]["worker"] == ["10.0.0.1:99", "10.0.0.1:100", "10.0.0.2:99", "10.0.0.2:100"]
    assert [each["task"]["index"] for each in configs] == [2, 3]
    with pytest.raises(job.JobError, match="--hosts HOST,HOST"):
        tensorflow.environments(made(tmp_path, "", **nodes))


def test_processes_divide_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert job.visible_gpus(made(tmp_path, "")) == ["4,5", "6,7"]
    assert job.visible_gpus(made(tmp_path, "", devices_per_process=1)) == ["4", "5"]
    assert job.visible_gpus(made(tmp_path, "", 1)) == [None]
    with pytest.raises(job.JobError, match=r"5 processes with 1 GPUs each need 5. Received: 4 GPUs"):
        job.visible_gpus(made(tmp_path, "", 5))


def test_ports_are_free_and_differ():
    ports = job.free_ports(20)
    assert len(set(ports)) == 20 and all(20_000 <= port < 32_000 for port in ports)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--nproc", "two", __file__], "`--nproc` must be a number"),
        (["--nproc", "3:2", __file__], "`--nproc` must be a number, or two"),
        (["--nproc", "0", __file__], "`--nproc` must be at least 1"),
        (["--nproc", "2"], "A program must be named"),
        (["nothing.py"], "The program must be a file"),
        (["--nnodes", "2", __file__], "need `--coordinator HOST:PORT`"),
        (["--nnodes", "2", "--node-rank", "2", "--coordinator", "a:1", __file__], "from 0 to 1. Received: 2"),
        (["--nproc", "1:2", "--nnodes", "2", "--coordinator", "a:1", __file__], "as many processes as the others"),
        (["--devices-per-process", "0", __file__], "`--devices-per-process` must be at least 1"),
    ],
)
def test_what_cannot_be_started_says_why(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_job_goes_on_with_fewer_processes(monkeypatch, capsys):
    started = []

    def start(given):
        started.append(given.nproc)
        return 0 if given.nproc == 2 and len(started) > 3 else 9

    starts_with(monkeypatch, start)
    assert command.main(["--nproc", "2:4", "--max-restarts", "5", __file__]) == 0
    assert started == [4, 3, 2, 2] and "starts again with 3 processes" in capsys.readouterr().err
    del started[:]
    assert command.main(["--nproc", "3", "--max-restarts", "1", __file__]) == 9
    assert started == [3, 3]


def starts_with(monkeypatch, start):
    monkeypatch.setattr(command, "for_backend", lambda table: type("Starter", (), {"start": staticmethod(start)}))


def test_a_program_keeps_its_own_arguments(monkeypatch):
    started = []
    starts_with(monkeypatch, lambda given: started.append(given) or 0)
    for program in ([__file__, "--nproc", "7", "--n", "-m", "--"], ["-m", "json.tool", "--nproc", "7"]):
        assert command.main(["--nproc", "2", *program]) == 0
        assert (started[-1].program, started[-1].nproc) == (program, 2)
    assert command.main(["--", __file__, "--"]) == 0
    assert started[-1].program == [__file__, "--"]
