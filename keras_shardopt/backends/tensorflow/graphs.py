"""Checks whether a tensor can be used in the current graph. Each function, condition and loop has its own graph."""

from __future__ import annotations

import tensorflow as tf

from keras_shardopt.numerics import Tensor


def is_in_reach(tensor: Tensor) -> bool:
    """Return whether a tensor made earlier can be used in the current graph."""
    graph = getattr(tensor, "graph", None)  # an eager tensor has none
    return bool(tf.executing_eagerly() if graph is None else graph is tf.compat.v1.get_default_graph())


def is_further_inside(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to a graph nested in the current graph, and so cannot be used here."""
    graph, here = getattr(tensor, "graph", None), tf.compat.v1.get_default_graph()
    while graph is not None and graph is not here:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None and not tf.executing_eagerly()
