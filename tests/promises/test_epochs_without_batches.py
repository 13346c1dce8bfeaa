"""An epoch for which no batch is left logs nothing, with a warning, and no callback takes it for the best one."""

import pytest
from promises.problems import exhausted
from support.suites import some


@pytest.mark.parametrize("case", some(exhausted.CASES, ["built-in step"], "tensorflow"))
def test_an_epoch_without_batches_logs_nothing(world, case):
    history, best_epoch, best, num_warnings = world.run(exhausted.on_replicas, 2, case, of=exhausted.CASES)
    assert {name: len(values) for name, values in history.items()} == {"loss": 1, "val_loss": exhausted.EPOCHS}
    assert history["val_loss"][0] == history["val_loss"][1] > 0  # nothing was trained
    assert (best_epoch, best) == (0, history["loss"][0])
    assert num_warnings == 1
    if case == "built-in step":
        assert best > 0
