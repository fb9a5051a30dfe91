"""A logger of statistics over all ranks."""

from typing import Any

import numpy as np

from mpi_util.errors import UsageError

from .logger import Logger
from .savers import numbers
from .statistics import Statistics, statistics


class EpochLogger(Logger):
    """A Logger that collects samples of a quantity, and logs their statistics over all ranks.

        logger.store(EpRet=ep_ret, EpLen=ep_len)        # at the end of each episode
        ...
        logger.log_tabular("EpRet", with_min_and_max=True)   # collective
        logger.log_tabular("EpLen", average_only=True)
        logger.dump_tabular()

    A rank may have no sample. If no rank has any, the statistics are NaN. `epoch_dict` holds the samples since a key
    was last logged: {key: list of floats and arrays}.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch_dict: dict[str, list[Any]] = {}

    def store(self, **kwargs: Any) -> None:
        """Adds samples, `store(VVals=v, EpRet=ep_ret)`: real numbers, or arrays, tensors or lists, which are copied.

        Not collective. Raises UsageError: there is something else among them.
        """
        for key, value in kwargs.items():
            if type(value) not in (float, int):
                array = numbers(value)
                if array is None:
                    raise UsageError(f"store: '{key}' takes real numbers, arrays or tensors; got {value!r:.80}")
                value = array.flatten()
            self.epoch_dict.setdefault(key, []).append(value)

    def log_tabular(
        self, key: str, val: Any = None, with_min_and_max: bool = False, average_only: bool = False
    ) -> None:
        """Collective without `val`: adds the statistics of what has been stored under `key` to the current row.

        Args:
            key: as it was given to `store`, or the column of `val`.
            val: as for Logger. None: columns Average<key> and Std<key> from the samples, which are then cleared.
            with_min_and_max: columns Max<key> and Min<key> too. average_only: for the mean, one column <key>; no Std.

        Raises RankMismatchError on every rank: they ask for statistics of different keys.
        """
        if val is not None:
            super().log_tabular(key, val)
        else:
            found = self._statistics("log_tabular", key)
            columns = {key: found.mean} if average_only else {f"Average{key}": found.mean, f"Std{key}": found.std}
            columns |= {f"Max{key}": found.max, f"Min{key}": found.min} if with_min_and_max else {}
            for column, value in columns.items():
                super().log_tabular(column, value)
        self.epoch_dict[key] = []

    def get_stats(self, key: str) -> tuple[float, float]:
        """Collective: (mean, std) over all ranks of what has been stored under `key`, which stays stored."""
        return self._statistics("get_stats", key)[:2]

    def _statistics(self, call: str, key: str) -> Statistics:
        samples = np.concatenate([np.ravel(value) for value in self.epoch_dict.get(key) or [[]]])
        return statistics(call, {key: samples}, self._comm)[key]
