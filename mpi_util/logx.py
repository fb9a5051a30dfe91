"""Spinning Up's loggers under their own names: `spinup.utils.logx` becomes `mpi_util.logx`.

Rank 0 writes; statistics are over all ranks. A run's folder holds progress.txt (progress.py), config.json, and what
`save_state` writes (savers.py). What was there before a run is never overwritten.
"""

from typing import Any

import numpy as np

from .collectives.comm import channel_of
from .collectives.moments import statistics
from .errors import UsageError
from .mpi_tools import mpi_statistics_scalar
from .runs.logger import Logger, colorize, real_numbers
from .runs.savers import load_weights, restore_tf_graph

__all__ = ["EpochLogger", "Logger", "colorize", "load_weights", "restore_tf_graph"]


class EpochLogger(Logger):
    """A Logger that collects samples of a quantity, and logs their statistics over all ranks.

        logger.store(EpRet=ep_ret, EpLen=ep_len)        # at the end of each episode
        ...
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.log_tabular("EpLen", average_only=True)
        logger.dump_tabular()                           # collective

    A rank may have no sample. Where none has, the statistics are NaN.

    Attributes:
        epoch_dict: the samples since a key was last logged: {key: list of floats and arrays}.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch_dict: dict[str, list[Any]] = {}
        self._wanted: dict[str, tuple[np.ndarray, dict[str, str]]] = {}  # samples; column -> which of the statistics

    def store(self, **kwargs: Any) -> None:
        """Adds samples: `store(VVals=v, EpRet=ep_ret)`. Not collective.

        Args:
            kwargs: for each key a number, or an array, tensor or list of any shape, each element of which is a sample.
                The values are copied.

        Raises:
            UsageError: a value holds something other than real numbers.
        """
        for key, value in kwargs.items():
            self.epoch_dict.setdefault(key, []).append(value if type(value) in (float, int) else _samples(key, value))

    def log_tabular(
        self, key: str, val: Any = None, with_min_and_max: bool = False, average_only: bool = False
    ) -> None:
        """Notes a value for the row to come, or the statistics of what has been stored under `key`.

        Not collective: `dump_tabular` makes the statistics of all keys of a row together.

        Args:
            key: as it was given to `store`, or the column of `val`.
            val: a number. None: columns Average<key> and Std<key> from the samples, which then start anew.
            with_min_and_max: columns Max<key> and Min<key> too.
            average_only: one column, <key>, for the mean; no Std<key>.

        Raises:
            UsageError: the row has such a column already, or `val` is no number.
        """
        if val is not None:
            super().log_tabular(key, val)
        else:
            columns = {key: "mean"} if average_only else {f"Average{key}": "mean", f"Std{key}": "std"}
            columns |= {f"Max{key}": "max", f"Min{key}": "min"} if with_min_and_max else {}
            for column in columns:
                self._note(column, None)
            self._wanted[key] = self._stored(key), columns
        self.epoch_dict[key] = []

    def dump_tabular(self) -> None:
        """Collective, if the row has statistics: exchanges those of the whole row at once; then rank 0 writes it.

        Raises:
            RankMismatchError: on every rank, if they want statistics of different keys.
        """
        if self._wanted:
            samples = {key: stored for key, (stored, _) in self._wanted.items()}
            found = statistics(channel_of(self._comm), "dump_tabular", samples)
            for key, (_, columns) in self._wanted.items():
                self.log_current_row |= {column: getattr(found[key], which) for column, which in columns.items()}
            self._wanted = {}
        super().dump_tabular()

    def get_stats(self, key: str) -> tuple[float, float]:
        """Collective: (mean, std) over all ranks of what has been stored under `key`, which stays stored."""
        mean, std = mpi_statistics_scalar(self._stored(key), comm=self._comm)
        return mean, std

    def _stored(self, key: str) -> np.ndarray:
        return np.concatenate([np.ravel(value) for value in self.epoch_dict.get(key) or [[]]])


def _samples(key: str, value: Any) -> np.ndarray:
    """A copy of the samples, flat."""
    array = real_numbers(value)
    if array is None:
        raise UsageError(f"store: '{key}' takes real numbers, arrays or tensors; got {value!r:.80}")
    return array.flatten()
