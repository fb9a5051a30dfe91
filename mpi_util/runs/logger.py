"""The logger of values: a run's table, configuration, state and model, written by rank 0."""

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.adapters import adapter_for
from ..errors import UsageError
from ..host.files import replace_file
from ..launch.identity import Comm, rank
from . import to_json
from .progress import Progress
from .savers import KerasSaver, SessionSaver, TorchSaver

COLORS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")  # codes 30, 31, ...
_RESULTS = ("config.json", "vars*.pkl", "pyt_save", "tf1_save*", "keras_save")  # and the table: what a logger writes


def colorize(string: str, color: str, bold: bool = False, highlight: bool = False) -> str:
    """`string` between the codes that give it a colour on a terminal.

    Args:
        color: gray, red, green, yellow, blue, magenta, cyan, white or crimson.
        highlight: colour what is behind the text instead.
    """
    codes = [str(30 + COLORS.index(color) + 10 * highlight)] + ["1"] * bold
    return f"\x1b[{';'.join(codes)}m{string}\x1b[0m"


class Logger:
    """Keeps a run's table of diagnostics, its configuration, its state and its model.

    All ranks make one and call it alike; only rank 0 writes and prints, and with this class no call is collective.

    Attributes:
        output_dir: the run's folder; None on ranks other than 0.
        exp_name: name of the experiment, by which plots are grouped.
        log_current_row: what has been logged for the row to come.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        output_fname: str = "progress.txt",
        exp_name: str | None = None,
        *,
        show: Callable[[dict[str, float]], None] | None = None,
        keep_rows: int | None = None,
        comm: Comm = None,
    ):
        """Opens the run's folder, on rank 0.

        Args:
            output_dir: the folder, made if it is missing; None: a new one in the machine's folder for temporary files.
            output_fname: name of the table in it.
            exp_name: name of the experiment, for config.json.
            show: gets each row, on rank 0, instead of the table on the terminal; nothing else is printed either.
            keep_rows: goes on with the table that is there, after its first so many rows. None: a new run; results of
                an earlier one in the same folder are kept under other names, such as progress.txt.1.
            comm: communicator; None: all ranks.

        Raises:
            UsageError: the folder cannot be written.
        """
        self.exp_name = exp_name
        self.output_dir: str | None = None
        self.log_current_row: dict[str, Any] = {}
        self._comm, self._show = comm, show
        self._savers: list[Callable[[Path, str], str]] = []
        self._warned: set[str] = set()
        self._is_root = (rank() if comm is None else comm.Get_rank()) == 0
        if not self._is_root:
            return
        try:
            self._folder = Path(output_dir) if output_dir else _new_temporary_folder()
            self._folder.mkdir(parents=True, exist_ok=True)
            table = self._folder / output_fname
            if keep_rows is None and table.exists() and table.stat().st_size:
                self._put_aside(output_fname)
            self._progress = Progress(table, keep_rows or 0)
        except OSError as error:
            raise UsageError(f"Logger: cannot write to {error.filename or output_dir}: {error.strerror}") from None
        self.output_dir = str(self._folder)
        if not show:
            self.log(f"Logging data to {table}")

    def _put_aside(self, output_fname: str) -> None:
        """Gives the results of an earlier run the first number that is free: progress.txt.1, config.json.1, ..."""
        number = 1
        while any(self._folder.glob(f"*.{number}")):
            number += 1
        own = [path for pattern in (*_RESULTS, output_fname) for path in self._folder.glob(pattern)]
        for path in own:
            if not path.suffix[1:].isdigit():
                path.rename(f"{path}.{number}")
        self.log(f"{self._folder} holds an earlier run; its files are now {output_fname}.{number} and so on", "yellow")

    def log(self, msg: str, color: str = "green") -> None:
        """Prints a line on rank 0, in bold colour on a terminal."""
        if self._is_root:
            print(colorize(msg, color, bold=True) if on_terminal() else msg, flush=True)

    def log_tabular(self, key: str, val: Any) -> None:
        """Notes a value for the row to come. `dump_tabular` writes it.

        Args:
            key: the column. It may be new: earlier rows are then empty in it.
            val: a number; also a bool, or an array or tensor of one element. Rank 0's counts.

        Raises:
            UsageError: the row has this column already, or `val` is no number.
        """
        self._note(key, _number(key, val))

    def _note(self, key: str, val: Any) -> None:
        if not isinstance(key, str) or not key.isprintable() or not key:
            raise UsageError(f"log_tabular: the name of a column is a text without tabs and line ends; got {key!r}")
        if key in self.log_current_row:
            raise UsageError(f"log_tabular: '{key}' is in this row already; call dump_tabular between two rows")
        self.log_current_row[key] = val

    def dump_tabular(self) -> None:
        """Writes the row, on rank 0: to progress.txt, where floats keep all digits, and to the terminal."""
        row, self.log_current_row = self.log_current_row, {}
        if not self._is_root or not row:
            return
        self._progress.add(row)
        if self._show:
            self._show(row)
        else:
            _write(_box(self._progress.columns, row))

    def sync(self) -> None:
        """Returns when the rows written so far are on disk; before a checkpoint that relies on them. Rank 0."""
        if self._is_root:
            self._progress.sync()

    def save_config(self, config: Any) -> None:
        """Writes config.json, on rank 0, and prints it: with the `exp_name`, whatever the values are.

        Args:
            config: dict such as `locals()`, dataclass, or object with attributes. Functions and classes become their
                names; see `to_json.convert_json`.
        """
        if not self._is_root:
            return
        if hasattr(config, "__dict__") and not hasattr(config, "__dataclass_fields__"):
            config = vars(config)
        content = to_json.convert_json(config)
        if not isinstance(content, dict):
            raise UsageError(f"save_config takes a dict, a dataclass or an object with attributes; got {config!r:.80}")
        if self.exp_name is not None:
            content["exp_name"] = self.exp_name
        text = to_json.to_text(content)
        if not self._show:
            self.log("Saving config:\n", "cyan")
            _write(text)
        replace_file(self._folder / "config.json", text.encode())

    def save_state(self, state_dict: dict[str, Any], itr: int | None = None) -> None:
        """Writes the state of the run and the models that have been set up, on rank 0; each file whole or not at all.

        Args:
            state_dict: goes to vars<itr>.pkl by Python's pickle, which joblib reads too. What cannot be pickled is a
                warning, and the models are saved nevertheless.
            itr: iteration, to keep one save of each; None: each save takes the place of the last.
        """
        if not self._is_root:
            return
        number = "" if itr is None else str(int(itr))
        try:
            replace_file(self._folder / f"vars{number}.pkl", pickle.dumps(state_dict))
        except OSError:
            raise
        except Exception as error:  # whatever an environment raises when it is pickled
            self._warn(f"Warning: could not pickle state_dict: {type(error).__name__}: {error}")
        for save in self._savers:
            self._warn(save(self._folder, number))

    def _warn(self, text: str) -> None:
        if text and text not in self._warned:
            self._warned.add(text)
            self.log(text, "red")

    def setup_pytorch_saver(self, what_to_save: Any) -> None:
        """From now on `save_state` saves a torch model: pyt_save/model<itr>.pt, and its weights, model<itr>.npz.

        Args:
            what_to_save: module, or a nested dict/list/tuple of modules, optimizers and tensors.
        """
        self._set_saver(TorchSaver(what_to_save))

    def setup_tf_saver(
        self, sess: Any, inputs: dict[str, Any] | None = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """From now on `save_state` saves a TensorFlow model.

        Args:
            sess: a tf.compat.v1 session, saved to tf1_save<itr>, for `restore_tf_graph`; or a Keras model, saved to
                keras_save/model<itr>.keras and, its weights, model<itr>.npz.
            inputs: for a session: the placeholders that the outputs need, by names of your choice.
            outputs: for a session: the tensors to be restored, by names of your choice.
        """
        if inputs is None or outputs is None:
            if not hasattr(sess, "get_weights"):
                raise UsageError(
                    f"setup_tf_saver takes a Keras model, or a session with inputs and outputs; got {sess!r}"
                )
            self._set_saver(KerasSaver(sess))
        else:
            self._set_saver(SessionSaver(sess, inputs, outputs))

    def _set_saver(self, saver: Any) -> None:
        self._savers = [other for other in self._savers if type(other) is not type(saver)] + [saver]


def _write(text: str) -> None:
    """Prints lines in one piece; `print` would let other ranks in before the last line's end."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _number(key: str, val: Any) -> int | float:
    """A Python number, which prints with all its digits."""
    if type(val) is int or type(val) is float:
        return val
    array = real_numbers(val)
    if array is None or array.size != 1:
        raise UsageError(f"log_tabular: '{key}' takes a number; got {val!r:.80}")
    return int(array.item()) if array.dtype.kind in "iub" else float(array.item())


def real_numbers(value: Any) -> np.ndarray | None:
    """An array or tensor of any framework, or a number, as an array; None if it holds anything but real numbers."""
    try:
        array = adapter_for(value).to_numbers(value)
    except Exception:  # of whatever framework
        return None
    return array if array.dtype.kind in "fiub" else None


def _box(columns: list[str], row: dict[str, float]) -> str:
    """The row as a table of two columns, for the terminal."""
    width = max(15, *map(len, columns))
    line = "-" * (width + 22)
    cells = [(key, f"{row[key]:8.3g}" if key in row else "") for key in columns]
    return "\n".join([line, *(f"| {key:>{width}} | {value:>15} |" for key, value in cells), line])


def on_terminal() -> bool:
    """Under a launcher stdout is a pipe, whatever is at its other end; the process that started it knows that."""
    return os.environ.get("MPI_UTIL_TTY") == "1" if "MPI_UTIL_JOB" in os.environ else sys.stdout.isatty()


def _new_temporary_folder() -> Path:
    """<temporary files>/experiments/<time>, which nobody else has."""
    base = Path(tempfile.gettempdir(), "experiments", time.strftime("%Y%m%d-%H%M%S"))
    base.parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{base.name}-", dir=base.parent))
