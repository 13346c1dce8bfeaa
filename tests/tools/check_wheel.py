"""Builds the wheel and sdist, installs the wheel into a new environment and trains with it from an empty folder."""

import email
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).parents[2]
SMOKE = """
import keras, keras_shardopt as ks, numpy as np
assert "site-packages" in ks.__file__, ks.__file__
with ks.data_parallel(num_replicas=2) as replicas:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=ks.CrossShard("sgd"), loss="mse")
model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
assert replicas.num_replicas == 2 and replicas.largest_difference(model) == 0
print("the installed wheel trains on", replicas.num_replicas, "replicas")
"""


def run(*command, **kwargs):
    print("+", *command, flush=True)
    subprocess.run(command, check=True, **kwargs)


def check_metadata(wheel, names):
    """What an index and `pip` show, and what installing brings along."""
    (file,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert file.replace("METADATA", "licenses/LICENSE") in names, names
    metadata = email.message_from_bytes(wheel.read(file))
    for field in ("Name", "Version", "Summary", "Author", "License-Expression", "Keywords", "Requires-Python"):
        assert metadata[field], f"{field} is missing"
    assert metadata["Description-Content-Type"] == "text/markdown" and "# keras_shardopt" in metadata.get_payload()
    links = re.findall(r"\]\((?!https?:)[^)]*\)", metadata.get_payload())
    assert not links, f"an index would break {links}"
    classifiers = metadata.get_all("Classifier")
    for start in ("Programming Language :: Python :: 3.", "Operating System ::", "Topic ::", "Typing :: Typed"):
        assert any(each.startswith(start) for each in classifiers), f"no classifier {start}"
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"tensorflow", "jax", "torch", "summaries", "plot", "examples"} <= extras, extras
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(needed) == ["keras>=3.12", "numpy"], needed


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
        (wheel,) = folder.glob("*.whl")
        (source,) = folder.glob("*.tar.gz")
        names = zipfile.ZipFile(wheel).namelist()
        assert "keras_shardopt/py.typed" in names, names
        assert {name.partition("/")[0].partition("-")[0] for name in names} == {"keras_shardopt"}, names
        check_metadata(zipfile.ZipFile(wheel), names)
        with tarfile.open(source) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        wanted = {"LICENSE", "README.md", "CHANGELOG.md", "mkdocs.yml", "tox.ini", "constraints.txt", "docs/index.md"}
        wanted |= {"examples/digits.py", "tests/conftest.py", "keras_shardopt/__init__.py"}
        assert wanted <= names, wanted - names
        venv.create(folder / "env", with_pip=True)
        python = str(folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python")
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{wheel}[jax]")
        empty = folder / "empty"
        empty.mkdir()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        run(python, "-c", SMOKE, cwd=empty, env={**environment, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"})


main()
