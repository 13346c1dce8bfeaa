"""PyTorch: what ranks make of the variables of their metrics."""

import types

import keras
import numpy as np
import pytest
from support.worlds import FakeWorld

pytestmark = pytest.mark.backends("torch")


class LastAndAll(keras.metrics.Metric):
    """The mean of all values, and of the last ones of all replicas."""

    def __init__(self):
        super().__init__(name="last_and_all")
        self.all = self.add_weight(name="all", initializer="zeros")
        self.last = keras.Variable(0.0, trainable=False, aggregation="mean", name="last")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.all.assign_add(keras.ops.sum(y_pred))
        self.last.assign(y_pred[-1])

    def result(self):
        return {"all": self.all.value, "last": self.last.value}


def test_variables_of_metrics_are_summed_or_averaged_as_they_say():
    from keras_shardopt.fit.torch.session import metrics_of_all

    def work(replicas):
        metric = LastAndAll()
        metric.update_state(None, keras.ops.convert_to_tensor([1.0, 2.0 + 4.0 * replicas.replica_id]))
        model = types.SimpleNamespace(metrics_variables=[metric.all, metric.last])
        found = metrics_of_all(model, replicas, lambda: {name: float(v) for name, v in metric.result().items()})
        return found, float(metric.all), float(metric.last)

    for rank, (found, own_sum, own_last) in enumerate(FakeWorld(2).run(work)):
        assert found == {"all": 10.0, "last": 4.0}
        np.testing.assert_array_equal([own_sum, own_last], [3.0 + 4.0 * rank, 2.0 + 4.0 * rank])
