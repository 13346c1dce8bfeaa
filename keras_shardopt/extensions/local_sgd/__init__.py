"""Local SGD: replicas update independently and average their weights every `sync_every` updates."""

from keras_shardopt.extensions.local_sgd.looks import local_updates_in
from keras_shardopt.extensions.local_sgd.stage import LocalUpdates
from keras_shardopt.update.plugs import Place, register_stage, register_step

register_stage(Place.WINDOW, LocalUpdates)
register_step(local_updates_in, __name__, "RoundsStep")
