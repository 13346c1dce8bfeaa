"""What TensorBoard itself reads from event files."""

from __future__ import annotations

import sys
import types

import keras


def read(folder):
    """By tag, lists of (step, value): floats, and of histograms the number of values with smallest and largest."""
    if keras.config.backend() != "tensorflow":
        # TensorBoard would load TensorFlow, if there is one, to read files with.
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "histograms": 0}
    reader = EventAccumulator(str(folder), size_guidance=everything).Reload()
    found = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    for tag in reader.Tags()["histograms"]:
        values = [(e.step, e.histogram_value) for e in reader.Histograms(tag)]
        found[tag] = [(step, (int(v.num), v.min, v.max)) for step, v in values]
    return found
