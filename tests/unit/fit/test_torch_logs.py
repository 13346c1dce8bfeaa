"""PyTorch: what ranks make of the variables of their metrics and of other logs, and how often they ask each other."""

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
    from keras_shardopt.fit.torch.results import metrics_of_all

    def work(replicas):
        metric = LastAndAll()
        metric.update_state(None, keras.ops.convert_to_tensor([1.0, 2.0 + 4.0 * replicas.replica_id]))
        model = types.SimpleNamespace(metrics_variables=[metric.all, metric.last])
        found = metrics_of_all(model, replicas, lambda: {name: float(v) for name, v in metric.result().items()})
        return found, float(metric.all), float(metric.last)

    for rank, (found, own_sum, own_last) in enumerate(FakeWorld(2).run(work)):
        assert found == {"all": 10.0, "last": 4.0}
        np.testing.assert_array_equal([own_sum, own_last], [3.0 + 4.0 * rank, 2.0 + 4.0 * rank])


@pytest.mark.parametrize("rows", [[3, 0, 1], [0, 0, 0]])
def test_logs_that_are_no_metrics_are_means_over_rows(rows):
    from keras_shardopt.fit.torch.results import mean_logs

    def work(replicas):
        rank = replicas.replica_id
        model = types.SimpleNamespace(trainable_variables=[keras.Variable([1.0])])
        assert mean_logs(model, replicas, [1.0], rows[rank]) == [1.0]
        return mean_logs(model, replicas, {"loss": [1.0, np.nan, 5.0][rank], "kind": "own"}, rows[rank])

    found = FakeWorld(3).run(work)
    expected = [2.0] * 3 if any(rows) else [1.0, np.nan, 5.0]
    np.testing.assert_array_equal([logs["loss"] for logs in found], expected)
    assert all(logs["kind"] == "own" for logs in found)


def test_more_and_more_batches_are_promised_up_to_what_is_known(monkeypatch):
    from keras_shardopt.fit.torch import shared_batches

    now, may_promise, owed = [100.0], [True], []
    monkeypatch.setattr(shared_batches, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(shared_batches, "can_promise_steps", lambda: may_promise[0])
    monkeypatch.setattr(shared_batches, "add_promised_steps", owed.append)
    unreported = shared_batches._Unreported()

    def promise(num_batches=1, num_alike=1000, seconds=1000.0, seconds_of_one=1.0):
        """After so many batches, of which the last is not promised: what all ranks promise."""
        for i in range(num_batches):
            assert unreported.take_promised() == (i < num_batches - 1)
            unreported.add(4, 0)
            now[0] += seconds_of_one
        found = unreported.num_to_promise(num_alike, seconds)
        unreported.reported(found)
        return found

    unreported.reported(shared_batches._NOTHING_YET)
    assert promise() == 0  # of an epoch's first batch nothing is known
    assert promise() == 3
    assert promise(4) == 4 * 3 + 3
    assert promise(16) == shared_batches._MOST_PROMISED - 1
    assert promise(32, num_alike=7) == 7
    assert promise(8, num_alike=0) == 0
    assert promise(num_alike=2) == 2
    assert promise(3, seconds=10.0, seconds_of_one=2.0) == 5
    may_promise[0] = False
    assert promise(6) == 0
    assert sum(owed) == 3 + 15 + 31 + 7 + 2 + 5
    unreported.reported(3)
    unreported.reported(shared_batches._NOTHING_YET)  # a new epoch takes back what was promised
    assert owed[-2:] == [3, -3] and not unreported.take_promised()


def test_batches_since_the_last_message_are_told_apart():
    from keras_shardopt.fit.torch.shared_batches import _Unreported

    def mark(*batches):
        unreported = _Unreported()
        for batch in batches:
            unreported.add(*batch)
        assert unreported.num_batches == len(batches)
        return unreported.mark

    marks = [mark((4, 7)), mark((3, 7)), mark((4, 8)), mark((4, 7), (4, 8)), mark((4, 8), (4, 7))]
    assert len({*marks, 0}) == 6
    assert mark((4, 0)) == mark((3, 0), (2, 0)) == 0  # a rank's own batches
