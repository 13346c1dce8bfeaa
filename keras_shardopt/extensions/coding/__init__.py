"""Gradient compression: 8-bit and 4-bit integers, half precision, or low-rank matrices, with error feedback.

`codecs` encodes gradients, `transport` stores the state between updates, and `torch` communicates in the backward pass.
"""

from keras_shardopt.extensions.coding import codecs
from keras_shardopt.extensions.coding.transport import transport_of
from keras_shardopt.update.plugs import Plug, register

register("compression", Plug(codecs.get, transport_of))
