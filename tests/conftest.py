"""One backend per test process: the one in KERAS_BACKEND. Gives it several CPU devices before it starts."""

import atexit
import collections
import functools
import gc
import os
import pathlib
import re
import resource
import shutil
import sys
import tempfile
import typing
from importlib import metadata
from multiprocessing import forkserver

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # torch.compile starts a process for every core
# JAX spends most of the time on compiling, and mostly the same programs: once for all tests, and in all processes of
# this run that test side by side.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import pytest
from support.launch import QUICKLY_COMPILED, slowness

BACKEND = os.environ["KERAS_BACKEND"]
# Where the arithmetic and the messages that are the same on all backends are tested: here each test takes least.
NEUTRAL_BACKEND = "torch"
NUM_TENSORFLOW_DEVICES = 4
# Programs as small as those of tests are compiled faster in one part.
JAX_DEVICES = "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"


def pytest_addoption(parser):
    parser.addoption(
        "--suite",
        choices=["default", "exhaustive", "all"],
        help="without tests marked `exhaustive` (the default), these alone, or all; a test that is named runs always",
    )
    parser.addoption("--cpu", action="store_true", help="print what each file of tests costs in seconds of CPU")


def pytest_report_header(config):
    return f"keras {metadata.version('keras')}, backend {BACKEND}, suite {_suite(config)}"


@pytest.hookimpl(tryfirst=True)  # before pytest makes the report, and before pytest-timeout reads its limit
def pytest_configure(config):
    config.addinivalue_line("markers", "backends(*names): the test is about these backends and skips on others")
    config.addinivalue_line(
        "markers",
        f"neutral: what is tested depends on no backend; once is enough, on {NEUTRAL_BACKEND}, and others leave it out",
    )
    config.addinivalue_line(
        "markers", "exhaustive(*names): one of many crosses, left out by default; with names on these backends only"
    )
    config.addinivalue_line("markers", "xdist_group(name): run in the same process as others of that name")
    runs_here = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if os.environ.get("REPORTS") and not hasattr(config, "workerinput"):
        run = os.environ.get("RUN_NAME") or os.environ.get("TOX_ENV_NAME", "")
        names = [BACKEND, metadata.version("keras"), run, _suite(config)]
        config.option.xmlpath = os.path.join(os.environ["REPORTS"], "-".join(name for name in names if name) + ".xml")
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None:
        config.option.timeout = float(config.getini("timeout") or 300) * slowness()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # the order is below
    os.environ.setdefault("XLA_FLAGS", f"{JAX_DEVICES} {QUICKLY_COMPILED if _suite(config) == 'default' else ''}")
    if runs_here:  # and not only in workers
        _start_backend(quickly_compiled=_suite(config) == "default")
    if config.option.cpu:
        config.pluginmanager.register(_CpuSeconds(runs_here), "seconds of CPU")


def _start_backend(quickly_compiled):
    """Imports the framework; the default tests do not wait for programs to be made fast, as the exhaustive ones do."""
    import keras  # noqa: F401

    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * NUM_TENSORFLOW_DEVICES,
        )
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": quickly_compiled})
        if sys.version_info < (3, 12):
            # A tenth of the time of tracing: older Pythons list a protocol's attributes at each `isinstance` anew.
            typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)
    elif BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    gc.freeze()  # what was imported is there to stay, and need not be looked through


def _suite(config):
    """Which tests are asked for; those that are named one by one in any case."""
    named = any("::" in argument for argument in config.args)
    return config.option.suite or ("all" if named else "default")


def pytest_ignore_collect(collection_path):
    """A file about other backends is not even imported: that takes longer than many tests."""
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        text = collection_path.read_text()
        about = re.search(r"^pytestmark = .*mark\.backends\(([^)]*)\)", text, re.MULTILINE)
        if about and BACKEND not in re.findall(r"\w+", about[1]):
            return True
        if BACKEND != NEUTRAL_BACKEND and re.search(r"^pytestmark = pytest\.mark\.neutral$", text, re.MULTILINE):
            return True
    return None


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config, items):
    suite, slow = _suite(config), slowness()
    kept, left_out, first = [], [], set()
    for item in items:
        wanted = suite == "all" or _is_exhaustive(item) == (suite == "exhaustive")
        if item.get_closest_marker("neutral"):
            if any(NEUTRAL_BACKEND not in mark.args for mark in item.iter_markers("backends")):
                raise pytest.UsageError(f"{item.nodeid} would run nowhere: `neutral`, and not about {NEUTRAL_BACKEND}")
            wanted = wanted and BACKEND == NEUTRAL_BACKEND
        (kept if wanted else left_out).append(item)
        group = _shares_work_with(item)
        if item.get_closest_marker("xdist_group") or group == item.path.stem:
            first.add(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        limit = item.get_closest_marker("timeout")
        if limit is not None and limit.args:
            item.add_marker(pytest.mark.timeout(limit.args[0] * slow, *limit.args[1:]), append=False)
        for mark in item.iter_markers("backends"):
            if BACKEND not in mark.args:
                item.add_marker(pytest.mark.skip(reason=f"about {' and '.join(mark.args)}, not {BACKEND}"))
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):  # what takes longest first, so that no worker waits for another in the end
        items.sort(key=lambda item: item not in first)


