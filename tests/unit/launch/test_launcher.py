"""`python -m keras_shardopt.launch`: what each process is given, and what becomes of them."""

import contextlib
import datetime
import functools
import json
import os
import pathlib
import pty
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.suites import some
from torch import distributed

from keras_shardopt.backends import jobs
from keras_shardopt.launch import __main__ as command
from keras_shardopt.launch import jax, job, output, supervisor, tensorflow, torch, watch

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
    assert capfd.readouterr().err.splitlines() == [
        "keras_shardopt.launch: process 1 failed; the other processes end after 0.2 s.",
        "keras_shardopt.launch: process 1 failed. Exit status: 7.",
    ]


@pytest.mark.parametrize(
    "ending, said, status",
    [
        ("{}['key']", "raised KeyError: 'key'", 1),
        # As PyTorch prints it on ranks, at the end of others.
        ("raise ValueError('wrong.\\nAnd more')", "raised ValueError: wrong", 1),
        (
            "print('Traceback (most recent call last):\\n^^^\\nOSError: full', file=sys.stderr); sys.exit(1)",
            "raised OSError: full",
            1,
        ),
        ("print('Exception in thread 1:\\n' + ''.join(other), file=sys.stderr); sys.exit('words')", "failed", 1),
        ("traceback.print_exc(); sys.exit(3)", "failed", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", 137),
        ("os.kill(os.getpid(), 44)", "was ended by signal 44", 172),
    ],
)
def test_the_last_line_names_the_process_its_error_and_the_exit_status(tmp_path, capfd, ending, said, status):
    text = (
        "import os, signal, sys, time, traceback\n"
        "def hook(*error): print(*('[rank1]: ' + line for line in ''.join(traceback.format_exception(*error))"
        ".split('\\n')), sep='\\n', file=sys.stderr)\n"
        "sys.excepthook = hook\n"
        "other = traceback.format_exception(RuntimeError('of another'))\n"
        "other.insert(0, 'Traceback (most recent call last):\\n')\n"
        "if os.environ['NUMBER'] == '0':\n"
        "    time.sleep(0.5)\n"
        "    raise RuntimeError('a process is missing')\n"
        f"{ending}\n"
    )
    assert supervisor.supervise(made(tmp_path, text), numbered(2)) == status
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == f"keras_shardopt.launch: process 1 {said}. Exit status: {status}.", lines
    assert any("RuntimeError: a process is missing" in line for line in lines)


def test_the_first_error_counts_where_several_end_at_a_time(tmp_path, capfd, monkeypatch):
    """What the others say of it comes later, and perhaps from a process with a smaller number."""
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds, sleep=time.sleep: sleep(2.0))  # until all have ended
    text = (
        "import os, pathlib, sys, time\n"
        "raised = pathlib.Path(__file__).with_name('raised')\n"
        "if os.environ['NUMBER'] == '1':\n"
        "    sys.excepthook = lambda *error: (sys.__excepthook__(*error), raised.touch())\n"
        "    raise ValueError('the first')\n"
        "while not raised.exists(): time.sleep(0.01)\n"
        "time.sleep(0.1); raise RuntimeError('a process is missing')\n"
    )
    assert supervisor.supervise(made(tmp_path, text), numbered(2)) == 1
    assert "process 1 raised ValueError: the first. Exit" in capfd.readouterr().err.splitlines()[-1]


BARS = """
import os, sys, time
for epoch in (1, 2):
    print("Epoch", epoch)
    for step in range(3):  # as Keras writes them, in pieces that end anywhere
        text = ("\\b" * 9 if step else "") + f"\\r{step + 1}/3 ━━ 0s" + ("\\n" if step == 2 else "")
        cut = len(text.encode()) // 2
        os.write(1, text.encode()[:cut]); time.sleep(0.05); os.write(1, text.encode()[cut:]); time.sleep(0.05)
        if step == 1 and os.environ["NUMBER"] == "0":
            print("a warning", file=sys.stderr)
            time.sleep(0.1)
os.write(1, b"\\r1/9")
""".replace("\\\\", "\\")


def test_a_progress_bar_in_a_file_is_a_line_for_each_epoch(tmp_path, capfd):
    assert supervisor.supervise(made(tmp_path, BARS), numbered(2)) == 0
    out = capfd.readouterr().out.splitlines()
    for rank in range(2):
        lines = [line for line in out if line.startswith(f"[{rank}]")]
        wanted = ["Epoch 1", "3/3 ━━ 0s", "Epoch 2", "3/3 ━━ 0s", "1/9"]
        assert lines == [f"[{rank}] {line}" for line in wanted]


