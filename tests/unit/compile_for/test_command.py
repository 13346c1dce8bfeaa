"""`python -m keras_shardopt.compile_for`: each mistake ends with one line that names the fix."""

import importlib.util

import pytest

from keras_shardopt.compile_for import __main__ as command


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.removeprefix("python -m keras_shardopt.compile_for: ").removesuffix("\n")


@pytest.mark.neutral
@pytest.mark.parametrize("target", ["b200:8", "h100", "h100:x", "tpu:v5e:0x2", "tpu:v9:2x2"])
def test_an_unknown_target_names_those_that_are_known(target, capsys):
    message = said(capsys, target, "train.py")
    assert message.startswith("A target is a device and a number or shape: tpu:v4:2x4, ")
    assert message.endswith(f"h200:8. Received: {target!r}.")


@pytest.mark.neutral
@pytest.mark.parametrize("target", ["h100:9", "a100:2x4"])
def test_gpus_come_in_machines_of_8(target, capsys):
    assert said(capsys, target, "train.py").startswith("The number of GPUs must be at most 8 or a multiple of 8")


@pytest.mark.neutral
def test_a_program_is_needed(capsys):
    assert said(capsys, "h100:8") == "A program is missing after the target. Use for example `h100:8 train.py`."


@pytest.mark.backends("torch", "tensorflow")
def test_another_backend_names_jax(capsys):
    assert said(capsys, "h100:8", "train.py").endswith("Set KERAS_BACKEND=jax.")


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    ("target", "packages"), [("tpu:v5e:2x4", "libtpu"), ("h100:8", "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0}")]
)
def test_missing_packages_are_named(target, packages, monkeypatch, capsys):
    import jax

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = said(capsys, target, "train.py")
    assert message.endswith(f"is not installed. Run `pip install {packages.format(jax.__version__)}`.")


@pytest.mark.backends("jax")
@pytest.mark.parametrize("cuda", [12, 13])
def test_the_plugin_of_either_cuda_version_serves(cuda, monkeypatch):
    from keras_shardopt.compile_for.jax import step
    from keras_shardopt.compile_for.targets import parse

    installed = {"jax_plugins", f"jax_plugins.xla_cuda{cuda}"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert step.missing_packages(parse("h100:1")) == []


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Makes a program that runs on this process's devices."""
    from keras_shardopt.compile_for.jax import step

    monkeypatch.setattr(step, "missing_packages", lambda target: [])
    monkeypatch.setattr(step, "use_cpu_devices", lambda number: None)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [])

    def made(text):
        (tmp_path / "train.py").write_text(text)
        return str(tmp_path / "train.py")

    return made


_FIT = """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", {how})
model.{call}(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)
"""


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "import sys; sys.exit()",
        _FIT.format(how="run_eagerly=True", call="fit"),
        _FIT.format(how="", call="evaluate"),
    ],
    ids=["nothing", "ends", "eager", "evaluates"],
)
def test_a_program_that_never_makes_a_step_is_told_how(text, program, capsys):
    message = said(capsys, "h100:2", program(text))
    assert "must run a compiled training step, but ran no such step. Call `model.fit` or `train_on_batch`" in message


@pytest.mark.backends("jax")
def test_a_program_that_uses_one_of_several_devices_is_told_how(program, monkeypatch, capsys):
    import jax

    from keras_shardopt.compile_for.jax import step

    monkeypatch.setattr(step, "_devices", lambda target: jax.devices()[: target.num_devices])
    message = said(capsys, "h100:2", program(_FIT.format(how="", call="fit")))
    assert message.startswith("The program must use all devices of h100:2, but its training step uses one. Create and")


@pytest.mark.backends("jax")
def test_the_status_of_a_program_that_ends_early_is_named(program, capsys):
    assert said(capsys, "h100:2", program("import sys; sys.exit(3)")).endswith(
        "ended before its first step. Received: exit status 3."
    )


@pytest.mark.backends("jax")
def test_an_error_of_the_program_keeps_its_traceback(program):
    with pytest.raises(RuntimeError, match="failed before its first step") as error:
        command.main(["h100:2", program("raise ValueError('of the program')")])
    assert str(error.value.__cause__) == "of the program"
    with pytest.raises(KeyError):
        command.main(["h100:2", program("raise KeyError('of the program')")])
