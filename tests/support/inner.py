"""Inner optimizers that only tests need."""

import keras
import numpy as np
from keras import ops


class TF1Momentum(keras.optimizers.Optimizer):
    """Momentum as TensorFlow 1 has it: the rate is outside the momentum, and of a sparse gradient only the listed rows
    have theirs decayed and moved. (Keras' SGD decays and moves all rows.)"""

    def __init__(self, learning_rate, momentum=0.9, name=None):
        super().__init__(learning_rate=learning_rate, name=name)
        # TensorFlow 1 rounds both to float32, also for float64 variables.
        self.rate = float(np.float32(learning_rate))
        self.momentum = float(np.float32(momentum))

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momentums[self._get_variable_index(variable)]
        # Python numbers times tensors: Keras' own arithmetic, also of its variables, takes numbers through float32.
        if hasattr(gradient, "dense_shape"):
            rows, position = _unique(gradient.indices)
            summed = ops.segment_sum(gradient.values, position, ops.shape(rows)[0])
            new = self.momentum * ops.take(momentum, rows, axis=0) + summed
            self.assign(momentum, type(gradient)(new, rows))
            self.assign_sub(variable, type(gradient)(self.rate * new, rows))
        else:
            new = self.momentum * ops.convert_to_tensor(momentum) + gradient
            self.assign(momentum, new)
            self.assign_sub(variable, self.rate * new)


def _unique(indices):
    import tensorflow as tf

    return tf.unique(indices)
