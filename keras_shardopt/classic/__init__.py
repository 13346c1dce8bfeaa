"""Tools of TensorFlow 1 and OpenSeq2Seq: towers, norm limits for variables, LARC, NovoGrad, `optimize_loss`."""

from keras_shardopt.classic.larc import LARC
from keras_shardopt.classic.novograd import NovoGrad
from keras_shardopt.classic.tower import Tower, replicate
from keras_shardopt.classic.variable_clipping import VariableClipping

__all__ = ["LARC", "NovoGrad", "Tower", "VariableClipping", "replicate"]
