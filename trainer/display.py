"""The screen of a run: a table row per iteration, and on a terminal a status line."""

import os
import sys
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

# column of progress.txt, heading, width, format
COLUMNS = (
    ("Iteration", "iter", 6, "d"),
    ("TotalEnvInteracts", "steps", 9, ",d"),
    ("Episodes", "episodes", 9, ",d"),
    ("AverageEpRet", "return", 9, ".1f"),
    ("EpLen", "length", 7, ".0f"),
    ("KL", "KL", 8, ".4f"),
    ("Entropy", "entropy", 8, ".2f"),
    ("LossV", "loss V", 8, ".3f"),
    ("StepsPerSecond", "steps/s", 8, ",.0f"),
    ("RolloutS", "rollout s", 10, ".3f"),
    ("UpdateS", "update s", 9, ".3f"),
    ("IdleShare", "idle", 6, ".0%"),
)
ROWS_PER_HEADING = 30


class _Screen:
    """Standard output of a run that continues when there is none any more: a closed terminal, `| head`, a full disk."""

    def __init__(self) -> None:
        self._out = sys.stdout  # which rich replaces

    def write(self, text: str) -> None:
        """Writes at once."""
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


class Display:
    """Prints rows, and on a terminal keeps a status line below them."""

    def __init__(self) -> None:
        # under a launcher stdout is always a pipe or a pty; only the launching process knows about the terminal
        launched = "MPI_UTIL_JOB" in os.environ
        terminal = os.environ.get("MPI_UTIL_TTY") == "1" if launched else sys.stdout.isatty()
        self.console = Console(file=_Screen(), force_terminal=terminal, highlight=False, soft_wrap=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if terminal else None
        self.rows = 0
        if self.live:
            self.live.start()

    def say(self, text: str) -> None:
        """Prints `text`, unless it is empty."""
        if text:
            self.console.print(text, markup=False)

    def doing(self, text: str) -> None:
        """Sets the status line, if there is a terminal."""
        if self.live:
            self.live.update(Text(text, style="dim"), refresh=True)

    def row(self, row: dict[str, Any]) -> None:
        """Prints an iteration. Args: row: by the columns of progress.txt."""
        if self.rows % ROWS_PER_HEADING == 0:
            self.console.print(Text("".join(f"{head:>{width}}" for _, head, width, _ in COLUMNS), style="bold"))
        self.rows += 1
        self.console.print(Text("".join(f"{format(row[key], form):>{width}}" for key, _, width, form in COLUMNS)))

    def close(self) -> None:
        """Removes the status line."""
        if self.live:
            self.live.stop()
            self.live = None
