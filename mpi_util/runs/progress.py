"""progress.txt: a header and one row per iteration, separated by tabs."""

from collections.abc import Mapping
from pathlib import Path

from ..host.files import replace_file, sync


class Progress:
    """The file. It is open only while a row is written, so every row that was added is in it.

    Attributes:
        columns: of the header, in order.
    """

    def __init__(self, path: Path, keep_rows: int = 0):
        """Creates the file, or keeps the first `keep_rows` rows of an existing one and drops the others."""
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")] if keep_rows else []
        lines = lines[: keep_rows + 1]
        self.columns = lines[0].rstrip("\n").split("\t") if lines else []
        if "".join(lines) != text or not path.exists():
            replace_file(path, "".join(lines).encode())

    def add(self, row: Mapping[str, int | float]) -> None:
        """Appends a row. A new key gets a column, empty in earlier rows; the cell of a missing key is empty."""
        new = [key for key in row if key not in self.columns]
        if new:
            self._add_columns(new)
        cells = [repr(row[key]) if key in row else "" for key in self.columns]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("\t".join(cells) + "\n")

    def _add_columns(self, new: list[str]) -> None:
        rows = self.path.read_text(encoding="utf-8").splitlines()[1:]
        self.columns = [*self.columns, *new]
        lines = ["\t".join(self.columns), *(row + "\t" * len(new) for row in rows)]
        replace_file(self.path, "".join(line + "\n" for line in lines).encode())

    def sync(self) -> None:
        """Waits until all rows are on disk."""
        sync(self.path)
