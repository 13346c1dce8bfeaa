"""What `import keras_shardopt` loads and changes beyond `import keras`, and first uses beyond that."""

import functools
import subprocess
import sys

import pytest
from conftest import BACKEND
from support import launch
from support.launch import patient

ATTRIBUTES = """
import inspect, sys, types
import keras

def attributes(*more):
    modules = [module for name, module in list(sys.modules.items()) if is_foreign(name)]
    owners = [module for module in modules if isinstance(module, types.ModuleType)]
    kinds = [value for module in owners for value in vars(module).values() if issubclass(type(value), type)]
    owners += [kind for kind in kinds if is_foreign(str(vars(kind).get("__module__")))]
    return {id(owner): (owner, dict(vars(owner))) for owner in (*owners, *more)}

def is_foreign(name):
    return name.partition(".")[0] in ("keras", "tensorflow", "torch", "jax")

def changed(before, kinds):
    return {
        (owner, name)
        for owner, values in before.values()
        for name, value in vars(owner).items()
        if value is not values.get(name) and issubclass(type(value), kinds)
        if not issubclass(type(value), types.ModuleType)
    }
"""

PROGRAM = f"""{ATTRIBUTES}
before = {{name.partition(".")[0] for name in sys.modules}}
in_keras = attributes()
import keras_shardopt
print(*({{name.partition(".")[0] for name in sys.modules}} - before - set(sys.stdlib_module_names)))
print("changed by the import:", changed(in_keras, object))
"""

USES = (
    ATTRIBUTES
    + """import gc, pkgutil
import numpy as np
from keras.saving import save_model

x, y = np.ones((6, 4)), np.ones((6, 1))
frozen = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
gc.freeze()  # as before a fork
sys.modules["left_out"] = None  # as a program that must not import something
if keras.config.backend() == "torch":
    import torch
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    torch.distributed.destroy_process_group()
early = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
import keras_shardopt
from keras_shardopt.backends import for_backend, models, patches

calls, in_keras = [], keras.Model.fit
def logged(self, *args, **kwargs):
    calls.append(self)
    return in_keras(self, *args, **kwargs)

keras.Model.fit = logged  # as a package that logs runs does
tables = patches.PATCHES, for_backend(patches._TABLES).PATCHES

def listed(uses):
    for table in tables:
        for use in uses:
            for target in table.get(use, ()):
                owner, _, name = target.rpartition(".")
                try:
                    owner = pkgutil.resolve_name(owner)
                    getattr(owner, name)
                except (ImportError, AttributeError):
                    continue
                yield owner, name

uses = {use for table in tables for use in table}
# `sys.modules` does not have every module: `tf.nn` is a lazy one.
before = attributes(*[owner for owner, _ in listed(uses)])
optimizer = keras_shardopt.CrossShard("sgd", on_nonfinite="skip")
assert early in models.models_with(early.trainable_variables)
if keras.config.backend() == "torch":
    assert len(ddp._forward_pre_hooks) == 1
frozen.compile("sgd")
assert frozen in models.models_with(frozen.trainable_variables)
with keras_shardopt.data_parallel(2 if keras.config.backend() == "jax" else None) as replicas:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(keras_shardopt.CrossShard("sgd", on_nonfinite="skip"), "mse")
    keras_shardopt.prepare(model)
assert save_model is keras.saving.save_model is not keras.src.saving.saving_api.save_model
model.fit(x, y, batch_size=4, verbose=0)
assert calls == [model]
replicas.close()
def compare(when):
    found, expected = changed(before, (type, types.FunctionType, property)), set(listed(patches._installed))
    print(when, len(found) > 5, found - expected, expected - found)

compare("used")
for use in uses:
    patches.install(use)
compare("all")
"""
)

