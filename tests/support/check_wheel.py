"""Builds the wheel and sdist, installs the wheel into a new environment and trains with it from an empty folder."""

import os
import pathlib
import subprocess
import sys
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


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
        (wheel,) = folder.glob("*.whl")
        assert len(list(folder.glob("*.tar.gz"))) == 1
        names = zipfile.ZipFile(wheel).namelist()
        assert "keras_shardopt/py.typed" in names, names
        assert not [name for name in names if name.startswith("tests")], names
        venv.create(folder / "env", with_pip=True)
        python = str(folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python")
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{wheel}[jax]")
        empty = folder / "empty"
        empty.mkdir()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        run(python, "-c", SMOKE, cwd=empty, env={**environment, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"})


main()
