"""Spinning Up's loggers: `spinup.utils.logx`. Every rank makes the same calls, and rank 0 writes."""

import atexit
import functools
import itertools
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpi_util.arrays.adapters import numbers_of
from mpi_util.errors import UsageError
from mpi_util.ranks import failure
from mpi_util.ranks.identity import Comm, rank

from .files import lock_folder, regular, replace_file
from .mpi_tools import Statistics, statistics
from .savers import load_weights, restore_tf_graph, save_keras, save_session, save_torch
from .serialization_utils import convert_json
from .table import Progress, box, color2num, colored, colorize, say

__all__ = ["EpochLogger", "Logger", "color2num", "colorize", "load_weights", "restore_tf_graph"]

_ROW = "a row"
_RESULTS: tuple[str, ...] = "config.json", "vars*.pkl", "pyt_save", "tf1_save*", "keras_save"  # beside the table
_RESULTS += "progress.jsonl", "policy.safetensors", "best.safetensors"  # of train.py


class Logger:
    """Writes a run's table of diagnostics, its configuration, its state and its models.

    All ranks create one and make the same calls; only rank 0 writes and prints. No call of this class is collective.

    If rows or a state cannot be written (the disk is full, the folder was removed), the program continues. Rank 0
    prints a line, and tries again at the next row or state, with all rows so far. If the last attempt fails, the
    program's status is 1.

    Attributes:
        output_dir: the run's folder; None on ranks other than 0.
        log_current_row: the values logged since the last `dump_tabular`, by column.
        unsaved: what could not be written at the last attempt, with the reason; {}: nothing.
    """

    pytorch_saver_elements: Any = None

    def __init__(
        self, output_dir: str | os.PathLike[str] | None = None, output_fname: str = "progress.txt",
        exp_name: str | None = None, *, show: Callable[[dict[str, float]], None] | None = None,
        keep_rows: int | None = None, numbered_by: str | None = None, comm: Comm = None,
    ):  # fmt: skip
        """Opens the run's folder, on rank 0.

        Args:
            output_dir: the folder, created if missing; None: a new one in the system's folder for temporary files.
            output_fname: name of the table in it.
            exp_name: of the experiment, for config.json.
            show: called with each row, on rank 0, instead of printing it. Then only warnings are printed.
            keep_rows: number of rows of the existing table after which to append; a line names those that are missing
                or damaged. None: a new run; an earlier one's files are renamed, such as progress.txt.1.
            numbered_by: column that numbers the rows from 1; None: rows are counted.
        Raises UsageError: the folder cannot be written, or another process writes to it.
        """
        self.exp_name = exp_name
        self.output_dir: str | None = None
        self.first_row, self.log_headers = True, list[str]()  # programs reset them for a table of other columns
        self.log_current_row: dict[str, Any] = {}
        self.unsaved: dict[str, str] = {}
        self._comm, self._show, self._config = comm, show, b""
        self._savers: dict[str, Callable[[Path, str], str | None]] = {}
        self._warned: set[str] = set()
        self._is_root = (rank() if comm is None else comm.Get_rank()) == 0
        if not self._is_root:
            return
        try:
            # not in a folder of a known name, which another user may have made
            found = output_dir or tempfile.mkdtemp(prefix=time.strftime("experiments-%Y%m%d-%H%M%S-"))
            self._folder = Path(found).absolute()  # the program may go to another folder
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self._folder)
            table = self._folder / output_fname
            if keep_rows is None and table.exists() and table.stat().st_size:
                self._rename_results(output_fname)
            self._progress = Progress(table, keep_rows or 0, numbered_by)
        except OSError as error:
            raise UsageError(f"Logger: cannot write to {error.filename or output_dir}: {error.strerror}") from None
        self.output_dir = str(self._folder)
        self._warn(self._progress.damage)
        if not show:
            self.log(f"Logging data to {table}")

    def _rename_results(self, output_fname: str) -> None:
        """Appends the first free number to the files of an earlier run: progress.txt.1, config.json.1, ..."""
        number = next(n for n in itertools.count(1) if not any(self._folder.glob(f"*.{n}")))
        found = [path for pattern in _RESULTS for path in self._folder.glob(pattern) if not path.suffix[1:].isdigit()]
        for path in [*found, self._folder / output_fname]:
            # Spinning Up's test_policy looks for folders with tf1_save in their name
            path.rename(path.with_name(f"{path.name.replace('tf1_save', 'tf1-save')}.{number}"))
        self.log(f"{self._folder} holds an earlier run; its files are now {output_fname}.{number} and so on", "yellow")

    def log(self, msg: str, color: str = "green") -> None:
        """Prints a line on rank 0, in bold colour on a terminal."""
        if self._is_root:
            say(colored(msg, color) + "\n")

    def log_tabular(self, key: str, val: Any) -> None:
        """Adds a column to the current row, which `dump_tabular` writes. A new column is empty in earlier rows.

        Args: val: a number, bool, or array or tensor of one element; anything else is written as one line of text.
        Raises UsageError: the row has this column already.
        """
        if type(val) not in (int, float):  # which are printed with all digits
            array = None if isinstance(val, (str, list, tuple)) else numbers_of(val)
            if array is not None and array.size == 1:
                val = (int if array.dtype.kind in "iub" else float)(array.item())
            else:
                val = " ".join(str(val).split()).encode(errors="backslashreplace").decode()  # it may be a file's name
        if not isinstance(key, str) or not key.isprintable() or not key:
            raise UsageError(f"log_tabular: the name of a column must be printable, without tabs; got {key!r}")
        if key in self.log_current_row:
            raise UsageError(f"log_tabular: '{key}' is in this row already; call dump_tabular between two rows")
        self.log_current_row[key] = val

    def dump_tabular(self) -> None:
        """Writes the row, on rank 0: to progress.txt, where floats keep all digits, and to the terminal."""
        row, self.log_current_row = self.log_current_row, {}
        if not row:
            return
        self.first_row, self.log_headers = False, list(dict.fromkeys([*self.log_headers, *row]))
        if not self._is_root:
            return
        self._progress.add(row)
        self.attempt(_ROW, self._progress.write)
        self._show(row) if self._show else say(box(self._progress.columns, row))

    def sync(self) -> None:
        """Waits until the rows are on disk, on rank 0. Call it before writing a checkpoint that relies on them."""
        self.attempt(_ROW, lambda: self._progress.write(durably=True))

    def attempt(self, what: str, write: Callable[[], object]) -> None:
        """On rank 0 calls `write`, which writes `what` ("a checkpoint"). After an OSError the program continues."""
        if not self._is_root:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._config and not (self._folder / "config.json").exists():
                replace_file(self._folder / "config.json", self._config)
            write()
            self.unsaved.pop(what, None)
        except OSError as error:
            reason = f"cannot write {what}: {error.filename or self._folder}: {error.strerror or error}"
            if what != _ROW or what not in self.unsaved:  # there may be many a second
                self.log(f"{reason}; the next one tries again", "red")
            self.unsaved[what] = reason
            atexit.unregister(self._end)
            atexit.register(self._end)

    def _end(self) -> None:
        if self.unsaved:
            self.sync()
        if self.unsaved:
            failure.fail(f"Logger: {'; '.join(self.unsaved.values())}")

    def save_config(self, config: Any) -> None:
        """Writes a dict such as `locals()`, a dataclass or an object with attributes to config.json, and prints it.

        The values become what `convert_json` makes of them. Raises UsageError: it cannot be written.
        """
        if not self._is_root:
            return
        known = isinstance(config, dict) or hasattr(config, "__dataclass_fields__")
        content = convert_json(vars(config) if hasattr(config, "__dict__") and not known else config)
        if not isinstance(content, dict):
            raise UsageError(f"save_config takes a dict, a dataclass or an object with attributes; got {config!r:.80}")
        if self.exp_name is not None:
            content["exp_name"] = self.exp_name
        text = json.dumps(content, separators=(",", ":\t"), indent=4, sort_keys=True)
        if not self._show:
            self.log("Saving config:\n", "cyan")
            say(f"{text}\n")
        self._config = text.encode()
        try:
            replace_file(self._folder / "config.json", self._config)
        except OSError as error:
            raise UsageError(f"Logger: cannot write to {self._folder}: {error.strerror}") from None

    def save_state(self, state_dict: dict[str, Any], itr: int | None = None) -> None:
        """Writes the state of the run and the models that have been set up, on rank 0; each file atomically.

        Args:
            state_dict: pickled to vars<itr>.pkl, which joblib reads too; if that fails, a warning is printed.
            itr: the iteration, whose save is kept; None: each save replaces the last.
        """
        number = "" if itr is None else str(int(itr))

        def write() -> None:
            try:
                content = pickle.dumps(state_dict)
            except Exception as error:  # an environment may raise anything
                self._warn(f"Warning: could not pickle state_dict: {type(error).__name__}: {error}")
            else:
                replace_file(self._folder / f"vars{number}.pkl", content)
            for save in self._savers.values():
                self._warn(save(self._folder, number))

        self.attempt("the state and the models", write)

    @functools.cached_property
    def output_file(self) -> Any:
        """The table, open for appending, on rank 0; None elsewhere. The logger itself opens it for each row."""
        return open(self._progress.path, "a", opener=regular) if self._is_root else None  # closed with the process

    def _warn(self, text: str | None) -> None:
        if text and text not in self._warned:
            self._warned.add(text)
            self.log(text, "red")

    def setup_pytorch_saver(self, what_to_save: Any) -> None:
        """From now on `save_state` saves a torch module, or a dict/list/tuple of modules, optimizers, tensors."""
        self.pytorch_saver_elements = what_to_save
        self._savers["torch"] = functools.partial(save_torch, what_to_save)

    def setup_tf_saver(self, sess: Any, inputs: Any = None, outputs: Any = None) -> None:
        """From now on `save_state` saves a TensorFlow model.

        Args:
            sess: a tf.compat.v1 session, saved to tf1_save<itr>, for `restore_tf_graph`; or a Keras model, saved to
                keras_save/model<itr>.keras, with weights<itr>.npz.
            inputs: for a session: {name of your choice: placeholder that the outputs need}.
            outputs: for a session: {name of your choice: tensor to restore}.
        """
        if inputs is not None and outputs is not None:
            self._savers["session"] = functools.partial(save_session, sess, inputs, outputs)
        elif hasattr(sess, "get_weights"):
            self._savers["keras"] = functools.partial(save_keras, sess)
        else:
            raise UsageError(f"setup_tf_saver takes a Keras model, or a session with inputs and outputs; got {sess!r}")


