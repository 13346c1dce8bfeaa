"""TensorFlow: two workers of a `MultiWorkerMirroredStrategy` equal one process with the whole batch."""

import keras
import numpy as np
import pytest
from support import launch, problem

pytestmark = [pytest.mark.backends("tensorflow"), pytest.mark.timeout(300), pytest.mark.xdist_group("processes")]


def test_two_workers_in_a_loop_by_hand(tmp_path):
    file = tmp_path / "results.npz"
    with pytest.raises(launch.WorkersFailed, match="worker 0 has noticed") as failure:
        launch.tensorflow_workers("tf_worker.py", 2, file, timeout=200, grace=30)
    # The one that was to be killed, and no other.
    assert "worker 0, exit status 0\n" in str(failure.value) and "worker 1, exit status -9\n" in str(failure.value)
    found = list(np.load(file).values())
    model = problem.model()
    model.compile(problem.sgd_momentum(), "mse")
    x, y = problem.data()
    model.fit(x, y, batch_size=problem.BATCH_SIZE, shuffle=False, verbose=0)
    assert problem.relative_difference(found[:4], model.get_weights()) <= problem.TOLERANCE
    slots = [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]
    assert found[4] == slots[0] == problem.NUM_STEPS  # the update counter, then the rate
    start = [np.zeros_like(slot) for slot in slots[2:]]
    assert problem.relative_difference(found[6:], slots[2:], start) <= problem.TOLERANCE
