"""The notebook of the examples runs in a kernel on every backend, and its processes do not outlive the kernel."""

import os
import re
import time

import pytest
from support import launch, pages

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]  # those of Jupyter
NOTEBOOK = pages.ROOT / "examples" / "notebooks" / "replicas.ipynb"


@pytest.fixture
def kernel_of(monkeypatch):
    """Sets the environment that kernels start with."""

    def prepare(backend):
        for name, value in launch.variables(backend, OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("XLA_FLAGS", raising=False)

    return prepare


def outputs(cell, kind):
    return [each for each in cell.outputs if each.output_type == kind]


@pytest.mark.parametrize("backend", pages.BACKENDS)
def test_the_notebook_runs_as_its_text_says(backend, kernel_of, tmp_path):
    kernel_of(backend)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, launched, plots, here = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = "".join(each.text for each in outputs(launched, "stream"))
    assert "[0] process 0, 2 replicas" in text and "[1] process 1, 2 replicas" in text
    (picture,) = outputs(plots, "display_data")
    assert picture.data["image/png"]
    text = "".join(each.text for each in outputs(here, "stream"))
    assert float(re.search(r"largest difference (\S+)", text)[1]) < 1e-5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_replicas_after_the_start_of_the_framework_need_a_new_kernel(backend, kernel_of):
    kernel_of(backend)
    cells = [
        "import keras, keras_shardopt as ks\nkeras.ops.ones(1) + 1",
        "with ks.data_parallel(num_replicas=3) as replicas:\n    print(replicas.num_replicas)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="restart the kernel"):
        nbclient.NotebookClient(notebook, timeout=200).execute()


WAITS = """
import keras_shardopt as ks

def waits(file):
    import os, time
    with open(file, "a") as pids:
        pids.write(f"{os.getpid()}\\n")
    time.sleep(300)

ks.launch_processes(waits, 2, (FILE,))
"""


def test_processes_end_with_a_killed_kernel(kernel_of, tmp_path):
    kernel_of("torch")
    file = tmp_path / "pids"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(WAITS.replace("FILE", repr(str(file))))])
    client = nbclient.NotebookClient(notebook)
    with client.setup_kernel():
        client.kc.execute(notebook.cells[0].source)
        limit = time.monotonic() + launch.patient(100)
        while not file.exists() or len(pids := file.read_text().split()) < 2:
            assert time.monotonic() < limit
            time.sleep(0.1)
        os.kill(int(client.km.provisioner.pid), 9)
        while [pid for pid in pids if is_alive(pid)]:
            assert time.monotonic() < limit, "processes outlive the kernel"
            time.sleep(0.1)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
