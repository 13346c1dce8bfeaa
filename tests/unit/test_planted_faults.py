"""Faults that are planted in a copy of the package, one at a time: the tests named with each must see it.

A row of `FAULTS` is a file, the text there that the fault replaces and that must occur once, what stands there instead,
and the tests (without their parameters, if any case may see it) that must fail, on one backend. All pass in the
default run; of each file, one also passes on a copy that nobody has touched. This file is also the program that runs
them on such a copy.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import sys

import keras
import pytest
from support import launch

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "keras_shardopt"
BACKEND = keras.config.backend()

pytestmark = pytest.mark.timeout(400)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is changed in a file of the package, and who must see it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    backend: str = "torch"  # where they run fastest: ranks and tests are forked from a process that has imported it


def fault(file, old, new, *tests, **where):
    return Fault(file, old, new, tuple(f"tests/{test}" for test in tests), **where)


REDUCTION = "unit/update/test_reduction.py::test_every_gradient_state_leads_to_the_same_global_gradient"
LOCAL = "unit/update/test_local_gradients.py"
SHARDS = "unit/sharding/test_sharding.py::test_replicas_update_as_one_does"
NORMALIZED = "promises/test_synchronized_batch_normalization.py::test_update_is_that_of_one_process"
WHOLE_BATCH = "unit/update/test_whole_batch.py::test_parts_add_up_to_the_loss_of_the_whole"
WHOLE_DATA = "unit/data/test_whole_batches.py"
CODECS = "unit/update/test_codecs.py"
PREPARED = "unit/fit/test_prepared.py"
ROUNDS = "promises/test_local_sgd.py"
PARTS = "unit/fit/test_tensorflow_parts.py"
SAME_BITS = "promises/test_same_bits_tensorflow.py::test_one_sha256_for_any_number_of_devices"
TREE = "unit/update/test_virtual_replicas.py::test_the_bits_of_a_sum_do_not_depend_on_the_number_of_replicas"
FIRST_FOUND = "unit/update/test_virtual_replicas.py::test_of_several_parts_the_first_that_is_not_finite_is_named"
RANKS = "promises/test_same_bits_ranks.py"
DEVICES = "promises/test_same_bits_jax.py"
OVER_ROWS = (
    "promises/test_uneven_batches_devices.py"
    "::test_layers_that_reduce_over_rows_get_those_of_their_replica_alone[clipped-3]"
)

FAULTS = [
    # The way through the stages.
    fault(
        "update/pipeline.py",
        "for stage in reversed(self.stages):",
        "for stage in self.stages:",
        "promises/test_stages_of_your_own.py::test_stages_come_in_the_order_in_which_they_are_given",
    ),
    fault(
        "update/step.py",
        "notes=dict(zip(names, tensors[count:]))",
        "notes={}",
        "promises/test_stages_of_your_own.py::test_of_a_skipped_update_it_sees_no_commit",
    ),
    fault(
        "update/nonfinite.py",
        "given = [places[i] for i in checked]",
        "given = checked",
        "unit/optimizers/test_cross_shard.py::test_the_name_of_what_is_not_finite_is_right_beside_frozen_variables",
    ),
    fault(
        "update/units.py",
        "return unit / comm.num_replicas if step.gradient_state is GradientState.LOCAL_PRESCALED else unit",
        "return unit",
        "promises/test_stages_of_your_own.py::test_the_noise_of_gradients_is_that_of_the_formulas",
        "promises/test_stages_of_your_own.py::test_a_stage_sees_gradients_of_the_mean_loss_however_they_arrive",
    ),
    fault(
        "extensions/noise/averages.py",
        "ops.where(uneven > 0, 0.0, (1 - self._momentum) * (now - before))",
        "(1 - self._momentum) * (now - before)",
        "unit/update/test_gradient_noise.py::test_the_noise_scale_is_that_of_the_formulas",
    ),
    fault(
        "update/user_stage.py",
        "variable.assign(ops.where(is_skipped, value, ops.convert_to_tensor(variable)))",
        "pass",
        "promises/test_stages_of_your_own.py::"
        "test_an_overflow_that_a_loss_scaling_skips_leaves_nothing_in_the_state_of_a_stage",
    ),
    fault(
        "update/user_stage.py",
        "for variable, value in zip(kept, before) if has_proceeded else ():",
        "for variable, value in zip(kept, before):",
        "promises/test_stages_of_your_own.py::test_a_stage_that_leaves_an_update_out_itself_keeps_what_it_has_counted",
    ),
    fault(
        "update/step.py",
        'self._overrides("collect", "local"))',
        'self._overrides("collect", "local", "commit"))',
        "promises/test_stages_of_your_own.py::test_only_stages_before_the_reduction_hold_it_up",
    ),
    # How gradients arrive, and by what they are divided.
    fault(
        "update/reduction.py",
        'return "mean" if gradient_state is GradientState.LOCAL and kind == "mean" else "sum"',
        'return "mean" if kind == "mean" else "sum"',
        REDUCTION,
    ),
    fault(
        "update/reduction.py",
        'factor = 1 / num_replicas if kind == "mean" else 1',
        "factor = 1",
        REDUCTION,
    ),
    fault(
        "update/reduction.py",
        'replicas.world.num_replicas / (1 if kind == "sum" else replicas.num_replicas)',
        'replicas.world.num_replicas / (1 if kind == "sum" else replicas.world.num_replicas)',
        f"{LOCAL}::test_every_way_of_arriving_with_groups_and_clipping",
    ),
    fault(
        "update/replica_transform.py",
        "clipped_to(grads, self._value * unit, global_norm(grads))",
        "clipped_to(grads, self._value, global_norm(grads))",
        f"{LOCAL}::test_the_limit_is_in_units_of_the_loss_also_if_it_is_scaled_inside",
    ),
    fault(
        "update/exchange.py",
        "return [total if has else None for total, has in zip(sums, received_flags.present)], nonfinite_flags",
        "return list(sums), nonfinite_flags",
        "unit/update/test_reduction.py::test_none_on_some_replicas_counts_as_zero_on_all",
    ),
    fault(
        "update/exchange.py",
        'members.all_reduce([reduction.grads[i] for i in nexts], "max")',
        'members.all_reduce([reduction.grads[i] for i in nexts], "mean")',
        "unit/update/test_reduction.py::test_next_values_take_the_largest_and_are_never_averaged",
    ),
    # Windows of micro-batches.
    fault(
        "update/gradient_sums.py",
        "return ops.cast(total / self._window.num_steps, dtype_of(variable))",
        "return ops.cast(total, dtype_of(variable))",
        "unit/update/test_accumulation.py::test_micro_steps_may_have_other_variables",
    ),
    fault(
        "update/gradient_sums.py",
        'dtype = "float32" if dtype in ("float16", "bfloat16") and not overwrites_variable(variable) else dtype',
        "pass",
        "unit/update/test_accumulation.py::test_half_precision_is_added_up_in_float32",
    ),
    fault(
        "update/gradient_sums.py",
        "self._given, self._present = set(), set()\n        self._given.update",
        "pass\n        self._given.update",
        "unit/update/test_accumulation.py::test_a_variable_that_a_window_did_not_have_stays",
    ),
    fault(
        "update/gradient_sums.py",
        "ops.maximum(before, value)",
        "value",
        "unit/update/test_accumulation.py::test_next_values_take_the_largest_of_the_window",
    ),
    # What is not finite.
    fault(
        "update/nonfinite.py",
        "first = ops.min(ops.where(is_bad, positions, filled_like(positions, last)))",
        "first = ops.min(positions)",
        "promises/test_compression.py::test_what_is_not_finite_is_noticed",
    ),
    fault(
        "update/nonfinite.py",
        'position = ops.cast(ops.sum(positions * is_first), "int32") - 1',
        'position = ops.cast(ops.sum(positions * is_first), "int32")',
        "promises/test_compression.py::test_what_is_not_finite_is_noticed",
    ),
    fault(
        "update/nonfinite.py",
        " and isinstance(places, range)",
        "",
        "unit/optimizers/test_cross_shard.py::test_the_name_of_a_nonfinite_gradient_does_not_depend_on_the_order",
    ),
    fault(
        "numerics.py",
        'return variable.path if hasattr(variable, "path") else str(variable)',
        'return getattr(variable, "path", str(variable))',
        "unit/optimizers/test_cross_shard.py::test_raise_reads_no_weights_to_name_them",
    ),
    # State in parts.
    fault(
        "sharding/slices.py",
        "positions, op = list(reduction.places), reduction.op",
        'positions, op = list(reduction.places), "mean"',
        SHARDS,
    ),
    fault(
        "sharding/slices.py",
        "return ops.reshape(whole[piece.start : piece.stop], tuple(self.stand_ins[i].shape))",
        "return ops.reshape(whole[: piece.stop - piece.start], tuple(self.stand_ins[i].shape))",
        SHARDS,
    ),
    fault(
        "sharding/partition.py",
        "owners[i] = growth.index(min(growth))",
        "owners[i] = 0",
        "unit/sharding/test_partition.py::test_whole_variables_go_to_whom_has_least",
    ),
    fault(
        "sharding/partition.py",
        "splittable and size >= small for",
        "splittable for",
        "unit/sharding/test_partition.py::test_small_variables_are_spread_like_whole_ones",
    ),
    fault(
        "sharding/costs.py",
        "return [costs[kind] for kind in kinds]",
        "return by_size",
        "unit/sharding/test_costs.py::test_muons_ranks_compute_for_the_same_time",
    ),
    fault(
        "backends/torch/work.py",
        "self.work += flop_registry[kind](*args, **kwargs, out_val=out)",
        "pass",
        "unit/sharding/test_costs.py::test_muons_ranks_compute_for_the_same_time",
    ),
    fault(
        "sharding/partition.py",
        "for load in loads) >= amount:",
        "for load in loads) > amount:",
        "unit/sharding/test_partition.py::test_what_may_be_cut_is_balanced_to_the_element",
    ),
    fault(
        "backends/jax/placement.py",
        "shape[d] and shape[d] % parts[d] == 0",
        "shape[d] % parts[d] == 0",
        "unit/backends/test_jax_placement.py::test_axes_that_the_model_leaves_free_divide_state",
        backend="jax",
    ),
    # Half precision on the way.
    fault(
        "backends/compression.py",
        "factors(op, self._replicas.num_replicas, self._divides)",
        "factors(op, self._replicas.world.num_replicas, self._divides)",
        "promises/test_compression.py::test_within_groups_the_divisor_is_their_size",
    ),
    fault(
        "backends/compression.py",
        "return (num_replicas, num_replicas) if divides else (1, 1)",
        "return (num_replicas, 1)",
        "promises/test_compression.py::test_the_error_is_bounded",
    ),
    # Fewer bytes.
    fault(
        "extensions/coding/transport.py",
        'return value + (left if is_one(self._unit) else left * ops.cast(self._unit, "float32"))',
        "return value",
        f"{CODECS}::test_nothing_is_lost_and_all_replicas_agree",
    ),
    fault(
        "extensions/coding/transport.py",
        'return value + (left if is_one(self._unit) else left * ops.cast(self._unit, "float32"))',
        "return value + left",
        f"{CODECS}::test_of_a_skipped_update_nothing_is_left",
    ),
    fault(
        "extensions/coding/transport.py",
        "after[i] = ops.where(is_good, left + after[i] if i in self._waits else left, after[i])",
        "after[i] = left + after[i] if i in self._waits else left",
        f"{CODECS}::test_of_a_skipped_update_nothing_is_left",
    ),
    fault(
        "extensions/coding/transport.py",
        "num_bad[0] < 0.5",
        "num_bad[0] < 1.5",
        "promises/test_error_feedback.py::test_what_was_sent_and_what_was_not_add_up_to_all_gradients"
        "[int8 in windows with divided state and a scaled loss that skips]",
    ),
    fault(
        "extensions/coding/transport.py",
        "left + after[i] if i in self._waits else left",
        "left",
        f"{CODECS}::test_gradients_that_a_replica_lacks_wait",
    ),
    fault(
        "extensions/coding/codecs.py",
        "unsent + (total - self.decode(again))[None]",
        "unsent",
        f"{CODECS}::test_sums_and_what_is_left_over_are_those_of_numpy",
        f"{CODECS}::test_nothing_is_lost_and_all_replicas_agree",
    ),
    fault(  # each replica takes its own part of the sum as it was before it was rounded
        "extensions/coding/codecs.py",
        'result = self.decode((yield "all_gather", again))',
        'result = ops.reshape(self.decode((yield "all_gather", again)), (size, -1))\n'
        "        result = ops.reshape(ops.where(ops.equal(ops.arange(size), me)[:, None], total[None], result), (-1,))",
        f"{CODECS}::test_nothing_is_lost_and_all_replicas_agree",
    ),
    fault(  # only rank 0 rounds its scales
        "extensions/coding/codecs.py",
        "again = self.encode(total, (update, me, 1))",
        "again = self.encode(total, (update, me, 1)) if me == 0 else self.encode(total * 1.001, (update, me, 1))",
        f"{CODECS}::test_sums_and_what_is_left_over_are_those_of_numpy",
    ),
    fault(
        "update/overlapped.py",
        "            step = buckets.transfer.left(step, all_decide=False)\n",
        "            pass\n",
        "promises/test_error_feedback.py::test_what_was_sent_and_what_was_not_add_up_to_all_gradients",
    ),
    fault(
        "update/overlapped.py",
        "            note(kind, tensors, comm.num_replicas)\n",
        "            note(kind, tensors[:1], comm.num_replicas)\n",
        "promises/test_error_feedback.py::test_the_bytes_are_those_of_theory",
    ),
    # What replicas must have in common.
    fault(
        "update/agreement.py",
        "        _describe(part, found, paths)\n\n\ndef _describe_model",
        "        pass\n\n\ndef _describe_model",
        "unit/update/test_agreement_in_words.py::test_what_differs_is_named_at_any_depth",
    ),
    fault(
        "update/agreement.py",
        "return len(set(processes.gather_objects(digest))) == 1",
        "return True",
        "unit/update/test_agreement_in_words.py::test_what_differs_is_named_at_any_depth",
    ),
    # Arithmetic.
    fault(
        "numerics.py",
        "return ops.where(norm <= limit, ops.ones_like(norm), limit / norm)",
        "return ops.minimum(ops.ones_like(norm), limit / norm)",
        "unit/optimizers/test_gradient_clipping.py::test_a_limit_of_zero_makes_zeros_and_leaves_those_that_are",
    ),
    fault(
        "numerics.py",
        "squares = [ops.sum(ops.square(in_float32(values_of(t)))) for t in t_list if t is not None]",
        "squares = [ops.sum(ops.square(values_of(t))) for t in t_list if t is not None]",
        "unit/optimizers/test_gradient_clipping.py::test_norms_of_half_precision_do_not_overflow",
        backend="jax",
    ),
    fault(
        "backends/torch/norms.py",
        "return value if value.dtype == torch.float64 else value.to(torch.float32)",
        "return value",
        "unit/optimizers/test_gradient_clipping.py::test_norms_of_half_precision_do_not_overflow",
    ),
    fault(
        "kernels/torch/pieces.py",
        "return (torch.div if divides else torch.mul)(grad, factor, out=out)",
        "return torch.mul(grad, factor, out=out)",
        "unit/update/test_fused.py::test_multiplied_in_the_update_has_the_bits_of_before",
    ),
    fault(
        "kernels/torch/fused.py",
        " / (float(rate) or 1.0) if decays else 0.0",
        " if decays else 0.0",
        "unit/update/test_fused.py::test_many_updates_are_those_of_keras",
    ),
    fault(
        "kernels/torch/fused.py",
        "return any(getattr(optimizer, name) is not None for name in names)",
        "return False",
        "unit/update/test_fused.py::test_what_keras_does_with_gradients_comes_after",
    ),
    # Wrappers.
    fault(
        "wrapping/wrapper.py",
        "return self.inner.scale_loss(1.0)",
        "return 1.0",
        "unit/optimizers/test_gradient_clipping.py::test_the_limit_holds_for_the_gradient_of_the_unscaled_loss",
        "unit/classic/test_larc.py::test_norms_are_of_the_unscaled_loss",
    ),
    fault(
        "wrapping/stored_state.py",
        "if expected is not None and shape != expected:",
        "if False:",
        "promises/test_state_that_does_not_fit.py::test_state_of_another_optimizer",
    ),
    fault(
        "optimizers/gradient_clipping.py",
        "norm = norm_over_replicas(norm) if self._scope.holds_slices else norm",
        "pass",
        SHARDS,
    ),
    fault(
        "classic/larc.py",
        "divisor = divisor * self._rates(variables, dtype)",
        "pass",
        "unit/classic/test_larc.py::test_clip_mode_follows_a_schedule",
    ),
    fault(
        "classic/larc.py",
        "return factor if self.faithful else ones_where(variable_norm == 0, factor)",
        "return factor",
        "unit/classic/test_larc.py::test_a_variable_of_norm_zero_keeps_its_gradient",
    ),
    fault(
        "backends/norms.py",
        "return ops.any(ops.isnan(each)), ",
        "return ops.any(ops.logical_not(ops.isfinite(each))), ",
        "unit/optimizers/test_loss_scaler.py::test_what_overflows_when_squared_is_no_nan",
        backend="jax",
    ),
    fault(
        "backends/torch/nonfinite.py",
        "return amax.isnan(), amax",
        "return ~amax.isfinite(), amax",
        "unit/optimizers/test_loss_scaler.py::test_what_overflows_when_squared_is_no_nan",
    ),
    fault(
        "optimizers/scale_algorithms.py",
        'grows = good_steps >= int(params["step_window"])',
        'grows = good_steps > int(params["step_window"])',
        "unit/optimizers/test_loss_scaler.py::test_backoff_golden",
    ),
    fault(
        "optimizers/scale_algorithms.py",
        "unbiased = mean / (1 - left)",
        "unbiased = mean",
        "unit/optimizers/test_loss_scaler.py::test_logmax_golden",
    ),
    fault(
        "optimizers/loss_scaling.py",
        "amax = amax / scale",
        "pass",
        "unit/optimizers/test_loss_scaling.py::test_logmax_sees_gradients_that_are_unscaled",
    ),
    fault(
        "optimizers/loss_scaling.py",
        "skipped.assign(ops.add(skipped, ops.cast(overflows, skipped.dtype)))",
        "pass",
        "unit/optimizers/test_loss_scaling.py::test_a_skipped_step_changes_nothing_but_the_scale",
    ),
    fault(
        "classic/novograd.py",
        "average = ops.where(before == 0, square, average)",
        "pass",
        "unit/classic/test_novograd.py::test_it_is_the_published_algorithm",
    ),
    fault(
        "classic/novograd.py",
        "del variables\n",
        "super()._apply_weight_decay(variables)\n",
        "unit/classic/test_novograd.py::test_weight_decay_is_not_applied_twice_and_can_be_excluded",
    ),
    fault(
        "classic/variable_clipping.py",
        "if dims is None or grad is None:",
        "if dims is None:",
        "unit/classic/test_variable_clipping.py::test_variables_without_gradient_are_not_clipped",
    ),
    fault(
        "classic/variable_clipping.py",
        "wide = in_float32(value)",
        "wide = value",
        "unit/classic/test_variable_clipping.py::test_norms_of_half_precision_do_not_overflow",
    ),
    # Schedules.
    fault(
        "schedules/policies.py",
        "steps) * fraction + self.min_lr * (1.0 - fraction)",
        "steps) * fraction + self.min_lr",
        "unit/schedules/test_schedules.py::test_golden",
    ),
    fault(
        "schedules/policies.py",
        "ops.exp(-self.power * ops.log1p(",
        "ops.exp(-ops.log1p(",
        "unit/schedules/test_schedules.py::test_golden",
    ),
    fault(
        "schedules/composition.py",
        "seen = steps.since(self.warmup_steps) if self.delay_schedule else steps",
        "seen = steps",
        "unit/schedules/test_schedules.py::test_warmup_delays_the_schedule",
    ),
    # Replicas that train apart.
    fault(
        "extensions/local_sgd/sync.py",
        "reference.assign(reference - mean)",
        "reference.assign(reference + mean)",
        f"{ROUNDS}::test_rounds_may_become_longer",
    ),
    fault(
        "extensions/local_sgd/sync.py",
        "self.outers[number].update_inner(list(moved), references)",
        "self.outers[number].update_inner([-mean for mean in moved], references)",
        f"{ROUNDS}::test_weights_are_those_of_replicas_in_numpy",
    ),
    fault(
        "update/transport.py",
        'return comm.all_reduce(list(tensors), "mean")',
        'return comm.all_reduce(list(tensors), "sum")',
        f"{ROUNDS}::test_rounds_may_become_longer",
    ),
    fault(
        "extensions/local_sgd/schedule.py",
        "return count - since >= self._length(since)",
        "return count - since > self._length(since)",
        f"{ROUNDS}::test_rounds_may_become_longer",
    ),
    fault(
        "extensions/local_sgd/sync.py",
        "runtime.cond(is_finite, lambda moved: self._move(number, references, moved), moved, [*references, *state])",
        "self._move(number, references, moved)",
        f"{ROUNDS}::test_a_round_that_is_not_finite_is_left_out",
    ),
    fault(
        "extensions/local_sgd/replica_values.py",
        "variables += self._unsynced_statistics()",
        "pass",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas",
    ),
    fault(
        "extensions/local_sgd/stage.py",
        "for number in range(self.schedule.num_fragments):",
        "for number in range(max(self.schedule.num_fragments - 1, 1)):",
        f"{ROUNDS}::test_weights_are_those_of_replicas_in_numpy",
        f"{ROUNDS}::test_the_report_counts_a_round_once",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/sync.py",
        "value = ops.convert_to_tensor(variable)\n                variable.assign(ops.where(",
        "value = ops.convert_to_tensor(variable)\n                (ops.where(",
        f"{ROUNDS}::test_a_round_that_is_not_finite_is_left_out",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/sync.py",
        "_set_weight(trained[i], weights[i], reference)",
        "runtime.cond(is_finite, lambda _: _set_weight(trained[i], weights[i], reference), [], [weights[i]])",
        f"{ROUNDS}::test_a_round_that_is_not_finite_is_left_out",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/sync.py",
        "total / ops.cast(ops.maximum(counts[i], 1), dtype_of(total))",
        "total / comm.num_replicas",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/sync.py",
        'is_good = is_good * ops.cast(row_share > 0, "float32")',
        "pass",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas",
    ),
    fault(
        "extensions/local_sgd/stage.py",
        'shares = [shares[0] * ops.cast(is_made, "float32")]',
        "pass",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/variables.py",
        "[v for v in rollback.variables if id(v) in known]",
        "[]",
        f"{ROUNDS}::test_seeds_of_updates_that_are_left_out_are_drawn_again",
        backend="jax",
    ),
    fault(  # of all replicas' gradients, as in synchronous training
        "extensions/local_sgd/own_gradients.py",
        "return step.replace(found_inf=ops.stack([found[0], who, found[2]]))",
        'return step.replace(found_inf=ops.stack([comm.all_reduce([found[0]], "max")[0], who, found[2]]))',
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        f"{ROUNDS}::test_seeds_of_updates_that_are_left_out_are_drawn_again",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/own_gradients.py",
        "return step.replace(found_inf=ops.stack([found[0], who, found[2]]))",
        'return step.replace(found_inf=ops.stack([comm.all_reduce([found[0]], "max")[0], who, found[2]]))',
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        f"{ROUNDS}::test_seeds_of_updates_that_are_left_out_are_drawn_again",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/own_gradients.py",
        "ops.multiply(value, number)",
        "value",
        f"{ROUNDS}::test_weights_are_those_of_replicas_in_numpy",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(
        "update/nonfinite.py",
        "proceed_if(ops.logical_not(is_bad), proceed, step, self._context.written, updates_differ)",
        "proceed_if(ops.logical_not(is_bad), proceed, step, self._context.written, False)",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(
        "optimizers/loss_scaling.py",
        "apart=self._scope.updates_differ,",
        "apart=False,",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(
        "backends/tensorflow/runtime.py",
        'is_own = [getattr(variable, "aggregation", "none") == "none" for variable in variables]',
        "is_own = [True for variable in variables]",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(
        "backends/tensorflow/runtime.py",
        "_cond(condition, lambda: None, restore)",
        "pass",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(  # the first replica decides for all
        "wrapping/rollback.py",
        "updates_differ = any(scope.updates_differ for scope in scopes)",
        "updates_differ = False",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/replica_values.py",
        "shown.append((counter, copies, largest(np.stack(copies))))",
        "shown.append((counter, copies, copies[0]))",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/replica_values.py",
        "largest(array) if is_count else array[0]",
        "array[0]",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/jax.py",
        "is_sync = (after(schedule.last_syncs)[0] == count) & (count != before(schedule.count))",
        "is_sync = count != before(schedule.count)",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/replica_values.py",
        "for (v, *_), is_left in zip(shown, left) if id(v) not in statistics)",
        "for (v, *_), is_left in zip(shown, left))",
        f"{ROUNDS}::test_statistics_that_somebody_has_set_begin_no_round",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/replica_values.py",
        "if not is_stale and not is_known:",
        "if not is_stale and (not is_known or chosen):",
        f"{ROUNDS}::test_statistics_that_somebody_has_set_begin_no_round",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/jax.py",
        "[jax.numpy.where(share > 0, mean, value) for mean, value in zip(means, values)]",
        "means",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/jax.py",
        "after(optimizer.iterations) != before(optimizer.iterations), share, 0)",
        "after(optimizer.iterations) != before(optimizer.iterations), share, share)",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/jax.py",
        "_, ended = optimizer._rollback.settled(",
        "optimizer._rollback.settled(",
        f"{ROUNDS}::test_replicas_that_leave_out_updates_are_twins",
        f"{ROUNDS}::test_seeds_of_updates_that_are_left_out_are_drawn_again",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/jax.py",
        "jax.lax.cond(is_sync, synced, lambda values: values, statistics)",
        "statistics",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/jax.py",
        "jax.numpy.where(mine > 0, new, old)",
        "new",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas",
        backend="jax",
    ),
    fault(
        "fit/torch/equal_start.py",
        "if differing and _stopped_alike(step):",
        "if False:",
        f"{ROUNDS}::test_training_is_the_same_bit_for_bit_whoever_looks_at_it[interrupted]",
    ),
    fault(
        "extensions/coding/transport.py",
        "mine = [value + residual for value, residual in zip(mine, kept)] if kept else mine",
        "pass",
        f"{ROUNDS}::test_what_a_round_cannot_send_it_sends_later",
    ),
    # The loss of the whole batch.
    fault(
        "update/losses.py",
        "return 1 if part.losses_are_divided else part.replicas.num_replicas",
        "return 1",
        WHOLE_BATCH,
    ),
    fault(
        "update/losses.py",
        'if reduction == "mean_with_sample_weight" and weight is not None:',
        "if False:",
        WHOLE_BATCH,
    ),
    fault(
        "update/losses.py",
        "return ops.where(share > 0, loss * share, ops.zeros_like(loss))",
        "return loss * share",
        "unit/update/test_whole_batch.py::test_a_mean_over_no_rows_is_no_loss",
    ),
    fault(
        "update/losses.py",
        "rows < part.local_batch_size, values,",
        "rows <= part.local_batch_size, values,",
        WHOLE_BATCH,
        backend="tensorflow",
    ),
    fault(  # more batches than all ranks have promised go without a message
        "fit/torch/shared_batches.py",
        "self._unreported.reported(min(",
        "self._unreported.reported(max(",
        "promises/test_uneven_batches_ranks.py::test_data_of_their_own_that_end_at_different_times[plain]",
    ),
    fault(  # a rank without rows keeps back what a codec has left
        "backends/torch/overlap.py",
        "else grad.new_zeros(()).expand_as(grad)",
        "else None",
        "promises/test_uneven_batches_ranks.py::test_data_of_their_own_that_end_at_different_times[powersgd]",
    ),
    # Statistics of the whole batch.
    fault(
        "fit/batch_normalization.py",
        "mean = ops.sum(counts * means, axis=0) / total",
        "mean = ops.mean(means, axis=0)",
        f"{NORMALIZED}[branches-3]",
    ),
    fault(
        "backends/torch/summed.py",
        "return _Summed.apply(grad if ctx.counts else torch.zeros_like(grad), True), None",
        "return grad, None",
        f"{NORMALIZED}[branches-3]",
    ),
    # Data.
    fault(
        "data/py_dataset.py",
        "self._batches.on_epoch_end()\n        self._epoch += 1\n        self._draw()",
        "self._batches.on_epoch_end()\n        self._draw()",
        "unit/data/test_data.py::test_py_dataset",
    ),
    fault(
        "data/arrays.py",
        "return array[np.sort(rows)][np.argsort(np.argsort(rows))]",
        "return array[np.sort(rows)]",
        "unit/data/test_data.py::test_rows_of_tables_and_files",
    ),
    # Files.
    fault(
        "checkpoint/saving.py",
        "if not overwrite and os.path.exists(path):",
        "if False:",
        "unit/checkpoint/test_saving.py::test_what_is_there_stays_without_overwrite",
    ),
    fault(
        "checkpoint/model_checkpoint.py",
        "wanted = self._should_save_model(epoch, batch, logs, path)",
        "wanted = True",
        "unit/checkpoint/test_saving.py::test_the_callback_decides_as_the_one_of_keras",
    ),
    fault(
        "checkpoint/atomic_file.py",
        "os.path.realpath(path)",
        "os.path.abspath(path)",
        "unit/checkpoint/test_saving.py::test_a_link_stays_one",
    ),
    fault(
        "checkpoint/atomic_file.py",
        "os.fsync(file.fileno())",
        "pass",
        "unit/checkpoint/test_saving.py::test_content_reaches_the_disk_before_the_name_and_the_name_before_the_return",
    ),
    fault(
        "checkpoint/atomic_file.py",
        "flush_folder(os.path.dirname(self._target))",
        "pass",
        "unit/checkpoint/test_saving.py::test_content_reaches_the_disk_before_the_name_and_the_name_before_the_return",
    ),
    fault(
        "checkpoint/backup.py",
        "read_newest(self._path, self._previous_path)",
        "read_newest(self._previous_path, self._path)",
        "promises/test_restart.py::test_the_newest_backup_is_read_first",
    ),
    fault(
        "checkpoint/backup.py",
        "part.pipeline.reset()",
        "pass",
        "promises/test_stages_of_your_own.py::test_stages_begin_anew_where_state_is_loaded",
        "promises/test_restart.py::test_an_unfinished_window_of_micro_steps_begins_anew_with_a_warning",
    ),
    # Callbacks.
    fault(
        "callbacks/replicas.py",
        "if 2 * len(largest) > len(group):",
        "if 2 * len(largest) >= len(group):",
        "promises/test_replicas_stay_equal.py::test_groups_are_compared_within",
    ),
    fault(
        "callbacks/replicas.py",
        "return sum(values) / len(values)",
        "return max(values)",
        "promises/test_replicas_stay_equal.py::test_logs_are_averaged_for_what_comes_after_and_for_the_history",
    ),
    # Parts of a batch.
    fault(
        "extensions/equal_bits/tensorflow/step.py",
        "for place in places]",
        "for place in places[:1]]",
        f"{PARTS}::test_a_scalar_loss_counts_by_rows",
        backend="tensorflow",
    ),
    fault(
        "extensions/equal_bits/tensorflow/step.py",
        "tf.cond(rows > 0, lambda: list(tensors)",
        "tf.cond(rows > -1, lambda: list(tensors)",
        f"{PARTS}::test_parts_without_rows_count_for_nothing",
        backend="tensorflow",
    ),
    fault(
        "extensions/equal_bits/parts.py",
        "ops.where(num_rows > 0",
        "ops.where(num_rows > -1",
        f"{PARTS}::test_moving_statistics_change_by_the_mean_over_parts_that_have_rows[2]",
        backend="tensorflow",
    ),
    fault(
        "extensions/equal_bits/tensorflow/step.py",
        "tf.minimum(self._data.all_rows, self._num_parts)",
        "self._num_parts",
        f"{PARTS}::test_moving_statistics_change_by_the_mean_over_parts_that_have_rows[2]",
        backend="tensorflow",
    ),
    fault(
        "extensions/equal_bits/torch.py",
        "batches.end_step()",
        "pass",
        f"{RANKS}::test_one_sha256_for_any_number_of_ranks[4-attending-Adam-plain]",
    ),
    fault(
        "extensions/equal_bits/parts.py",
        "ops.where(end == start, 0, change)",
        "change",
        "unit/update/test_virtual_replicas.py::test_an_infinite_value_that_stays_does_not_become_nan",
    ),
    fault(
        "extensions/equal_bits/parts.py",
        "_mean(total, num_parts) if self._is_mean[i] else total",
        "total",
        f"{PARTS}::test_moving_statistics_change_by_the_mean_over_parts_that_have_rows[8]",
        backend="tensorflow",
    ),
    fault(
        "extensions/equal_bits/tensorflow/step.py",
        "as_part(part.replica_id)",
        "as_part(tf.distribute.get_replica_context().replica_id_in_sync_group)",
        f"{SAME_BITS}[2-attending-Adam-plain]",
        backend="tensorflow",
    ),
    fault(
        "backends/tensorflow/communicator.py",
        "zip(values[::2], values[1::2])",
        "zip(values[: len(values) // 2], values[len(values) // 2 :])",
        f"{SAME_BITS}[4-normalizing-SGD-clipped]",
        backend="tensorflow",
    ),
    # Equal bits on any number of replicas.
    fault(  # the parts of a replica one after another
        "extensions/equal_bits/tree.py",
        "while self._sums and self._sums[-1][0] == size:",
        "while self._sums:",
        TREE,
    ),
    fault(  # a tree of another form for each number of replicas
        "extensions/equal_bits/tree.py",
        "rows = ops.add(rows[::2], rows[1::2])",
        "rows = ops.add(rows[: len(rows) // 2], rows[len(rows) // 2 :])",
        TREE,
    ),
    fault(  # a part less, the same one on any number of ranks
        "extensions/equal_bits/stage.py",
        "self._subtrees.add(grads)",
        "self._subtrees.add(grads if int(part.replica_id) else [None] * len(grads))",
        f"{RANKS}::test_values_are_those_of_the_optimizer_without_parts",
    ),
    fault(
        "update/parts.py",
        "found, self._counted = self._counted[: len(tensors)], self._counted[len(tensors) :]",
        "found = self._counted[: len(tensors)]",
        f"{RANKS}::test_values_are_those_of_the_optimizer_without_parts[paired-SGD-weighted]",
    ),
    fault(
        "extensions/equal_bits/stage.py",
        "first_found(self._found, found)",
        "first_found(found, self._found)",
        FIRST_FOUND,
    ),
    fault(
        "extensions/equal_bits/jax.py",
        "first_found(found_before, part.found)",
        "first_found(part.found, found_before)",
        FIRST_FOUND,
        backend="jax",
    ),
    fault(
        "extensions/equal_bits/tensorflow/step.py",
        "functools.reduce(first_found, positions)",
        "functools.reduce(first_found, positions[::-1])",
        FIRST_FOUND,
        backend="tensorflow",
    ),
    fault(  # seeds by rank
        "extensions/equal_bits/torch.py",
        "begin(own[i], batch)",
        "begin(own[0], batch)",
        f"{RANKS}::test_ranks_with_different_numbers_of_threads",
    ),
    fault(
        "extensions/equal_bits/torch.py",
        "sum(count > 0 for count in counts), is_skipped",
        "len(counts), is_skipped",
        f"{RANKS}::test_moving_statistics_change_by_the_mean_over_parts_that_have_rows",
    ),
    fault(  # what this rank counts
        "extensions/equal_bits/torch.py",
        "return tree.total(summed(part.counts for part in parts))",
        "return summed(part.counts for part in parts)",
        f"{RANKS}::test_a_model_of_two_outputs_of_which_one_has_a_mask",
    ),
    fault(
        "fit/jax/uneven.py",
        "leaf[: max(count, 1)]",
        "leaf",
        OVER_ROWS,
        backend="jax",
    ),
    fault(
        "extensions/equal_bits/jax.py",
        "return _Results((grads, loss, changes)",
        "return _Results(([grad * (index > 0) for grad in grads], loss, changes)",
        f"{DEVICES}::test_values_are_those_of_the_optimizer_without_parts",
        backend="jax",
    ),
    fault(
        "extensions/equal_bits/jax.py",
        "value + seed_offset(index) if seed",
        "value + seed_offset(index // self._parts.each) if seed",
        f"{DEVICES}::test_one_sha256_for_any_number_of_devices[2-attending-Adam-plain]",
        backend="jax",
    ),
    fault(
        "extensions/equal_bits/jax.py",
        "num_parts=-(-parts.all_rows // parts.rows)",
        "num_parts=parts.num_parts",
        f"{DEVICES}::test_moving_statistics_change_by_the_mean_over_parts_that_have_rows",
        backend="jax",
    ),
    fault(
        "extensions/equal_bits/jax.py",
        "of_rows = in_layout_of_kernels(",
        "of_rows = (",
        "unit/fit/test_jax_convolutions.py::test_a_step_in_parts_has_kernels_for_all_its_convolutions",
        backend="jax",
    ),
    # Data that every process has whole.
    fault(
        "data/whole_batches.py",
        "return [rows + 1] * rest + [rows] * (num_parts - rest)",
        "return [rows] * (num_parts - rest) + [rows + 1] * rest",
        f"{WHOLE_DATA}::test_parts_are_those_of_array_split",
    ),
    fault(
        "data/whole_batches.py",
        "zlib.crc32(repr((tuple(leaf.shape), str(values.dtype))).encode(), found)",
        "found",
        f"{WHOLE_DATA}::test_checksums_differ_where_batches_do",
    ),
    fault(
        "data/shared_draws.py",
        "self._states[name] if own[name] == before[name] else own[name]",
        "own[name]",
        f"{WHOLE_DATA}::test_what_is_drawn_in_a_block_is_what_process_0_draws",
    ),
    # Where gradients are traced.
    fault(
        "backends/compression.py",
        "return map_values(lambda value: ops.cast(value if divisor == 1 else value / divisor, dtype), tensor)",
        "return map_values(lambda value: value if divisor == 1 else value / divisor, tensor)",
        "promises/test_compression.py::test_jax_adds_up_in_that_dtype",
        backend="jax",
    ),
    # What tests had let through: planted by hand, found by none, and tested since.
    fault(
        "update/gradient_sums.py",
        "sorted(i for i in self._given if i in self._given_last or self._is_trained(i))",
        "sorted(self._given)",
        "unit/update/test_accumulation.py::test_a_variable_that_is_frozen_within_a_window_stays",
    ),
    fault(
        "update/nonfinite.py",
        'sum_overflows = ops.cast(ops.reshape(position, (1,)), "float32")',
        'sum_overflows = ops.zeros((1,), "float32")',
        f"{LOCAL}::test_where_the_sum_of_one_group_overflows_all_groups_skip",
    ),
    fault(
        "extensions/coding/transport.py",
        "variable.assign(ops.where(is_good, value, ops.convert_to_tensor(variable)))",
        "variable.assign(value)",
        f"{ROUNDS}::test_a_round_that_is_left_out_changes_nothing_of_what_was_not_sent",
    ),
    fault(
        "update/agreement.py",
        "repr(list(mine.items()))",
        "repr(sorted(mine.items()))",
        "unit/update/test_agreement_in_words.py::test_another_order_is_another_training",
    ),
    fault(
        "fit/torch/session.py",
        "            self.batches = before",
        "            pass",
        "promises/test_automatic_sharding_ranks.py::test_on_ranks[2-predictions_in_the_middle_of_training]",
    ),
    fault(
        "fit/jax/step.py",
        "rows = rows_of(jax.numpy.arange(size), all_rows, size)",
        "rows = jax.numpy.full((size,), -(-all_rows // size))",
        "promises/test_uneven_batches_devices.py::test_windows_of_each_replica_are_clipped_in_units_of_its_rows",
        backend="jax",
    ),
    fault(
        "sharding/slices.py",
        "if fits and (iterations or self._starts_with_weights):",
        "if fits and iterations:",
        "unit/sharding/test_sharding.py::test_parts_of_the_state_must_belong_to_the_same_update_and_to_the_weights",
    ),
    fault(
        "update/nonfinite.py",
        "return ops.where(first > 0, last - first, ops.zeros_like(first))",
        "return first",
        "promises/test_sharded_state_ranks.py::test_on_ranks[3-an_overflow_on_one_rank_is_skipped_on_all]",
    ),
    fault(
        "sharding/padded_layout.py",
        "        keep_exclusions(optimizer, self.variables, self.inside)",
        "",
        "promises/test_padded_state_jax.py::test_variables_excluded_before_building_do_not_decay[variable]",
        backend="jax",
    ),
    fault(
        "update/agreement.py",
        'keras.tree.flatten(getattr(model, "loss", None))',
        '[getattr(model, "loss", None)]',
        "unit/update/test_agreement.py::test_a_sum_is_found_among_several_losses",
    ),
    fault(
        "backends/tensorflow/losses.py",
        "        vars(tf.distribute.get_replica_context()).setdefault(_BARE, {}).update(bare)",
        "",
        "promises/test_undivided_losses.py::test_so_are_gradients_that_are_reduced_inside_a_condition",
        backend="tensorflow",
    ),
    fault(
        "sharding/padded_layout.py",
        "        self._assign_from_stand_ins(self._divided)\n",
        "",
        "promises/test_padded_state_jax.py::test_weights_are_those_of_whole_state[plain-finalized-6]",
        backend="jax",
    ),
    fault(
        "sharding/even_slices.py",
        "self.variables[i].assign(_joined(self.stand_ins[i], self.variables[i]))",
        "pass",
        "promises/test_sharded_state_tensorflow.py::test_around_it_everything_means_the_same[average]",
        backend="tensorflow",
    ),
    fault(
        "checkpoint/backup.py",
        "[*model.variables, *buffers_of(model), *seed], ",
        "[*model.variables, *seed], ",
        "promises/test_restart.py::test_buffers_of_modules_go_to_all_ranks",
    ),
    fault(
        "backends/torch/random_numbers.py",
        "_seeded_with = None  # `seed_per_rank` then seeds again, so ranks differ",
        "pass",
        "unit/backends/test_torch_random_numbers.py::"
        "test_a_rank_that_takes_over_the_state_of_rank_0_draws_other_numbers",
    ),
    fault(
        "optimizers/mixed_precision.py",
        "1.0 if _summing is None or self._scope.is_reduced else 1.0 / _summing.num_summed()",
        "1.0",
        "promises/test_equals_one_process_tensorflow.py::test_penalties_of_masters_are_those_of_one_process"
        "[without CrossShard-False-2]",
        backend="tensorflow",
    ),
    fault(
        "extensions/noise/stage.py",
        "abs(step.weight * step.row_share - 1)",
        "abs(step.row_share - 1)",
        "unit/update/test_gradient_noise.py::test_the_noise_scale_is_that_of_the_formulas[unequal start]",
    ),
    fault(
        "update/gradient_sums.py",
        "if grad is not None and not counts:",
        "if False:",
        "promises/test_uneven_batches_ranks.py::"
        "test_data_of_their_own_that_end_at_different_times[skips in windows, NaN last]",
    ),
    fault(
        "backends/torch/equal_start.py",
        "max(models, key=lambda model: len(model.variables))",
        "min(models, key=lambda model: len(model.variables))",
        "unit/backends/test_models.py::test_ranks_compare_the_state_of_the_outermost_model",
    ),
    fault(
        "backends/jax/communicator.py",
        "else self._at_own_id(self._positions_by_id)",
        "else self.world.replica_id",
        "promises/test_reduced_once_jax.py::test_replicas_are_counted_within_their_groups",
        backend="jax",
    ),
    fault(
        "fit/torch/results.py",
        'for op in ("sum", "mean"):',
        'for op in ("sum",):',
        "unit/fit/test_torch_logs.py::test_variables_of_metrics_are_summed_or_averaged_as_they_say",
    ),
    fault(
        "fit/torch/results.py",
        "part = _bytes(tensor[: mine * factor])",
        "part = _bytes(tensor[:mine])",
        "promises/test_automatic_sharding_ranks.py::test_on_ranks[2-outputs_of_other_kinds]",
    ),
    fault(
        "extensions/local_sgd/sync.py",
        "        reference.assign(ops.cast(ops.convert_to_tensor(weight), reference.dtype))\n",
        "        pass\n",
        f"{ROUNDS}::test_rounds_begin_from_weights_within_their_constraints",
    ),
    fault(
        "backends/models.py",
        "for name in names & vars(model).keys()",
        "for name in set()",
        f"{PREPARED}::test_methods_that_were_set_on_the_model_run_inside_and_later_ones_instead",
    ),
    fault(
        "backends/models.py",
        """content |= {"__class__": seen, _MIXINS: mixins, """,
        "content |= {_MIXINS: mixins, ",
        f"{PREPARED}::test_everybody_but_type_sees_the_class_of_the_user[own]",
    ),
    fault(
        "backends/models.py",
        """same = ("__module__", "__qualname__", "__doc__", "_unpickle_model")""",
        """same = ("__module__", "__qualname__", "__doc__")""",
        f"{PREPARED}::test_everybody_but_type_sees_the_class_of_the_user[own]",
    ),
    fault(
        "update/row_weights.py",
        "if grad is None or overwrites_variable(variable):",
        "if grad is None:",
        f"{LOCAL}::test_a_replica_counts_with_its_weight_after_it_is_clipped",
    ),
    fault(
        "update/replica_transform.py",
        "map_values(lambda v: times_unit(in_float32(v), 1 / unit), g) for g in grads]",
        "map_values(lambda v: times_unit(v, 1 / unit), g) for g in grads]",
        f"{LOCAL}::test_half_precision_does_not_overflow",
    ),
    fault(
        "backends/tensorflow/communicator.py",
        "groups = [range(len(replicas))] * len(replicas) if self._groups is None else self._members_by_id",
        "groups = [range(len(replicas))] * len(replicas)",
        "promises/test_equals_one_process_tensorflow.py::test_parts_go_to_the_members_of_a_group",
        backend="tensorflow",
    ),
    fault(
        "backends/torch/flat_bucket.py",
        "grad = grad if weight == 1 else grad * weight",
        "pass",
        "unit/backends/test_torch_buckets.py::test_a_gradient_counts_with_the_weight_of_its_rank",
    ),
    fault(
        "backends/torch/sliced_bucket.py",
        "grad = (grad if weight == 1 else grad * weight).reshape(-1)",
        "grad = grad.reshape(-1)",
        "unit/backends/test_torch_buckets.py::test_so_it_does_where_state_is_divided",
    ),
    fault(
        "fit/torch/trainer.py",
        "together = session if sharing.gather and sharing.auto_shard else None",
        "together = session if sharing.gather else None",
        f"{PREPARED}::test_ranks_predict_together_where_they_divide_batches_and_gather",
    ),
    fault(
        "fit/jax/step.py",
        "    if not jax.numpy.issubdtype(after.dtype, jax.numpy.floating):\n        return after\n",
        "",
        "promises/test_uneven_batches_devices.py::test_state_of_layers_in_a_shard_map",
        backend="jax",
    ),
    fault(
        "fit/tensorflow/step.py",
        "return logged(value), sample_weight",
        "return value, sample_weight",
        "promises/test_equals_one_process_tensorflow.py::"
        "test_means_that_a_custom_step_keeps_of_its_losses_are_those_of_one_process",
        backend="tensorflow",
    ),
    fault(
        "extensions/local_sgd/replica_values.py",
        "        elif begins_epoch:",
        "        elif False:",
        f"{ROUNDS}::test_rounds_begin_from_weights_that_were_set_between_epochs_where_all_replicas_are_equal",
    ),
    fault(
        "sharding/padded_layout.py",
        "return [0 if self._position(v) in self._divided else axis for v, axis in zip(variables, axes)]",
        "return list(axes)",
        "promises/test_padded_state_jax.py::test_every_number_of_replicas_holds_an_equal_share[widths0-3]",
        backend="jax",
    ),
    fault(
        "wrapping/rollback.py",
        "                del self.values[id(variable)]  # an assignment outside of layers must survive a rollback",
        "                pass",
        "promises/test_skipped_updates_leave_nothing.py::"
        "test_what_others_set_between_a_forward_pass_and_its_update_stays",
    ),
    fault(
        "fit/jax/trainer.py",
        "        _put_back(model)\n        raise",
        "        raise",
        "unit/fit/test_jax_prepared_steps.py::test_what_was_set_after_a_step_stays_where_the_next_ones_fail[evaluate]",
        backend="jax",
    ),
    fault(
        "sharding/even_slices.py",
        "self._starts_with_weights = holds_weights(self._leaf, self.variables)",
        "pass",
        "promises/test_sharded_state_tensorflow.py::test_state_that_starts_with_the_weights_does_so_in_parts",
        backend="tensorflow",
    ),
    fault(
        "wrapping/wrapper.py",
        "                variable.assign(keras.ops.copy(variable.value))",
        "                pass",
        "unit/fit/test_jax_prepared_steps.py::test_training_goes_on_after_averages_have_become_the_weights[float32]",
        backend="jax",
    ),
    fault(
        "sharding/weights.py",
        "replicas.broadcast([flat], root=replica)[0] if size else flat",
        "replicas.broadcast([flat], root=0)[0] if size else flat",
        SHARDS,
    ),
    fault(
        "sharding/even_slices.py",
        "whole += int(np.prod(self.stored_shape(variable))) * item_size(variable)",
        "whole += size",
        "promises/test_sharded_state_tensorflow.py::test_each_replica_holds_and_sends_a_part",
        backend="tensorflow",
    ),
    fault(
        "data/tf_dataset.py",
        " or _shuffles_inside(tf, step):",
        ":",
        "unit/data/test_data.py::test_tf_datasets_without_a_common_order_are_refused",
        backend="tensorflow",
    ),
    fault(
        "classic/novograd.py",
        "if self.weight_decay and self._use_weight_decay(variable):",
        "if self.weight_decay:",
        "unit/classic/test_novograd.py::test_weight_decay_is_not_applied_twice_and_can_be_excluded",
    ),
    fault(
        "optimizers/mixed_precision.py",
        "    master.constraint = variable.constraint",
        "    pass",
        "unit/optimizers/test_mixed_precision.py::test_constraints_decay_and_averages_work_on_the_masters",
    ),
    fault(
        "callbacks/summaries.py",
        "            if prefix and _num_updates(optimizer) == self._updates_before[prefix]:",
        "            if False:",
        "promises/test_two_optimizers.py::test_summaries_are_of_every_optimizer",
    ),
    fault(
        "optimizers/mixed_precision.py",
        "return [v for v in super()._saved_state if v is not skipped]",
        "return super()._saved_state",
        "unit/optimizers/test_mixed_precision.py::test_files_hold_the_counts_of_a_scale_that_changes_only[128.0-0]",
    ),
    fault(
        "optimizers/loss_scaler.py",
        "            given = [values_of(grad) for grad in grads if grad is not None]",
        "            given = [values_of(grad) for grad in grads]",
        "unit/optimizers/test_loss_scaling.py::test_some_variables_only_and_none",
    ),
    fault(
        "sharding/separability.py",
        "for key, value in changes.items() if key in config}",
        "for key, value in changes.items()}",
        "unit/sharding/test_cutting.py::test_what_may_be_cut",
    ),
    fault(
        "update/reduction.py",
        "return [by_id[id(variable)] for variable in variables]",
        "return list(by_id.values())[: len(variables)]",
        "unit/optimizers/test_cross_shard.py::"
        "test_beside_a_frozen_variable_and_in_any_order_each_gets_its_own_gradient",
    ),
    fault(  # callbacks that are one of several
        "fit/batch_logs.py",
        "        return any(_reads_batch_logs(callback",
        "        return all(_reads_batch_logs(callback",
        "unit/fit/test_batch_logs.py::test_logs_are_wanted_as_often_as_callbacks_read_them[one of two]",
    ),
    fault(
        "fit/torch/shared_batches.py",
        "4 * self._num_last + 3, int(seconds / max(of_one, 1e-6))",
        "4 * self._num_last + 3, int(seconds)",
        "unit/fit/test_torch_logs.py::test_more_and_more_batches_are_promised_up_to_what_is_known",
    ),
    fault(
        "fit/jax/batches.py",
        "    if not all(len(leaf.shape) > 0 and leaf.shape[0] == rows for leaf in leaves):",
        "    if False:",
        "unit/fit/test_jax_prepared_steps.py::test_an_input_with_other_rows_is_whole_on_every_device",
        backend="jax",
    ),
    fault(
        "backends/jax/runtime.py",
        "            if before_assign is not None:",
        "            if False:",
        "promises/test_skipped_updates_leave_nothing.py::test_in_a_step_of_optimize_loss[4]",
        backend="jax",
    ),
    fault(
        "backends/jobs.py",
        "    if task is None or own_rank in os.environ:",
        "    if task is None:",
        "unit/backends/test_jobs.py::test_what_the_user_or_a_launcher_has_set_stays",
    ),
    fault(
        "backends/jax/processes.py",
        '"KERAS_DISTRIBUTION_PROCESS_ID": str(task.rank)',
        '"KERAS_DISTRIBUTION_PROCESS_ID": str(task.local_rank)',
        "unit/backends/test_jobs.py::test_each_backend_is_told_the_place_of_a_copy_among_those_of_all_machines",
        backend="jax",
    ),
    fault(
        "backends/jax/placement.py",
        "if spans_processes and is_here and before.sharding.is_fully_replicated:",
        "if spans_processes and is_here:",
        "promises/test_several_processes_jax.py::test_divided_state_trains_as_one_process",
        backend="jax",
    ),
    fault(
        "checkpoint/sharded/pieces.py",
        "if other and other[0] >= start[0] + size[0]:",
        "if other and other[0] >= start[0] + length[0]:",
        "unit/checkpoint/test_sharded.py::test_pieces_that_overlap_or_are_missing_are_an_error",
    ),
    fault(
        "extensions/equal_bits/tensorflow/step.py",
        "        if others:\n",
        "        if others and self._trains:\n",
        f"{PARTS}::test_an_evaluation_that_changes_other_variables_is_refused",
        backend="tensorflow",
    ),
    fault(
        "fit/shared_epoch.py",
        "if facts[0][1] and len(set(facts)) == 1:",
        "if len(set(facts)) == 1:",
        "promises/test_several_processes_tensorflow.py::test_fit_equals_one_process",
        backend="tensorflow",
    ),
    fault(
        "sharding/slices.py",
        "for i, grad in zip(positions, grads) if grad is not None]\n        # If",
        "for i, grad in enumerate(grads) if grad is not None]\n        # If",
        "unit/sharding/test_sharding.py::test_some_variables_in_another_order_are_updated_alone",
    ),
    fault(
        "backends/torch/processes.py",
        '"WORLD_SIZE": str(task.size),',
        '"WORLD_SIZE": "1",',
        "promises/test_cluster_commands.py::test_copies_that_only_have_numbers_train_as_one_process",
    ),
    fault(
        "sharding/padded_layout.py",
        "self.variables, part_rank=2)",
        "self.variables)",
        "promises/test_padded_state_jax.py::test_so_do_biases_of_optimizers_with_another_rule_for_matrices",
        backend="jax",
    ),
    fault(
        "sharding/padded_layout.py",
        "            return [False for _ in self.variables]",
        "            return [True for _ in self.variables]",
        "promises/test_padded_state_jax.py::test_so_do_optimizers_that_need_all_of_them",
        backend="jax",
    ),
    fault(
        "checkpoint/training_state.py",
        "    random.setstate((version, tuple(words), gauss))",
        "    pass",
        "promises/test_restart.py::test_global_random_numbers_go_on_too",
    ),
    fault(
        "extensions/coding/transport.py",
        "            residual.assign(ops.zeros_like(ops.convert_to_tensor(residual)))",
        "            pass",
        "unit/update/test_codecs.py::test_where_state_is_loaded_nothing_is_left_over",
    ),
    fault(
        "backends/torch/ddp.py",
        "vars(ddp).pop(_REDUCED_BY_DDP, False)",
        "vars(ddp).get(_REDUCED_BY_DDP, False)",
        "promises/test_several_processes_torch.py::test_on_four_ranks[what_ddp_has_reduced_is_not_reduced_again]",
    ),
    fault(
        "fit/jax/step.py",
        "scale, own = model.optimizer.scale_loss(1.0), [value",
        "scale, own = 1.0, [value",
        "promises/test_uneven_batches_devices.py::"
        "test_replica_clipnorm_is_in_units_of_the_loss_wherever_that_is_scaled[twice inside]",
        backend="jax",
    ),
    fault(
        "backends/jax/communicator.py",
        '{"sum": jax.numpy.sum, "mean": jax.numpy.mean}[op]',
        '{"sum": jax.numpy.mean, "mean": jax.numpy.mean}[op]',
        "promises/test_reduced_once_jax.py::test_where_jax_knows_what_varies_groups_reduce_their_own",
        backend="jax",
    ),
    fault(
        "fit/jax/trainer.py",
        "    allow_uneven()  # the distribution",
        "    # the distribution",
        "promises/test_uneven_batches_devices.py::"
        "test_a_prepared_model_stays_so_under_another_distribution_of_the_same_devices",
        backend="jax",
    ),
    fault(
        "backends/jax/placement.py",
        "already = sum(bool(axes[d]) for d in dimensions)",
        "already = 0",
        "unit/backends/test_jax_placement.py::test_axes_that_the_model_leaves_free_divide_state",
        backend="jax",
    ),
    fault(
        "extensions/local_sgd/jax.py",
        "share = mine if optimizer.accumulation is None else _share_of_window(optimizer, updated)",
        "share = mine",
        f"{ROUNDS}::test_moving_statistics_are_the_mean_of_all_replicas[2 windows]",
        backend="jax",
    ),
    fault(
        "extensions/equal_bits/jax.py",
        "if model.__class__.test_step is not keras.Model.test_step:",
        "if False:",
        "unit/fit/test_jax_parts.py::test_a_test_step_of_ones_own_runs_as_it_is",
        backend="jax",
    ),
    fault(
        "fit/jax/batches.py",
        "start_equal([*variables, *state], announce",
        "start_equal([*variables, *variables][: len(variables) + len(state)], announce",
        "promises/test_several_processes_jax.py::test_divided_state_trains_as_one_process",
        backend="jax",
    ),
    fault(
        "backends/jax/placement.py",
        "active = active if len(active) > 1 else []",
        "pass",
        "unit/backends/test_jax_placement.py::test_a_distribution_of_one_device_trains_variables_from_before",
        backend="jax",
    ),
    fault(
        "checkpoint/saving.py",
        "        file.finish()\n    finally:\n        file.discard()",
        "        file.finish()\n    finally:\n        pass",
        "unit/checkpoint/test_saving.py::test_who_fails_to_write_a_file_of_its_own_leaves_no_part_of_it",
    ),
    fault(
        "fit/torch/shared_batches.py",
        "if any(rows) and not all(each",
        "if not all(each",
        "promises/test_uneven_batches_ranks.py::test_update_and_metrics_are_those_of_one_process",
    ),
    fault(
        "fit/torch/shared_batches.py",
        "        if not mine and not any(self._rows):\n            self.end_step()\n",
        "        if not mine and not any(self._rows):\n",
        "promises/test_uneven_batches_ranks.py::test_update_and_metrics_are_those_of_one_process",
    ),
    fault(
        "sharding/separability.py",
        "[_Probe(v, i, part_rank) for i, v in enumerate(variables) if not overwrites_variable(v)]",
        "[_Probe(v, i, part_rank) for i, v in enumerate(variables)]",
        "unit/sharding/test_cutting.py::test_next_values_are_not_cut_and_others_as_without_them",
    ),
    fault(
        "sharding/shards.py",
        "grad if grad is None or i not in self._divided else",
        "grad if grad is None else",
        "unit/update/test_next_values.py::test_next_values_that_arrive_global_are_not_cut_as_gradients_are",
    ),
    fault(
        "update/options.py",
        "self.replica_clipnorm, above=0, finite=False, fix=fix)",
        "self.replica_clipnorm, above=0, finite=False)",
        "unit/update/test_local_gradients.py::test_a_limit_must_be_positive",
    ),
    fault(
        "update/__init__.py",
        "            optimizer.state_finder.needing.remove(needed_for)",
        "            pass",
        "promises/test_gradient_noise_scale.py::test_after_a_training_that_has_failed_nothing_is_left",
    ),
    fault(
        "update/context.py",
        'any(getattr(part, "_skips_overflows", False)',
        'all(getattr(part, "_skips_overflows", False)',
        "unit/update/test_codecs.py::test_of_a_skipped_update_nothing_is_left[scales-[[0, 3], [1, 2]]]",
    ),
    fault(
        "optimizers/mixed_precision.py",
        "        autocast=False,",
        "",
        "unit/optimizers/test_mixed_precision.py::test_updates_too_small_for_the_weight_add_up[True-bfloat16]",
    ),
    fault(
        "backends/tensorflow/placement.py",
        " and not is_prepared(model):",
        ":",
        "unit/fit/test_tensorflow_scopes.py::test_several_steps_per_execution_need_prepare_and_are_those_of_one",
        backend="tensorflow",
    ),
    fault(
        "sharding/padded_layout.py",
        "elements[: max(0, size - start)]",
        "elements[:]",
        "promises/test_padded_state_jax.py::"
        "test_parts_for_sharded_checkpoints_hold_each_element_once_and_no_padding[3]",
        backend="jax",
    ),
    fault(
        "fit/jax/batches.py",
        "    if jax.process_count() > 1:\n        everywhere",
        "    if jax.process_count() >= 1:\n        everywhere",
        "unit/fit/test_jax_prepared_steps.py::test_one_process_waits_for_no_other",
        backend="jax",
    ),
    fault(
        "backends/jax/communicator.py",
        "mesh.shape[list(mesh.axis_names).index(distribution.batch_dim_name)]",
        "mesh.shape[0]",
        "promises/test_model_parallel_jax.py::test_training_equals_that_of_keras_on_one_device"
        "[4x2, model first-columns-uneven-momentum-accumulates and clips]",
        backend="jax",
    ),
    fault(
        "backends/torch/nonfinite.py",
        "grad.coalesce().values() if",
        "grad._values() if",
        "unit/backends/test_not_finite.py::test_rows_that_a_sparse_gradient_repeats_are_added_first",
    ),
    fault(
        "backends/torch/random_numbers.py",
        "if isinstance(seed, int) or not number:",
        "if not number:",
        "unit/backends/test_torch_random_numbers.py::"
        "test_a_seed_that_is_a_number_gives_all_replicas_the_same_numbers[<lambda>-True]",
    ),
    fault(
        "data/torch_loader.py",
        "for sampler in (loader.sampler, loader.batch_sampler):",
        "for sampler in (loader.batch_sampler,):",
        "unit/fit/test_torch_sampler_epochs.py::"
        "test_each_epoch_has_the_order_of_its_number[batch sampler as the sampler]",
    ),
    fault(
        "fit/torch/trainer.py",
        "if session.call is Phase.TRAIN_BATCH or (session.call is None and self.training):",
        "if session.call is Phase.TRAIN_BATCH:",
        "promises/test_first_program_ranks.py::test_on_two_ranks"
        "[statistics_are_averaged_after_each_call_of_train_on_batch]",
    ),
    fault(
        "extensions/sharded_weights/torch/held.py",
        "if isinstance(value, (list, tuple)):",
        "if isinstance(value, list):",
        "promises/test_sharded_weights_ranks.py::test_on_ranks[2-functions_take_weights_in_a_tuple]",
    ),
    fault(
        "backends/torch/nonfinite_source.py",
        "last - mine if mine else 0",
        "last - mine if mine else 1",
        "promises/test_overlap_ranks.py::test_on_ranks[2-slices_whose_sum_overflows_by_itself_are_finite]",
    ),
    fault(
        "sharding/padded_layout.py",
        "size_of(v) > 1",
        "size_of(v) >= 1",
        "promises/test_padded_state_jax.py::test_a_variable_of_one_element_is_not_padded",
        backend="jax",
    ),
    fault(
        "fit/jax/batches.py",
        "return jax.process_count() > 1 and allows",
        "return jax.process_count() >= 1 and allows",
        "unit/fit/test_jax_prepared_steps.py::test_one_process_waits_for_no_other",
        backend="jax",
    ),
    fault(
        "extensions/equal_bits/jax.py",
        "    stacks_windows = False",
        "    stacks_windows = True",
        f"{DEVICES}::test_values_are_those_of_the_optimizer_without_parts[normalizing-SGD-accumulated]",
        backend="jax",
    ),
    fault(
        "update/overlapped.py",
        "return 0, 0 if num_ranks",
        "return 1, 0 if num_ranks",
        "promises/test_memory_report.py::test_one_replica_needs_no_buffers",
    ),
]
# What the tests with a planted fault do not take from the run that they are a part of. Without XLA_FLAGS, they compile
# as the default run does.
OF_THIS_RUN = ["REPORTS", "XLA_FLAGS", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"]
OF_THIS_RUN += ["PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"]
HERE = [each for each in FAULTS if each.backend == BACKEND]
TESTS = list(dict.fromkeys(test for each in HERE for test in each.tests))


def run(folder, tests):
    """What came of these tests with the copy of the package in `folder`."""
    file = folder / "outcome.json"
    compiled = {"JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"]}
    environment = launch.variables(BACKEND, OMP_NUM_THREADS="1", **compiled)
    for name in OF_THIS_RUN:
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    launch.workers(__file__, [environment], folder, file, *tests, timeout=300, start=launch.fork_with(BACKEND))
    return json.loads(file.read_text())


def copied(folder):
    shutil.copytree(PACKAGE, folder / "keras_shardopt", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def without_any_of(cases, tests=TESTS):
    """The tests of which none of `cases` is one."""
    return [test for test in tests if not any(case.startswith(test) for case in cases)]


def test_each_fault_has_its_place_and_the_default_run_its_tests(tmp_path):
    for each in HERE:
        assert (PACKAGE / each.file).read_text().count(each.old) == 1, f"{each.file} must hold once: {each.old!r}"
    outcome = run(copied(tmp_path), ["--collect-only", *TESTS])
    assert without_any_of(outcome["collected"]) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_nobody_sees_a_fault_where_none_is(tmp_path, part):
    # All of them pass in the default run. The process and the folder differ here, so one of each file is enough.
    tests = list({test.partition("::")[0]: test for test in reversed(TESTS)}.values())[part::4]
    outcome = run(copied(tmp_path), tests)
    assert outcome["failed"] == [], outcome
    assert without_any_of(outcome["passed"], tests) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("planted", HERE, ids=[f"{i}-{each.file}" for i, each in enumerate(HERE)])
def test_a_planted_fault_is_seen(tmp_path, planted):
    path = copied(tmp_path) / "keras_shardopt" / planted.file
    path.write_text(path.read_text().replace(planted.old, planted.new))
    # Of one test, the first case that fails is enough.
    outcome = run(tmp_path, ["-x"] * (len(planted.tests) == 1) + list(planted.tests))
    assert outcome["status"] == pytest.ExitCode.TESTS_FAILED, outcome
    survived = without_any_of(outcome["failed"], planted.tests)
    assert not survived, f"{planted.old!r} as {planted.new!r} in {planted.file} is seen by none of {survived}"


def main():
    folder, file, *tests = sys.argv[1:]
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    found = {"collected": [], "passed": [], "failed": []}

    class Outcome:
        """Notes which tests are there, which pass and which fail."""

        def pytest_collection_finish(self, session):
            found["collected"] = [item.nodeid for item in session.items]

        def pytest_runtest_logreport(self, report):
            if report.failed or (report.when == "call" and report.passed):
                found["failed" if report.failed else "passed"].append(report.nodeid)

    # What is marked `exhaustive` does not count: the default run must see each fault.
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--suite", "default", *tests], plugins=[Outcome()])
    found_at = importlib.util.find_spec("keras_shardopt")  # tests on ranks may not import it in this process
    assert found_at is not None and pathlib.Path(found_at.origin).is_relative_to(folder)
    pathlib.Path(file).write_text(json.dumps({"status": int(status), **found}))


if __name__ == "__main__":
    main()
