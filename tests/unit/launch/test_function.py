"""`launch_processes`: a function of a notebook in several processes, with its result, its errors and its end."""

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import keras
import pytest
from conftest import BACKEND
from support import launch, problem

import keras_shardopt as ks
from keras_shardopt.launch import call
from keras_shardopt.launch.pickled import CALL, ERROR, RESULT

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]
HERE = str(pathlib.Path(problem.__file__).parents[1])

# New processes import the launcher alone: the package around it, Keras and a framework take them many times as long.
LAUNCHER_ALONE = f"""
import os, sys, types

def stands_for(name, **members):
    module = types.ModuleType(name)
    sys.modules[name] = module
    vars(module).update({{name: types.SimpleNamespace(**values) for name, values in members.items()}})

def process():
    number, own = (os.environ.get(f"KERAS_DISTRIBUTION_{{name}}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
    return int(number or 1), int(own or 0)

__path__ = [{str(pathlib.Path(ks.__file__).parent)!r}]
stands_for("keras", config={{"backend": lambda: "jax"}})
active = {{"processes": {{"process": process}}, "placement": {{"outside_strategy": lambda function: function()}}}}
stands_for("keras_shardopt.backends.active", **active)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    keras.random.uniform(())  # JAX reads XLA_FLAGS once, and tests after these need its flags for several devices
    for name, value in launch.variables(BACKEND, OMP_NUM_THREADS="1", XLA_FLAGS="", JAX_PLATFORMS="cpu").items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def launcher_alone(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    (folder / "keras_shardopt").mkdir()
    (folder / "keras_shardopt" / "__init__.py").write_text(LAUNCHER_ALONE)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.chdir(folder)  # `python -m` looks here first


def trained(tests, rate, momentum):
    import sys

    sys.path.insert(0, tests)
    import keras
    from support import problem

    import keras_shardopt as ks

    with ks.data_parallel() as replicas:
        model = problem.model()
        model.compile(ks.CrossShard(keras.optimizers.SGD(rate, momentum=momentum)), "mse")
    model.fit(*problem.data(), batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    print(f"process {replicas.process_id} of {replicas.num_processes}")
    return replicas.num_replicas, model


@pytest.mark.exhaustive
def test_the_result_is_that_of_one_process(capsys):
    num_replicas, model = ks.launch_processes(trained, 2, (HERE, 0.1), {"momentum": 0.9})
    assert num_replicas == 2
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == problem.NUM_STEPS
    assert problem.relative_difference(model.get_weights(), problem.trained_in_numpy()) <= 3 * problem.TOLERANCE
    printed = capsys.readouterr().out
    assert "[0] process 0 of 2" in printed and "[1] process 1 of 2" in printed


@pytest.mark.neutral
@pytest.mark.usefixtures("launcher_alone")
def test_the_first_error_is_raised_with_its_traceback(tmp_path):
    def fails(file):
        import os
        import time

        if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "1":
            open(file, "w").close()
            raise LookupError("on purpose")
        while not os.path.exists(file):
            time.sleep(0.01)
        time.sleep(1)
        raise OSError("another process is gone")  # as from a collective

    fails.__module__ = "__main__"  # as in a notebook, which no other process can import
    before = set(tmp_path.parent.iterdir())
    with pytest.raises(LookupError, match="on purpose") as caught:
        ks.launch_processes(fails, 2, (str(tmp_path / "raised"),))
    assert "in fails" in str(caught.value.__cause__)
    assert set(tmp_path.parent.iterdir()) == before


@pytest.mark.neutral
@pytest.mark.parametrize(
    "status, words",
    [
        (137, "the exit status 137 of `python -m keras_shardopt.launch --nproc 1`"),
        (0, "must return. Received: process 0"),
    ],
)
@pytest.mark.usefixtures("launcher_alone")
def test_a_process_that_does_not_return_raises(monkeypatch, capsys, status, words):
    def dies(status):
        import os
        import sys

        os.kill(os.getpid(), status - 128) if status else sys.exit()

    # A notebook can run inside another job.
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [pathlib.Path("/nowhere"), *sys.path])
    with pytest.raises(RuntimeError, match=words):
        ks.launch_processes(dies, 1, (status,))
    assert status == 0 or "process 0 was ended by SIGKILL" in capsys.readouterr().out


@pytest.mark.neutral
def test_a_result_that_cannot_be_pickled_is_an_error(tmp_path):
    (tmp_path / CALL).write_bytes(cloudpickle.dumps((threading.Lock, (), {})))
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock'"):
        call._main(tmp_path)
    error, _ = pickle.loads((tmp_path / f"{ERROR}{os.getpid()}").read_bytes())
    assert isinstance(error, TypeError)


@pytest.mark.neutral
@pytest.mark.usefixtures("launcher_alone")
def test_an_interrupt_ends_all_processes(tmp_path):
    def waits(folder):
        import os
        import pathlib
        import time

        (pathlib.Path(folder) / str(os.getpid())).touch()
        time.sleep(100)

    def interrupts():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a shell's background jobs
    try:
        threading.Thread(target=interrupts, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            ks.launch_processes(waits, 2, (str(tmp_path),))
    finally:
        signal.signal(signal.SIGINT, before)
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name), 0)


@pytest.mark.neutral
def test_bad_arguments_raise_before_processes_start(monkeypatch):
    with pytest.raises(ValueError, match="`num_processes` must be"):
        ks.launch_processes(trained, 0)
    for wrong in [(None, 1), (trained, 1, 3), (trained, 1, (), [1])]:
        with pytest.raises(TypeError, match="`function` must be callable, `args` a list .* Received: function="):
            ks.launch_processes(*wrong)
    monkeypatch.delenv("KERAS_BACKEND")
    with pytest.raises(ValueError, match=r'Set KERAS_BACKEND before `import keras`: `os.environ\["'):
        ks.launch_processes(trained, 2)


class Stubborn(Exception):
    """Cannot be unpickled, as its arguments are not those of its `__init__`."""

    def __init__(self, one, two):
        super().__init__("one text")


@pytest.mark.neutral
def test_errors_that_cannot_be_pickled_keep_their_text(tmp_path):
    def fails():
        raise Stubborn(1, 2)

    (tmp_path / CALL).write_bytes(cloudpickle.dumps((fails, (), {})))
    with pytest.raises(Stubborn):
        call._main(tmp_path)
    error, text = pickle.loads((tmp_path / f"{ERROR}{os.getpid()}").read_bytes())
    assert (type(error), str(error)) == (RuntimeError, "Stubborn: one text")
    assert "in fails" in text
    assert not (tmp_path / RESULT).exists()


@pytest.mark.neutral
@pytest.mark.usefixtures("launcher_alone")
def test_a_process_ends_with_the_program_that_waits_for_it(tmp_path):
    """That program holds the other end of its input, which closes even if it is killed."""
    (tmp_path / CALL).write_bytes(cloudpickle.dumps((time.sleep, (200,), {})))
    command = [sys.executable, "-m", "keras_shardopt.launch.call", str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=launch.patient(60))
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.neutral
@pytest.mark.usefixtures("launcher_alone")
def test_a_question_to_the_user_is_an_error(tmp_path):
    (tmp_path / CALL).write_bytes(cloudpickle.dumps((input, (), {})))
    command = [sys.executable, "-m", "keras_shardopt.launch.call", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as started:
        try:
            assert started.wait(launch.patient(60)) == 1 and b"EOFError" in started.stderr.read()
        finally:
            started.kill()