@pytest.mark.exhaustive
def test_a_progress_bar_of_process_0_moves_on_a_terminal(tmp_path):
    made(tmp_path, BARS)
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", starts(tmp_path)], stdout=slave, stderr=slave)
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while chunk := os.read(master, 65536):
            written += chunk
    os.close(master)
    assert process.wait(100) == 0
    text = written.decode().replace("\x1b[?7l", "").replace("\x1b[?7h", "").replace("\r\n", "\n")
    screen, moved = [""], []
    for line in text.split("\n"):
        *before, last = line.split("\r\x1b[K")  # cleared, and written again
        moved += before
        screen.append(last)
    assert {"[0] 1/3 ━━ 0s", "[0] 2/3 ━━ 0s"} <= {bar.rpartition("\r")[2] for bar in moved}, text
    assert not any("[1]" in bar for bar in moved)
    assert [line for line in screen if line.startswith("[0]")] == [
        "[0] Epoch 1", "[0] a warning", "[0] 3/3 ━━ 0s", "[0] Epoch 2", "[0] a warning", "[0] 3/3 ━━ 0s", "[0] 1/9"
    ]  # fmt: skip
    assert [line for line in screen if line.startswith("[1]")] == [
        "[1] Epoch 1", "[1] 3/3 ━━ 0s", "[1] Epoch 2", "[1] 3/3 ━━ 0s", "[1] 1/9"
    ]  # fmt: skip


