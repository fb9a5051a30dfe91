"""Spinning Up's loggers under their own names: `spinup.utils.logx` becomes `mpi_util.logx`.

Rank 0 writes; statistics are over all ranks. The folder of a run holds progress.txt, config.json, and what `save_state`
writes (runs/savers.py). Files of an earlier run are never overwritten.
"""

from .runs.epoch_logger import EpochLogger
from .runs.logger import Logger, colorize
from .runs.savers import load_weights, restore_tf_graph

__all__ = ["EpochLogger", "Logger", "colorize", "load_weights", "restore_tf_graph"]
