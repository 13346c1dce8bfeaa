"""What `import keras_shardopt` loads beyond `import keras`."""

import subprocess
import sys

import pytest
from conftest import BACKEND
from support import launch
from support.launch import patient

PROGRAM = """
import sys
import keras
before = {name.partition(".")[0] for name in sys.modules}
import keras_shardopt
print(*({name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
"""


@pytest.mark.xdist_group("processes")
def test_no_package_but_itself_is_loaded_that_keras_does_not_load():
    if BACKEND == "tensorflow":  # a fork has imported nothing but Keras there
        printed = launch.program(BACKEND, PROGRAM, environment=launch.variables(BACKEND))
    else:
        command = [sys.executable, "-c", PROGRAM]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(120)).stdout
    assert printed.split() == ["keras_shardopt"]


WITHOUT_FRAMEWORKS = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("tensorflow", "jax", "jaxlib", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import keras_shardopt
"""


@pytest.mark.backends("jax")
def test_without_a_framework_one_sentence_names_the_extras():
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert run.returncode == 1
    *traceback, message = run.stderr.strip().splitlines()
    assert message.startswith("ModuleNotFoundError: Keras needs the framework that it runs on, and `jax` is not")
    assert 'pip install "keras-shardopt[jax]"' in message
    assert not any("site-packages" in line for line in traceback)  # nothing of the inside of Keras


def test_dir_shows_public_names_only():
    import keras_shardopt as ks

    for module in (ks, ks.callbacks, ks.schedules):
        shown = {name for name in dir(module) if not name.startswith("__")}
        assert shown == set(module.__all__)
        assert all(hasattr(module, name) for name in dir(module))


@pytest.mark.exhaustive("jax", "tensorflow")
def test_the_module_run_as_a_program_prints_what_a_bug_report_needs():
    import keras

    import keras_shardopt as ks

    run = subprocess.run(
        [sys.executable, "-m", "keras_shardopt"], capture_output=True, text=True, check=True, timeout=patient(120)
    )
    rows = dict(line.split(maxsplit=1) for line in run.stdout.splitlines())
    assert list(rows) == ["keras_shardopt", "Python", "packages", "backend", "device", "precision", "replicas"]
    assert rows["keras_shardopt"] == ks.__version__
    assert f"keras {keras.__version__}" in rows["packages"]
    assert rows["backend"].split()[0].lower().endswith(keras.config.backend().removeprefix("py"))
    assert "processes: 1" in rows["replicas"]
