"""One backend per test process: the one in KERAS_BACKEND. Gives it several CPU devices before it starts."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # torch.compile starts a process for every core
# Programs as small as those of tests are compiled faster in one part.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1")
# JAX spends most of the time on compiling, and mostly the same programs: once for all tests, and in all processes of
# this run that test side by side.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import keras
import pytest

BACKEND = keras.config.backend()
NUM_TENSORFLOW_DEVICES = 4

if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_TENSORFLOW_DEVICES,
    )
elif BACKEND == "torch":
    import torch

    torch.set_num_threads(1)


def pytest_report_header():
    return f"keras {keras.__version__}, backend {BACKEND}"


@pytest.hookimpl(tryfirst=True)  # before pytest makes the report
def pytest_configure(config):
    if os.environ.get("REPORTS") and not hasattr(config, "workerinput"):
        config.option.xmlpath = os.path.join(os.environ["REPORTS"], f"{BACKEND}-{keras.__version__}.xml")
    config.addinivalue_line("markers", "backends(*names): the test is about these backends and skips on others")
    config.addinivalue_line("markers", "xdist_group(name): run in the same process as others of that name")
    config.addinivalue_line("markers", "exhaustive: takes minutes, for the exhaustive suite")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items):
    for item in items:
        group = _shares_work_with(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        for mark in item.iter_markers("backends"):
            if BACKEND not in mark.args:
                item.add_marker(pytest.mark.skip(reason=f"about {' and '.join(mark.args)}, not {BACKEND}"))


def _shares_work_with(item):
    """The tests that should run in the same process (`--dist loadgroup`), because they look at the same runs."""
    folder = item.path.parent.name
    if folder in ("multiprocess", "exchange") or (BACKEND == "torch" and folder == "equivalence"):
        return item.path.stem  # one spawn of ranks or processes for all that look at it
    callspec = getattr(item, "callspec", None)
    if callspec is not None and isinstance(callspec.params.get("inner"), str):
        return callspec.params["inner"]
    return None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    # A run in which everything skipped has shown nothing.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:
        return
    if exitstatus == 0 and not reporter.stats.get("passed"):
        reporter.write_line("ERROR: no test passed, everything was skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def backend():
    return BACKEND


@pytest.fixture(autouse=True)
def clean_keras_state():
    keras.utils.set_random_seed(0)
    if BACKEND == "tensorflow":
        # Strategies number their collectives from the same key, and TensorFlow refuses a key that it has seen with
        # another number of devices. Its own tests do the same.
        tf.distribute.MirroredStrategy._collective_key_base += 100_000
    yield
    keras.config.set_dtype_policy("float32")
    if BACKEND == "jax":
        keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
