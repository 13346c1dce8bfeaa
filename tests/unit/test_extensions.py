"""The core knows no extension: nothing outside an extension's folder names it, and without it the rest works."""

import ast
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from support import launch

import keras_shardopt

PACKAGE = pathlib.Path(keras_shardopt.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
WORDS = {
    "coding": r"[Cc]oding|[Cc]oded|[Cc]odecs?|[Rr]esiduals?|PowerSGD|powersgd|Int[48]|int4",
    "equal_bits": r"VirtualReplicas?|virtual_replicas?|equal_bits|SumOfParts|Subtrees|PartsStep",
    "local_sgd": "LocalSGD|local_sgd|LocalUpdates|LocalStep|OwnGradients|WeightSync|outer_optimizer|last_syncs|"
    r"sync_(?!group)\w+",
    "noise": r"GradientNoise|gradient_noise\w*|NoiseAverages|noise_scale",
    "sharded_weights": r"ShardedWeights|sharded_weights|DividedWeights|WeightsOfOptimizer|HeldParameter|ShardedStep",
}
ALLOWED = {"__init__.py", "launch/output.py"}  # the public names; Python's own `codecs`


@functools.cache
def texts_in(source):
    """Names and strings in code, without docstrings and comments."""
    tree = ast.parse(source)
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    docs = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        texts = [getattr(node, name, None) for name in ("id", "attr", "name", "arg", "module")]
        texts += [node.value] if isinstance(node, ast.Constant) and id(node) not in docs else []
        found += [text for text in texts if isinstance(text, str)]
    return found


def mentions(source, extension):
    """The words of an extension in code."""
    return [word for text in texts_in(source) for word in re.findall(words_of(extension), text)]


def words_of(extension):
    """Also as a part of a name, such as `needs_codec` or `IsCoded`."""
    return rf"(?:(?<![A-Za-z0-9])|(?<=[a-z0-9])(?=[A-Z]))(?:{WORDS[extension]})(?![a-z0-9])"


@pytest.mark.neutral
def test_every_extension_has_its_words():
    folders = {path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py")}
    assert folders == set(WORDS)


@pytest.mark.neutral
@pytest.mark.parametrize("extension", WORDS)
def test_no_file_outside_its_folder_mentions_an_extension(extension):
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    core = {name: text for name, text in files.items() if not name.startswith("extensions/") and name not in ALLOWED}
    assert not {name: found for name, text in core.items() if (found := mentions(text, extension))}
    others = {name: text for name, text in files.items() if re.match(rf"extensions/(?!{extension}/)\w+/", name)}
    assert not {name: found for name, text in others.items() if (found := mentions(text, extension))}


@pytest.mark.neutral
def test_a_mention_is_found():
    assert mentions("if optimizer.sync_every: pass", "local_sgd") == ["sync_every"]
    assert mentions('raise ValueError("Leave `VirtualReplicas` out.")', "equal_bits") == ["VirtualReplicas"]
    assert mentions("self.needs_codec = IsCoded()", "coding") == ["codec", "Coded"]
    assert mentions("x = decoding(replica_id_in_sync_group)", "coding") == []
    assert mentions('"""Of `VirtualReplicas`."""\nx = 1  # GradientNoise', "equal_bits") == []


def package_without(extension, folder):
    """A copy of the package without the folder of an extension, its row, and its public names."""
    copy = folder / "keras_shardopt"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "extensions" / extension)
    rows = copy / "extensions" / "__init__.py"
    rows.write_text(re.sub(rf'(, "?{extension}"?\b"?|"?\b{extension}"?, )', "", rows.read_text()))
    face = copy / "__init__.py"
    lines = face.read_text().splitlines(keepends=True)
    gone = [line for line in lines if line.startswith(f"from keras_shardopt.extensions.{extension}")]
    names = {
        name for line in gone for name in re.findall(r"(\w+)(?=,|\n)", line.split(" import ")[1].split(" as ")[-1])
    }
    face.write_text("".join(line for line in lines if line not in gone and line.strip(' ",\n') not in names))
    return copy


PROGRAM = """
import os, sys
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
import keras, numpy as np, keras_shardopt as ks
assert ks.__file__.startswith(sys.argv[1])
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
inner = ks.LossScaling(ks.GradientClipping(keras.optimizers.SGD(0.1, momentum=0.9), 1.0))
optimizer = ks.CrossShard(inner, gradient_accumulation_steps=2, on_nonfinite="skip", compression="bfloat16")
with ks.data_parallel():
    model.compile(optimizer, "mse")
model.fit(np.ones((16, 4)), np.ones((16, 2)), batch_size=4, verbose=0)
ks.save_model(model, "model.keras")
loaded = keras.saving.load_model("model.keras")
assert repr(loaded.optimizer) == repr(optimizer) and int(loaded.optimizer.iterations) == 2
for name in ks.__all__:
    getattr(ks, name)
"""


def run(command, folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS)])}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.neutral
@pytest.mark.parametrize("extension", WORDS)
def test_a_program_runs_without_an_extension(extension, tmp_path):
    copy = package_without(extension, tmp_path)
    assert not (copy / "extensions" / extension).exists()
    launch.program("torch", PROGRAM, tmp_path, environment=launch.variables("torch", OMP_NUM_THREADS="1"))


@pytest.mark.exhaustive
@pytest.mark.backends("torch")
@pytest.mark.parametrize("extension", WORDS)
def test_other_tests_pass_without_an_extension(extension, tmp_path):
    """Those of updates and wrapping whose file does not mention it."""
    package_without(extension, tmp_path)
    files = [
        path for room in ("update", "optimizers", "wrapping") for path in (TESTS / "unit" / room).glob("test_*.py")
    ]
    words = re.compile(words_of(extension) + r"|compression|old_arguments|ks\.__all__|summaries")
    files = [str(path) for path in files if not words.search(path.read_text())]
    assert len(files) > 9
    out = run(["-m", "pytest", "-q", "-x", "-c", str(TESTS.parent / "pyproject.toml"), *files], tmp_path)
    assert int(re.search(r"(\d+) passed", out)[1]) > 300
