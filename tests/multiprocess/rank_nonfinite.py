"""NaN and infinity on each of the ranks that torchrun started, in every way; and an error on all of them."""

import itertools
import warnings

import numpy as np
import torch
import torch.distributed as dist
from support import nonfinite, problem

import keras_shardopt as ks
from keras_shardopt.replica import framework
from keras_shardopt.replica.same_variables import NUM_MARKS

warnings.filterwarnings("ignore")


def run(optimizer, weights, steps, rank):
    optimizer.build(weights)
    for grads in steps:
        scale = nonfinite.number(optimizer.loss_scale)
        optimizer.apply([torch.from_numpy(grad[rank] * np.float32(scale)) for grad in grads], weights)


def main():
    with ks.data_parallel() as scope:
        rank = scope.replica_id
        for way, (wrap, arguments) in nonfinite.WAYS.items():
            optimizer, weights = ks.CrossShard(wrap(problem.sgd_momentum()), **arguments), nonfinite.weights()
            optimizer.build(weights)
            state = [*weights, *optimizer.variables]
            start = [v.numpy().copy() for v in state]
            for bad, bad_rank in itertools.product((np.nan, np.inf), range(scope.num_replicas)):
                for variable, value in zip(state, start):
                    variable.assign(value)
                run(optimizer, weights, nonfinite.gradients(bad, bad_rank), rank)
                nonfinite.check(way, optimizer, [w.numpy() for w in weights], bad_rank, rank)
            if way != "in groups":
                assert framework.largest_difference([*weights, *optimizer._shared_variables]) == 0

        # Which rank it was travels in the one reduction that there is.
        calls, real = [], dist.all_reduce
        dist.all_reduce = lambda tensor, *args, **kwargs: (calls.append(tensor.numel()), real(tensor, *args, **kwargs))[
            1
        ]
        optimizer, weights = ks.CrossShard("sgd", on_nonfinite="skip"), nonfinite.weights()
        run(optimizer, weights, nonfinite.gradients(), rank)
        optimizer.finalize_variable_values(weights)
        dist.all_reduce = real
        # 5 elements, the presence of 2 gradients, which variables are trained, who goes on and who ends, and two digits
        # per rank; the common start comes first.
        assert calls[1:] == [5 + 2 + NUM_MARKS + 2 + 2 * scope.num_replicas] * (nonfinite.NUM_STEPS + 1), calls

        optimizer = ks.CrossShard("sgd", on_nonfinite="raise", gradient_accumulation_steps=2)
        weights = nonfinite.weights()
        try:
            run(optimizer, weights, nonfinite.gradients(np.inf, 3), rank)
        except FloatingPointError as error:
            assert "on replica 3, first in that of second" in str(error), str(error)
        else:
            raise AssertionError("not raised")
        assert int(optimizer.iterations) == 0
        assert framework.largest_difference(weights) == 0


main()
