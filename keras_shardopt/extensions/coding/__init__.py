"""Gradients that are sent coded: in 8 bits, in 4, or as matrices of low rank, with error feedback.

`codecs` hides the bytes, `transport` what is kept from one update to the next, `torch` how they are sent while other
gradients are computed.
"""

from keras_shardopt.extensions.coding import codecs
from keras_shardopt.extensions.coding.transport import transport_of
from keras_shardopt.update.plugs import Plug, register

register("compression", Plug(codecs.get, transport_of))
