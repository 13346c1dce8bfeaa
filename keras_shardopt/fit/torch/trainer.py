"""The class that `prepare(model)` mixes in on PyTorch: methods of Keras's trainer for several ranks.

All ranks load the same batches, and each uses its rows of every batch. If data is already divided, each rank uses
batches of its data instead. Ranks exchange their row counts for each batch, because losses divide by the rows of all
ranks. A rank that has no batch left takes part with zero rows. At the end of an epoch, ranks aggregate metrics.

Private names of Keras touched here (a test checks that each exists):
    `keras.src.backend.torch.trainer.TorchEpochIterator` - the iterator of `fit` and `evaluate`.
    `Trainer._symbolic_build` - builds an unbuilt model from the first batch.
    `Trainer._get_metrics_result_or_logs` - the logs of an epoch.
    `Trainer._flatten_metrics_in_order` - the form in which `train_on_batch` returns logs.
    `Model._initialize_ddp` (Keras 3.16 and later) - passes the model's gradients to PyTorch's DDP.
    `get_metrics_result` of the class in `keras.src.backend.torch.trainer` (Keras 3.16 and later) - sums metrics over
        the ranks, at every step.
    `keras.src.utils.python_utils.pythonify_logs` - converts logs to Python numbers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
import torch.distributed as dist
from keras.src.backend.torch import trainer as torch_trainer
from keras.src.utils.python_utils import pythonify_logs

from keras_shardopt.backends.active import processes, runtime
from keras_shardopt.backends.models import methods_inside, mix_in, set_replica_statistics
from keras_shardopt.backends.torch.communicator import TorchProcessGroup
from keras_shardopt.backends.torch.ddp import is_reduced_elsewhere
from keras_shardopt.backends.torch.process_group import note_error
from keras_shardopt.data.shared_draws import count_call
from keras_shardopt.data.whole_batches import part_of_batch, rows_of_parts
from keras_shardopt.fit.callbacks import callbacks_of_call
from keras_shardopt.fit.calls import call_printing, num_rows
from keras_shardopt.fit.prepared import PreparedModel, logs_of_epoch, separate_logs
from keras_shardopt.fit.sharing import sharing_of, splits_separate_part
from keras_shardopt.fit.torch.results import mean_logs, metrics_of_all, rows_of_all
from keras_shardopt.fit.torch.session import SESSION, Session, run_of, running, session_of
from keras_shardopt.fit.torch.shared_batches import Phase, exchange
from keras_shardopt.update.trainer_context import joining_uneven_inputs


def prepare(model: Any) -> None:
    """Make all ranks run `fit`, `evaluate`, `predict`, `train_on_batch` and `test_on_batch` together."""
    if SESSION not in vars(model):
        object.__setattr__(model, SESSION, Session(model))
    mix_in(model, PreparedOnTorch)


class PreparedOnTorch(PreparedModel):
    """A model that all ranks train together. With one rank, it runs the steps of Keras."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        session.has_started, session.logs.is_fitting = False, True
        session.splits_separate_part = splits_separate_part(args, kwargs)
        try:
            with joining_uneven_inputs():
                history = _run(session, session, Phase.TRAIN_BATCH, super().fit, *args, **kwargs)
        finally:
            session.logs.is_fitting = session.splits_separate_part = False
        if session.ranks is not None:
            exchange(Phase.END_OF_FIT)
        return history

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        session.before_reading()
        with separate_logs(self):
            return _run(session, session, Phase.TEST_BATCH, super().evaluate, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict all rows on all ranks together, or on this rank only if `auto_shard` or `gather` is False."""
        session, sharing = session_of(self), sharing_of(self)
        together = session if sharing.gather and sharing.auto_shard else None
        if together is not None:
            session.before_reading()
        return _run(session, together, Phase.PREDICT_BATCH, super().predict, *args, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return _on_batch(self, super().train_on_batch, Phase.TRAIN_BATCH, *args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        session = session_of(self)
        session.before_reading()
        return _on_batch(self, super().test_on_batch, Phase.TEST_BATCH, *args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with _one_by_one(self):
            return super().predict_on_batch(*args, **kwargs)

    def train_step(self, data: Any) -> Any:
        session, real = session_of(self), super().train_step
        if session.ranks is None:
            step = session.step
            return step.run(real, data, trains=True) if step.divides_batches else real(data)
        session.before_step()
        logs = _step(session, real, data, trains=True)
        session.check_unused()
        return logs

    @torch.compiler.disable(recursive=False)
    def test_step(self, data: Any) -> Any:
        return _step(session_of(self), super().test_step, data)

    @torch.compiler.disable(recursive=False)
    def predict_step(self, data: Any) -> Any:
        """Predict this rank's rows of a batch, and return the predictions of all ranks."""
        session = session_of(self)
        ranks, batches, outputs = session.ranks, session.batches, super().predict_step(data)
        if ranks is None or batches.mine is None or session.call is not Phase.PREDICT_BATCH:
            return outputs
        batches.mine = None
        return rows_of_all(ranks, outputs, batches)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss once all ranks are in the same step, because losses exchange tensors between ranks."""
        session = session_of(self)
        session.batches.confirm()
        loss = super().compute_loss(*args, **kwargs)
        session.step.after_loss()
        return loss

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        session, real = session_of(self), super()._symbolic_build
        if iterator is None or session.ranks is None:
            real(iterator=iterator, data_batch=data_batch)
            return
        try:
            real(iterator=_RaisesWhenRead())
        except _IsUnbuilt:
            batch = session.batches.any_batch(iterator.first_batch())
            real(data_batch=_first_part(session, batch) if iterator._is_whole else batch)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Return metrics over all ranks: each variable is summed or averaged, according to its `aggregation`."""
        session, real = session_of(self), super(PreparedModel, self)._get_metrics_result_or_logs
        ranks, logs = session.ranks, logs_of_epoch(self, logs)
        if ranks is None or running.get() is not session:
            return real(logs)
        session.batches.end_epoch()
        if session.step.divides_batches:  # each step has already aggregated the logs over ranks
            session.logs.forget()
            return pythonify_logs(real(logs))
        if session.call is Phase.TRAIN_BATCH or (session.call is None and self.training):
            session.step.end_epoch(is_call=session.call is not None)
            set_replica_statistics(self, False)
        # A metric can return its variable itself. `metrics_of_all` restores the variable, so convert to numbers before.
        result = metrics_of_all(self, ranks, lambda: None if (found := real(logs)) is logs else pythonify_logs(found))
        session.logs.forget()
        return mean_logs(self, ranks, logs, session.last_rows) if result is None else result

    def _initialize_ddp(self) -> None:
        """Skip DDP: it would average gradients before `CrossShard`, which needs those of each rank."""


def train_separately(model: Any) -> bool:
    """Whether nothing averages this model's gradients, so ranks train separately. The model has no `CrossShard`."""
    if not (dist.is_available() and dist.is_initialized()):
        return processes.process()[0] > 1
    replicas = runtime.communicator("")
    return isinstance(replicas, TorchProcessGroup) and not is_reduced_elsewhere(model, replicas.ddps)


def step_one_by_one(model: Any) -> None:
    """Make a model run with `steps_per_execution=1`."""
    mix_in(model, _OneByOne)


def _run(
    session: Session, together: Session | None, call: Phase, real: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `real` (`fit`, `evaluate` or `predict`) on all ranks together; on this rank alone if `together` is None."""
    before = session.call
    with session.inner_call(), run_of(together), callbacks_of_call(session.model), _one_by_one(session.model):
        session.call = call
        try:
            if call is Phase.TRAIN_BATCH:
                session.step.begin_fit()
            prints = session.ranks is None or session.ranks.replica_id == 0
            return call_printing(prints, real, *args, **kwargs)
        except BaseException as error:
            if together is not None:
                note_error(f"{type(error).__name__}: {error}")
            raise
        finally:
            session.call = before
            if together is not None:
                count_call()
            if before is None:
                session.forget_batches()


@contextlib.contextmanager
def _one_by_one(model: Any) -> Iterator[None]:
    """Run a call with one step per execution, because ranks communicate before each step."""
    steps = model.steps_per_execution
    if steps == 1:
        yield
        return
    model.steps_per_execution = 1
    try:
        yield
    finally:
        model.steps_per_execution = steps


_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_OneByOne = methods_inside(_one_by_one, _CALLS)


class _IsUnbuilt(Exception):
    pass


class _RaisesWhenRead:
    """Replaces the iterator of batches to detect an unbuilt model: Keras reads a batch only to build one."""

    def __iter__(self) -> Any:
        raise _IsUnbuilt


def _first_part(session: Session, data: Any) -> Any:
    """Return the first rank's rows of a batch that all ranks have, because a layer may require this number of rows."""
    ranks, num = session.ranks, int(num_rows(data))
    assert ranks is not None
    session.step.fit_states(rows_of_parts(num, ranks.num_replicas), ranks.replica_id)
    return part_of_batch(data, rows_of_parts(num, session.step.num_parts_of(ranks.num_replicas)), 0)


# Find Keras's trainer class by its module, because Keras 3.16 renames it.
_KerasTrainer: Any = next(kind for kind in keras.Model.__mro__ if kind.__module__ == torch_trainer.__name__)
_metrics_result_in_keras = _KerasTrainer.get_metrics_result


def _on_batch(model: Any, real: Callable[..., Any], phase: Phase, *args: Any, **kwargs: Any) -> Any:
    """Run `train_on_batch` or `test_on_batch` on each rank's own rows (perhaps none). Return logs over all ranks."""
    session, arguments = session_of(model), dict(inspect.signature(real).bind(*args, **kwargs).arguments)
    return_dict = arguments.pop("return_dict", False)
    if session.ranks is None:
        with _one_by_one(model):
            return real(**arguments, return_dict=return_dict)
    batch = tuple(arguments.pop(name, None) for name in ("x", "y", "sample_weight"))
    with session.inner_call(), _one_by_one(model):
        batch = session.batches.next_batch(batch, phase)
        if batch is None:
            raise ValueError("`x` is empty on every rank. Pass a batch with rows on at least one rank.")
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        logs = real(x=x, y=y, sample_weight=sample_weight, **arguments, return_dict=True)
    with run_of(session):
        logs = pythonify_logs(model._get_metrics_result_or_logs(logs))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


@torch.compiler.disable(recursive=False)  # the step communicates, so compile only the functions that it calls
def _step(session: Session, real: Callable[[Any], Any], data: Any, trains: bool = False) -> Any:
    return session.step.run(real, data, trains)


def _metrics_result(model: Any) -> Any:
    """Replaces Keras's method. Metrics stay per-rank until an epoch ends, but Keras 3.16 would sum them over ranks."""
    if hasattr(model, SESSION):
        return super(_KerasTrainer, model).get_metrics_result()
    return _metrics_result_in_keras(model)
