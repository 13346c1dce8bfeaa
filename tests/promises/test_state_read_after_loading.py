"""Counters, rates and scales can be read as soon as they are loaded, on several replicas too."""

import keras
import numpy as np
import pytest
from promises.problems import reading
from support import suites

from keras_shardopt.backends.active import processes


@pytest.mark.parametrize("way", suites.some(reading.WAYS, lambda way: way != "divided", "tensorflow"))
def test_state_can_be_read_before_training_goes_on(world, way):
    if world.kind == "devices" and "process" in way:
        pytest.skip("one process holds all devices")
    read, weights, uninterrupted = world.run(reading.reading, 2, way, of=reading.WAYS)
    assert read == pytest.approx([reading.NUM_UPDATES, 0.1 * 0.5**reading.NUM_UPDATES, reading.SCALE])
    for some, others in zip(weights, uninterrupted, strict=True):
        np.testing.assert_array_equal(some, others)


@pytest.mark.neutral
def test_reading_before_processes_build_together_warns(monkeypatch, tmp_path):
    file = tmp_path / "model.weights.h5"
    reading.fit(reading.made("whole")).save_weights(file)
    loaded = reading.made("whole")
    monkeypatch.setattr(processes, "creates_variables_collectively", lambda: True)
    loaded.load_weights(file)
    for name in ("iterations", "learning_rate"):
        with pytest.warns(UserWarning, match=r"Call `optimizer.build\(variables\)` in every process"):
            getattr(loaded.optimizer, name)
    loaded.optimizer.build(loaded.trainable_variables)
    assert int(keras.ops.convert_to_numpy(loaded.optimizer.iterations)) == reading.NUM_UPDATES