def test_the_output_of_each_process_is_also_in_its_file(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(jobs.HEARTBEATS, str(tmp_path))  # of a watched job that starts this one
    (tmp_path / "rank-0.json").write_text("of the program")
    text = "import os, sys, time\nprint(sys.argv[1] + os.environ['KERAS_SHARDOPT_HEARTBEATS'])\n"
    text += "print('1/2\\r2/2', file=sys.stderr)\nos.write(1, b'\\xe2\\x94'); time.sleep(0.1); os.write(1, b'\\x81')"
    given = made(tmp_path, text, log_dir=str(tmp_path))
    for _ in range(2):  # a second start continues the files
        assert supervisor.supervise(given, numbered(2)) == 0
    for rank in range(2):
        lines = (tmp_path / f"rank-{rank}.log").read_text(encoding="utf-8").splitlines()
        assert sorted(lines) == sorted(2 * ["an argument", "2/2", "━"])
    printed = [f"[{rank}] {words}" for rank in range(2) for words in ("an argument", "━")]
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(2 * printed)
    assert (tmp_path / "rank-0.json").read_text() == "of the program"
    (tmp_path / "rank-1.log").unlink()
    (tmp_path / "rank-1.log").mkdir()
    with pytest.raises(job.JobError, match="`--log-dir` must be a writable directory"):
        given.check()


def test_a_very_long_line_is_cut(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(output, "_LONGEST_LINE", 9)
    text = "import os, time\nfor part in ('x' * 7, 'y' * 7, 'z'):\n    os.write(1, part.encode()); time.sleep(0.1)"
    assert supervisor.supervise(made(tmp_path, text, 1), numbered(1)) == 0
    assert capfd.readouterr().out == f"[0] {'x' * 7}{'y' * 7}\n[0] z\n"


BEATS = """
import json, os, pathlib, sys, time
rank = int(os.environ["NUMBER"])
file = pathlib.Path(os.environ["KERAS_SHARDOPT_HEARTBEATS"], f"rank-{rank}.json")
def beat(step, phase):
    file.with_suffix(".new").write_text(json.dumps({"epoch": 1, "step": step, "phase": phase}))
    file.with_suffix(".new").rename(file)
def hangs_here():
    time.sleep(600)
"""


@pytest.mark.parametrize("others", [["1"], ["1", "2"]])
def test_a_job_without_steps_ends_with_the_stacks_of_all(tmp_path, capfd, others):
    text = (
        f"{BEATS}\nfor step in range(1, 11):\n    beat(step, 'training'); time.sleep(0.1)\n"
        "    if rank == 0 and step == 9: hangs_here()\ntime.sleep(600)"
    )
    given = made(tmp_path, text, 1 + len(others), watch=0.7)
    assert supervisor.supervise(given, numbered(1 + len(others))) == 128 + signal.SIGABRT
    lines = capfd.readouterr().err.splitlines()
    more = f"process{'es' if len(others) > 1 else ''} {', '.join(others)} in epoch 1, step 10 (training)"
    hung = f"keras_shardopt.launch: no step for 0.7 s: process 0 in epoch 1, step 9 (training); {more}."
    assert lines[0] == f"{hung} The stacks of all processes follow." and lines[-1] == f"{hung} Exit status: 134."
    stacks = [line for line in lines if "program.py" in line]
    assert [line[:3] for line in stacks if "hangs_here" in line] == ["[0]"]
    assert {line[:3] for line in stacks} == {"[0]", *(f"[{other}]" for other in others)}


def test_a_process_that_has_not_begun_or_has_ended_its_training_does_not_hang(tmp_path, monkeypatch, capfd):
    text = f"{BEATS}\nif rank == 0: beat(9, 'ended')\ntime.sleep(0.8)"
    (tmp_path / "rank-1.json").write_text("of an earlier job")
    given = made(tmp_path, text, watch=0.2, log_dir=str(tmp_path))
    assert supervisor.supervise(given, numbered(2)) == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    text = f"import os; os.chdir('other')\n{BEATS}\nif rank == 0: beat(3, 'validation')\ntime.sleep(20)"
    assert supervisor.supervise(made(tmp_path, text, watch=0.2, log_dir="."), numbered(2)) == 134
    said = "process 1 in epoch 0, step 0 (before `fit`); process 0 in epoch 1, step 3 (validation)."
    assert said in capfd.readouterr().err


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A watch of two processes, whose `polls` are half a second apart. It collects the lines it prints in `said`."""
    now, said = [0.0], []
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    found = watch.Watch(made(tmp_path, "", watch=3.0), str(tmp_path), said.append)
    found.said, found.num_beats = said, 0

    def polls(seconds, step=0.5, running=(0, 1)):
        for _ in range(round(seconds / step)):
            now[0] += step
            words = found.hung(running)
        return words

    def beat(rank, phase="training"):
        found.num_beats += 1
        file = tmp_path / f"rank-{rank}.json"
        file.write_text(json.dumps({"epoch": 1, "step": 2, "phase": phase}))
        os.utime(file, (found.num_beats, found.num_beats))

    found.polls, found.beat = polls, beat
    return found


def test_a_watch_without_heartbeats_says_so_once(watched):
    assert watched.polls(9.0) == "" and len(watched.said) == 1
    assert watched.said[0].startswith("no process has begun `fit` with a heartbeat in 3 s. `--watch` needs `keras_s")


def test_a_job_that_was_stopped_does_not_hang(watched):
    watched.beat(0)
    assert watched.polls(2.0) == "" and watched.polls(600.0, step=600.0) == "" and watched.polls(1.0) != ""
    assert watched.said == []


def test_a_process_whose_file_is_removed_does_not_hang(watched, tmp_path):
    watched.beat(0)
    assert watched.polls(2.0) == ""
    (tmp_path / "rank-0.json").unlink()
    assert watched.polls(9.0) == "" and watched.said == []


def test_a_process_that_ended_is_not_late_and_is_named(watched):
    watched.beat(0)
    assert watched.polls(9.0, running=[1]) == ""
    watched.beat(1)
    expected = "no step for 3 s: process 0 in epoch 1, step 2 (exited); process 1 in epoch 1, step 2 (training)."
    assert watched.polls(9.0, running=[1]) == expected


def test_a_fit_that_begins_while_the_files_are_read_is_not_late(watched, monkeypatch):
    watched.beat(0, "ended")
    assert watched.polls(9.0) == ""
    methods = {name: getattr(pathlib.Path, name) for name in ("stat", "read_text")}

    def then_begins(file, *arguments, name, **more):
        found = methods[name](file, *arguments, **more)
        monkeypatch.undo()  # also of the clock, which is much later now
        watched.beat(0, "start")
        return found

    for name in methods:
        monkeypatch.setattr(pathlib.Path, name, functools.partialmethod(then_begins, name=name))
    assert watched.hung([0, 1]) == ""


def starts(tmp_path, before=""):
    """A program that supervises two processes, without the package around it, whose import takes longer than that."""
    return (
        f"{before}\nimport importlib.util, sys, types; sys.path.insert(0, {str(PACKAGE)!r})\n"
        "parent = types.ModuleType('keras_shardopt'); parent.__path__ = [sys.path[0] + '/keras_shardopt']\n"
        "sys.modules['keras_shardopt'] = parent\n"
        "from keras_shardopt.launch import job, supervisor\n"
        f"given = job.Job([{str(tmp_path / 'program.py')!r}], 2)\n"
        "try:\n"
        "    sys.exit(supervisor.supervise(given, [{'NUMBER': '0'}, {'NUMBER': '1'}]))\n"
        "except supervisor.Stopped as stopped:\n"
        "    sys.exit(128 + stopped.number)\n"
    )


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


@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]))
def test_signals_are_handed_on(tmp_path, number):
    text = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('got it', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    made(tmp_path, text)
    # As in a terminal, also where the tests run without one, and such signals are ignored.
    program = starts(tmp_path, f"import signal; signal.signal({int(number)}, signal.SIG_DFL)")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-u", "-c", program], **pipes)
    try:
        printed = [process.stdout.readline() for _ in range(2)]
        process.send_signal(number)
        rest, errors = process.communicate(timeout=100)
        printed += rest.splitlines(keepends=True)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    last = f"keras_shardopt.launch: the launcher was ended by {number.name}. Exit status: {128 + number}."
    assert errors.splitlines()[-1] == last
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
    assert jax.environments(made(tmp_path, "", 1)) == [{"KERAS_BACKEND": "jax"}]


def test_what_workers_of_tensorflow_are_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    nodes = {"nnodes": 2, "node_rank": 1, "coordinator": "10.0.0.1:99"}
    found = tensorflow.environments(made(tmp_path, "", hosts=["10.0.0.1", "10.0.0.2"], **nodes))
    configs = [json.loads(each["TF_CONFIG"]) for each in found]
    assert configs[0]["cluster"]["worker"] == ["10.0.0.1:99", "10.0.0.1:100", "10.0.0.2:99", "10.0.0.2:100"]
    assert [each["task"]["index"] for each in configs] == [2, 3]
    assert found[0]["KERAS_BACKEND"] == "tensorflow"
    with pytest.raises(job.JobError, match="--hosts HOST,HOST"):
        tensorflow.environments(made(tmp_path, "", **nodes))


def test_what_ranks_of_pytorch_are_given(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    nodes = {"nnodes": 2, "node_rank": 1, "coordinator": "10.0.0.1:99"}
    found = torch.environments(made(tmp_path, "", **nodes), "10.0.0.1", 99)
    assert [(each["RANK"], each["LOCAL_RANK"], each["OMP_NUM_THREADS"]) for each in found] == [
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    assert found[0]["WORLD_SIZE"] == "4" and found[0]["KERAS_BACKEND"] == "torch"
    assert (found[0]["MASTER_ADDR"], found[0]["MASTER_PORT"]) == ("10.0.0.1", "99")
    assert "OMP_NUM_THREADS" not in torch.environments(made(tmp_path, "", 1), "127.0.0.1", 99)[0]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert torch.environments(made(tmp_path, ""), "127.0.0.1", 99)[0]["OMP_NUM_THREADS"] == "3"


def test_ranks_of_one_machine_find_each_other_by_an_address_and_not_by_its_name(tmp_path, monkeypatch):
    """The name may not resolve, in a container or on a laptop. Then torchrun waits, and starts no rank."""
    given = []

    def supervise(job, environments):
        address = environments[0]["MASTER_ADDR"]
        store = distributed.TCPStore(
            address, int(environments[0]["MASTER_PORT"]), timeout=datetime.timedelta(seconds=9)
        )
        given.append((address, store.check(["anything"])))
        return 0

    monkeypatch.setattr(torch, "supervise", supervise)
    assert torch.start(made(tmp_path, "")) == 0
    assert given == [("127.0.0.1", False)]


def test_a_coordinator_whose_port_is_taken_is_an_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(job.JobError, match=f"a free port. Received: {address}"):
            torch.start(made(tmp_path, "", nnodes=2, coordinator=address))


def test_processes_divide_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert job.visible_gpus(made(tmp_path, "")) == ["4,5", "6,7"]
    assert job.visible_gpus(made(tmp_path, "", devices_per_process=1)) == ["4", "5"]
    assert job.visible_gpus(made(tmp_path, "", 1)) == [None]
    with pytest.raises(job.JobError, match=r"5 processes with 1 GPUs each need 5 GPUs. Received: 4 GPUs"):
        job.visible_gpus(made(tmp_path, "", 5))


def test_ports_are_free_and_differ():
    ports = job.free_ports(20)
    assert len(set(ports)) == 20 and all(20_000 <= port < 32_000 for port in ports)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--nproc", "two", __file__], "`--nproc` must be a number"),
        (["--nproc", "3:2", __file__], "`--nproc` must be a number, or a minimum"),
        (["--nproc", "0", __file__], "`--nproc` must be at least 1"),
        (["--nproc", "2"], "A program to run must follow"),
        (["nothing.py"], "The program must be a file"),
        (["--nnodes", "2", __file__], "need `--coordinator HOST:PORT`"),
        (["--nnodes", "2", "--node-rank", "2", "--coordinator", "a:1", __file__], "from 0 to 1. Received: 2"),
        (["--nproc", "1:2", "--nnodes", "2", "--coordinator", "a:1", __file__], "must be one number, the same on all"),
        (["--devices-per-process", "0", __file__], "`--devices-per-process` must be at least 1"),
        (["--watch", "0", __file__], "`--watch` must be a number of seconds above 0. Received: 0."),
        (["--watch", "nan", __file__], "`--watch` must be a number of seconds above 0. Received: nan."),
        (["--log-dir", __file__, __file__], "`--log-dir` must be a writable directory, or a new one. Received: "),
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_job_is_started_again_after_a_signal_to_a_process_but_not_to_the_launcher(
    tmp_path, monkeypatch, capfd, number
):
    text = (
        "import os, pathlib, signal, time\n"
        "again = pathlib.Path(__file__).with_name('again')\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup leaves it ignored
        f"if os.environ['NUMBER'] == '1' and not again.exists(): again.touch(); os.kill(os.getpid(), {int(number)})\n"
        "while not again.exists(): time.sleep(0.01)\n"
    )
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 0.2)
    made(tmp_path, text)
    starts_with(monkeypatch, lambda given: supervisor.supervise(given, numbered(2)))
    program = str(tmp_path / "program.py")
    assert command.main(["--nproc", "2", "--max-restarts", "1", program]) == 0
    assert f"process 1 was ended by {number.name}. Exit status: {128 + number}." in capfd.readouterr().err

    def stopped(given):
        raise supervisor.Stopped(number)

    starts_with(monkeypatch, stopped)
    assert command.main(["--nproc", "2", "--max-restarts", "1", program]) == 128 + number
    assert "again" not in capfd.readouterr().err


def test_help_has_sentences_and_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "python -m keras_shardopt.launch --nproc 2 train.py" in printed
    for name in (
        "nproc",
        "devices-per-process",
        "max-restarts",
        "nnodes",
        "node-rank",
        "coordinator",
        "hosts",
        "log-dir",
        "watch",
    ):
        assert f"--{name}" in printed


def test_a_launcher_that_srun_starts_on_each_machine_knows_them(monkeypatch):
    monkeypatch.setattr(jobs, "started_by", lambda: jobs.Task("srun", 2, 1, 1, 0, ["a", "b"], 20_500))
    started = []
    starts_with(monkeypatch, lambda given: started.append(given) or 0)
    assert command.main(["--nproc", "4", __file__]) == 0
    (job,) = started
    assert (job.nnodes, job.node_rank, job.coordinator, job.hosts) == (2, 1, "a:20500", ["a", "b"])
    assert list(job.ranks) == [4, 5, 6, 7]
    assert command.main(["--nnodes", "3", "--node-rank", "2", "--coordinator", "c:1", __file__]) == 0
    assert (started[1].nnodes, started[1].node_rank, started[1].coordinator) == (3, 2, "c:1")


def test_a_launcher_that_srun_starts_several_times_on_a_machine_raises(monkeypatch, capsys):
    monkeypatch.setattr(jobs, "started_by", lambda: jobs.Task("srun", 2, 0, 2, 0, ["127.0.0.1"] * 2, 20_500))
    with pytest.raises(SystemExit) as ended:
        command.main([__file__])
    assert ended.value.code == 2
    assert "2 launchers on this machine, started by `srun`. Use `srun --ntasks-per-node=1`" in capsys.readouterr().err


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