# Two processes, as those of a job are seeded alike.
IN_A_JOB = """
import importlib.util, os
from keras.src.backend.common import global_state
sys.stdout.flush()
rank = 0 if os.fork() else 1
os.environ["RANK"] = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] = str(rank)
with keras_shardopt.data_parallel() as replicas:
    assert replicas.num_processes == 2
    first = keras.random.uniform(())
    assert "tensorflow" not in sys.modules
    keras.utils.set_random_seed(keras.src.utils.rng_utils.get_random_seed())
    global_state.set_global_attribute("global_seed_generator", None)  # Keras 3.12 keeps that of the old seed
    assert keras.random.uniform(()) == first  # the seed is Keras', which imports TensorFlow if it is installed
    assert ("tensorflow" in sys.modules) == (importlib.util.find_spec("tensorflow") is not None)
    keras_shardopt.backends.active.processes.gather_objects(rank)
if rank == 0:
    print("in a job")
"""


@functools.cache
def printed():
    """The lines of the program, which is one interpreter for several tests."""
    if BACKEND == "tensorflow":  # a fork has imported nothing but Keras there
        return launch.program(BACKEND, PROGRAM, environment=launch.variables(BACKEND)).splitlines()
    port = str(launch.free_ports(1)[0])
    of_ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    addresses = {"KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port}", "KERAS_DISTRIBUTION_NUM_PROCESSES": "2"}
    of_jax = {**addresses, "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    environment = launch.variables(BACKEND, **(of_ranks if BACKEND == "torch" else of_jax))
    return launch.run([sys.executable, "-c", PROGRAM + IN_A_JOB], 120, environment).splitlines()


@pytest.mark.xdist_group("processes")
@pytest.mark.exhaustive("jax")
def test_no_package_but_itself_is_loaded_that_keras_does_not_load():
    assert printed()[0] == "keras_shardopt"


@pytest.mark.xdist_group("processes")
def test_the_import_changes_nothing_in_keras_and_in_the_framework():
    assert printed()[1] == "changed by the import: set()"


def test_first_uses_change_what_is_listed():
    lines = launch.program(BACKEND, USES, environment=launch.variables(BACKEND)).splitlines()
    assert lines == ["used True set() set()", "all True set() set()"]


def test_an_error_leaves_no_use_half_made(monkeypatch):
    import keras

    from keras_shardopt.backends import patches

    rows = {
        "keras.Model.summary": ("backends.models:is_prepared", ""),
        "keras.Model.get_layer": ("arguments:none()", ""),
    }
    monkeypatch.setitem(patches.PATCHES, "planted", rows)
    before = keras.Model.summary
    with pytest.raises(AttributeError):
        patches.install("planted")
    assert keras.Model.summary is before and "planted" not in patches._installed


@pytest.mark.parametrize("first", ["ks.shard_data(np.ones((4, 2)))", "ks.build_optimizer('Adam')"])
def test_ranks_that_train_apart_are_found_after_any_use(first):
    program = f"import keras, numpy as np, keras_shardopt as ks; before = keras.Model.fit; {first}; "
    printed = launch.program(
        BACKEND, program + "print(keras.Model.fit is before)", environment=launch.variables(BACKEND)
    )
    assert printed.split()[-1] == "False"


@pytest.mark.backends("torch", "jax")
@pytest.mark.xdist_group("processes")
def test_processes_of_a_job_are_seeded_without_tensorflow():
    assert "in a job" in printed()  # optree can print more while Python 3.13 ends


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
def test_without_a_framework_one_sentence_names_the_package_to_install():
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert run.returncode == 1
    *traceback, message = run.stderr.strip().splitlines()
    assert message.startswith("ModuleNotFoundError: Keras needs a framework as its backend, and `jax` is not")
    assert "`pip install jax`" in message and "keras-shardopt[" not in message  # no index has the package
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

    program = "import runpy\nrunpy.run_module('keras_shardopt', run_name='__main__')"
    printed = launch.program(BACKEND, program, environment=launch.variables(BACKEND))
    rows = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert list(rows) == ["keras_shardopt", "Python", "packages", "backend", "device", "precision", "replicas"]
    assert rows["keras_shardopt"] == ks.__version__
    assert f"keras {keras.__version__}" in rows["packages"]
    assert rows["backend"].split()[0].lower().endswith(keras.config.backend().removeprefix("py"))
    assert "processes: 1" in rows["replicas"]