class EpochLogger(Logger):
    """A Logger that collects samples of a quantity, and logs their statistics over all ranks.

        logger.store(EpRet=ep_ret, EpLen=ep_len)        # at the end of each episode
        ...
        logger.log_tabular("EpRet", with_min_and_max=True)   # collective
        logger.log_tabular("EpLen", average_only=True)
        logger.dump_tabular()

    If no rank has a sample, the statistics are NaN. `epoch_dict` holds the samples since a key was last logged.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch_dict: dict[str, list[Any]] = {}

    def store(self, **kwargs: Any) -> None:
        """Adds samples: real numbers, or arrays, tensors or lists, which are copied. UsageError: something else."""
        for key, value in kwargs.items():
            if type(value) not in (float, int):
                array = numbers_of(value)
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
            with_min_and_max: columns Max<key> and Min<key> too.
            average_only: one column <key> with the mean, without Std<key>.
        Raises RankMismatchError on every rank: they ask for statistics of different keys.
        """
        columns = [(key, val)]
        if val is None:
            found = self._statistics("log_tabular", key)
            columns = [(key, found.mean)] if average_only else [(f"Average{key}", found.mean), (f"Std{key}", found.std)]
            columns += [(f"Max{key}", found.max), (f"Min{key}", found.min)] if with_min_and_max else []
        for column, value in columns:
            super().log_tabular(column, value)
        self.epoch_dict[key] = []

    def get_stats(self, key: str) -> tuple[float, float]:
        """Collective: (mean, std) over all ranks of what has been stored under `key`, which stays stored."""
        return self._statistics("get_stats", key)[:2]

    def _statistics(self, call: str, key: str) -> Statistics:
        samples = np.concatenate([np.ravel(value) for value in self.epoch_dict.get(key) or [[]]])
        return statistics(call, key, samples, self._comm)
