"""Spinning Up's loggers under their own names: `spinup.utils.logx` becomes `mpi_util.logx`."""

from .runs.epoch_logger import EpochLogger
from .runs.logger import Logger, colorize
from .runs.savers import load_weights, restore_tf_graph

__all__ = ["EpochLogger", "Logger", "colorize", "load_weights", "restore_tf_graph"]