def _is_exhaustive(item):
    """Also where any of its parameters is."""
    return any(not mark.args or BACKEND in mark.args for mark in item.iter_markers("exhaustive"))


def _shares_work_with(item):
    """The tests that should run in the same process (`--dist loadgroup`), because they look at the same runs."""
    if item.get_closest_marker("xdist_group"):
        return None
    if BACKEND == "torch" and _has_a_fixture_of_its_module(item):
        return item.path.stem  # mostly one spawn of ranks for all that look at it
    callspec = getattr(item, "callspec", None)
    if callspec is not None and isinstance(callspec.params.get("inner"), str):
        return callspec.params["inner"]
    if any(hasattr(value, "cache_clear") for value in vars(item.module).values()):
        return item.path.stem  # its module keeps runs (`functools.cache`)
    return None


def _has_a_fixture_of_its_module(item):
    fixtures = item._fixtureinfo.name2fixturedefs
    return any(fixtures[name][-1].scope == "module" for name in item.fixturenames if name in fixtures)


class _CpuSeconds:
    """What each test takes of processors: unlike the time on the clock, the same on a busy machine."""

    def __init__(self, runs_here):
        self._start = _cpu_seconds() if runs_here else 0.0
        self._by_file = collections.defaultdict(lambda: [0, 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        begin = _cpu_seconds()
        item.user_properties.append(("seconds_of_cpu", begin))  # replaced by the difference when its report is made
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            item.user_properties[:] = [
                (name, _cpu_seconds() - value if name == "seconds_of_cpu" else value)
                for name, value in item.user_properties
            ]

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            spent = self._by_file[report.nodeid.partition("::")[0]]
            spent[0] += 1
            spent[1] += dict(report.user_properties).get("seconds_of_cpu", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("seconds of CPU by file, without imports and collecting")
        for file, (number, seconds) in sorted(self._by_file.items(), key=lambda entry: -entry[1][1]):
            terminalreporter.write_line(f"{seconds:8.1f}  {number:5d} tests  {file}")
        terminalreporter.write_line(f"{sum(seconds for _, seconds in self._by_file.values()):8.1f}  in all")


def _cpu_seconds():
    """Of this process, of those that it has waited for, and of the server that forks ranks and those it waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(each.ru_utime + each.ru_stime for each in usage)
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    stat = pathlib.Path(f"/proc/{server}/stat")
    if server and stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


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


@pytest.fixture(scope=lambda fixture_name, config: "module" if BACKEND == "torch" else "function")
def world(tmp_path_factory):
    """The replicas of this backend, whatever they are; ranks once for all tests of a file. See support/worlds.py."""
    from support import worlds

    return worlds.Ranks(lambda: tmp_path_factory.mktemp("ranks")) if BACKEND == "torch" else worlds.Devices()


def _let_graphs_go():
    """TensorFlow keeps each graph with a custom gradient for ever, and Keras' steps have some: 2 MB for each test."""
    from tensorflow.python.framework import ops

    registered = ops.gradient_registry._registry
    for name in [name for name in registered if name.startswith("CustomGradient-")]:
        del registered[name]


@pytest.fixture(autouse=True)
def clean_keras_state():
    import keras

    keras.utils.set_random_seed(0)
    if BACKEND == "tensorflow":
        # Strategies number their collectives from the same key, and TensorFlow refuses a key that it has seen with
        # another number of devices. Its own tests do the same.
        import tensorflow as tf

        tf.distribute.MirroredStrategy._collective_key_base += 100_000
    yield
    if BACKEND == "tensorflow":
        from keras_shardopt.backends.active import processes

        processes.num_replicas_of_last_scope = 1
        _let_graphs_go()
    keras.config.set_dtype_policy("float32")
    if BACKEND == "jax":
        keras.distribution.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
