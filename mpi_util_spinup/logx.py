"""Spinning Up's loggers under their own names: `spinup.utils.logx` becomes `mpi_util_spinup.logx`."""

from .epoch_logger import EpochLogger
from .logger import Logger, color2num, colorize
from .savers import load_weights, restore_tf_graph

__all__ = ["EpochLogger", "Logger", "color2num", "colorize", "load_weights", "restore_tf_graph"]
