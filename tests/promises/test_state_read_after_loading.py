"""Counters, rates and scales can be read as soon as they are loaded, on several replicas too."""

import numpy as np
import pytest
from promises.problems import reading


@pytest.mark.parametrize("way", reading.WAYS)
def test_state_can_be_read_before_training_goes_on(world, way):
    if world.kind == "devices" and "process" in way:
        pytest.skip("one process holds all devices")
    read, weights, uninterrupted = world.run(reading.reading, 2, way, of=reading.WAYS)
    assert read == pytest.approx([reading.NUM_UPDATES, 0.1 * 0.5**reading.NUM_UPDATES, reading.SCALE])
    for some, others in zip(weights, uninterrupted, strict=True):
        np.testing.assert_array_equal(some, others)
