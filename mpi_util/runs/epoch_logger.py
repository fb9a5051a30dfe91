"""A logger of statistics over all ranks."""

from typing import Any

import numpy as np

from ..collectives.moments import statistics
from ..errors import UsageError
from .logger import Logger
from .savers import numbers


class EpochLogger(Logger):
    """A Logger that collects samples of a quantity, and logs their statistics over all ranks.

        logger.store(EpRet=ep_ret, EpLen=ep_len)        # at the end of each episode
        ...
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.log_tabular("EpLen", average_only=True)
        logger.dump_tabular()                           # collective

    A rank may have no sample. If no rank has any, the statistics are NaN. `epoch_dict` holds the samples since a key
    was last logged: {key: list of floats and arrays}.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch_dict: dict[str, list[Any]] = {}
        self._statistics: dict[str, tuple[np.ndarray, dict[str, str]]] = {}  # samples; column -> field of Statistics

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
        """Adds a value to the current row, or the statistics of what has been stored under `key`.

        Not collective: `dump_tabular` computes the statistics of all keys of a row together.

        Args:
            key: as it was given to `store`, or the column of `val`.
            val: as for Logger. None: columns Average<key> and Std<key> from the samples, which are then cleared.
            with_min_and_max: columns Max<key> and Min<key> too. average_only: for the mean, one column <key>; no Std.
        """
        if val is not None:
            super().log_tabular(key, val)
        else:
            columns = {key: "mean"} if average_only else {f"Average{key}": "mean", f"Std{key}": "std"}
            columns |= {f"Max{key}": "max", f"Min{key}": "min"} if with_min_and_max else {}
            for column in columns:
                self._add(column, None)
            self._statistics[key] = self._stored(key), columns
        self.epoch_dict[key] = []

    def dump_tabular(self) -> None:
        """Collective, if the row has statistics: exchanges those of the whole row at once; then rank 0 writes it.

        Raises RankMismatchError on every rank: they ask for statistics of different keys.
        """
        self._complete("dump_tabular")
        super().dump_tabular()

    def _complete(self, op: str) -> None:
        if self._statistics:
            samples = {key: stored for key, (stored, _) in self._statistics.items()}
            found = statistics(op, samples, self._comm)
            for key, (_, columns) in self._statistics.items():
                self._row |= {column: getattr(found[key], field) for column, field in columns.items()}
            self._statistics = {}

    @property
    def log_current_row(self) -> dict[str, Any]:
        """The values logged since the last `dump_tabular`, by column. Collective, if the row has statistics."""
        self._complete("log_current_row")
        return self._row

    @log_current_row.setter
    def log_current_row(self, row: dict[str, Any]) -> None:
        self._row = row

    def get_stats(self, key: str) -> tuple[float, float]:
        """Collective: (mean, std) over all ranks of what has been stored under `key`, which stays stored."""
        return statistics("get_stats", {key: self._stored(key)}, self._comm)[key][:2]

    def _stored(self, key: str) -> np.ndarray:
        return np.concatenate([np.ravel(value) for value in self.epoch_dict.get(key) or [[]]])
