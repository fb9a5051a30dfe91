"""The table of a run on disk, progress.txt, and on a terminal, in colours. Only rank 0 writes both."""

import contextlib
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import read, regular, replace_file, sync

_COLORS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")
color2num = {name: 30 + i for i, name in enumerate(_COLORS)}  # codes of a terminal


def colorize(string: str, color: str, bold: bool = False, highlight: bool = False) -> str:
    """`string` in a terminal's gray, red, green, yellow, blue, magenta, cyan, white or crimson; highlight: on it."""
    codes = [str(color2num[color] + 10 * highlight)] + ["1"] * bold
    return f"\x1b[{';'.join(codes)}m{string}\x1b[0m"


def colored(text: str, color: str) -> str:
    """`text` in bold colour if standard output is a terminal."""
    # Under a launcher it is a pipe; the process that started the launcher knows where that ends.
    terminal = "MPI_UTIL_TTY" in os.environ if "MPI_UTIL_JOB" in os.environ else sys.stdout and sys.stdout.isatty()
    return colorize(text, color, bold=True) if terminal else text


def say(text: str) -> None:
    """Prints `text` as it is. Nothing that happens to standard output ends a run."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # `| head` has what it wants; Python would try again at the end, and fail
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:  # ValueError: it is no file
            os.dup2(null.fileno(), sys.stdout.fileno())
    except (OSError, ValueError):  # a full disk, where later lines may find room; it is closed, or lacks a letter
        pass


def box(columns: list[str], row: dict[str, Any]) -> str:
    """A row as a table of two columns. Its last newline is part of it: another rank's output cannot come in between."""
    width = max(15, *map(len, columns))
    line = "-" * (width + 22)
    shown = {key: value[:15] if isinstance(value, str) else f"{value:8.3g}" for key, value in row.items()}
    return "\n".join([line, *(f"| {key:>{width}} | {shown.get(key, ''):>15} |" for key in columns), line, ""])


class Progress:
    """progress.txt: a header and one row per iteration, separated by tabs. It is open only while rows are written.

    A new key gets a column, which is empty in earlier rows; the cell of a missing key is empty.

    Attributes:
        columns: names in the header, in order.
        lines: all rows; a row lacks the tabs of columns that were added after it.
        damage: one line that names rows that were to be kept and are missing or damaged; "": none.
    """

    def __init__(self, path: Path, keep_rows: int = 0, numbered_by: str | None = None):
        """Creates the file, or keeps the first `keep_rows` rows of an existing one and drops the others."""
        self.path, self.damage = path, ""
        text = read(path).decode(errors="replace").replace("\r\n", "\n") if path.exists() and keep_rows else ""
        *lines, half = text.split("\n")
        self.columns, found = lines[0].split("\t") if lines and "\0" not in lines[0] else [], {}
        for number, cells in enumerate([line.split("\t") for line in lines[1:]], 1):
            with contextlib.suppress(ValueError):  # the number of cells differs, or the row's number is not a number
                row = dict(zip(self.columns, cells, strict=True))
                if all(cell.isprintable() for cell in cells):
                    found[int(row.get(numbered_by or "", number))] = "\t".join(cells)
        if n_lost := keep_rows - sum(0 < n <= keep_rows for n in found):
            lost = (str(n) for n in range(1, keep_rows + 1) if n not in found)  # too many for a list, where it is wrong
            numbers = ", ".join(itertools.islice(lost, 5)) + ", ..." * (n_lost > 5)
            self.damage = f"{path}: {n_lost} of {keep_rows} rows are missing or damaged: {numbers}"
            if half or len(found) < len(lines) - 1:
                replace_file(path.with_name(f"{path.name}.damaged"), text.encode())
        self.lines, self._n_written = [found[n] for n in found if n <= keep_rows], 0
        self.write()

    def add(self, row: Mapping[str, int | float | str]) -> None:
        """Adds a row, for `write` to write."""
        before, self.columns = self.columns, list(dict.fromkeys([*self.columns, *row]))
        self._n_written *= before == self.columns
        self.lines.append("\t".join(str(row[key]) if key in row else "" for key in self.columns))

    def write(self, durably: bool = False) -> None:
        """Writes the rows that are not in the file yet (durably: waits for the disk); a call after an OSError too."""
        n_written = self._n_written if self.path.exists() else 0
        self._n_written = 0  # if this fails, half a row may be in the file
        if n_written:
            with open(self.path, "a", encoding="utf-8", opener=regular) as file:
                file.write("".join(f"{line}\n" for line in self.lines[n_written:]))
        else:
            lines = ["\t".join(self.columns), *self.lines] if self.columns else []
            whole = (line + "\t" * (len(self.columns) - 1 - line.count("\t")) for line in lines)
            replace_file(self.path, "".join(f"{line}\n" for line in whole).encode())
        self._n_written = len(self.lines)
        if durably:
            sync(self.path)
