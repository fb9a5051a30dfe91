"""The screen of a run: a table row per iteration, and on a terminal a status line."""

import math
import os
import shutil
from typing import Any

# column of progress.txt, heading, width without the space before it, format
COLUMNS: tuple[tuple[str, str, int, str], ...] = (
    ("Iteration", "iter", 5, "d"),
    ("TotalEnvInteracts", "steps", 10, ",d"),
    ("Episodes", "episodes", 8, ",d"),
    ("AverageEpRet", "return", 7, ".1f"),
    ("EpLen", "length", 6, ".0f"),
    ("KL", "KL", 6, ".4f"),
    ("Entropy", "entropy", 7, ".2f"),
    ("LossV", "loss V", 6, ".3f"),
    ("StepsPerSecond", "steps/s", 7, ",.0f"),
    ("RolloutS", "rollout s", 9, ".3f"),
    ("UpdateS", "update s", 8, ".3f"),
    ("IdleShare", "idle", 4, ".0%"),
)
LEFT_OUT = ("EpLen", "Entropy", "Episodes", "LossV", "UpdateS")  # one after the other, where the terminal is narrow
ROWS_PER_HEADING = 30
CLEAR, BOLD, DIM, PLAIN = "\r\x1b[2K", "\x1b[1m", "\x1b[2m", "\x1b[0m"


class Display:
    """Prints rows, and on a terminal keeps a status line below them.

    The run continues when there is no standard output any more: a closed terminal, `| head`, a full disk.
    """

    def __init__(self) -> None:
        # under a launcher stdout is always a pipe or a pty; only the launching process knows about the terminal
        launched = "MPI_UTIL_JOB" in os.environ
        self.terminal = os.environ.get("MPI_UTIL_TTY") == "1" if launched else os.isatty(1)
        self.columns, self.rows, self.known = COLUMNS, 0, {"AverageEpRet": math.nan, "EpLen": math.nan}
        for name in LEFT_OUT if self.terminal else ():
            if sum(1 + width for _, _, width, _ in self.columns) > shutil.get_terminal_size().columns:
                self.columns = tuple(column for column in self.columns if column[0] != name)

    def say(self, text: str, style: str = "", end: str = "\n") -> None:
        """Prints `text` in place of the status line, unless it is empty."""
        if text:
            text = f"{CLEAR}{style}{text}{PLAIN}" if self.terminal else text
            try:
                print(text, end=end, flush=True)
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def doing(self, text: str) -> None:
        """Sets the status line, if there is a terminal; what others print overwrites it."""
        if self.terminal:
            self.say(text, DIM, end="\r")

    def row(self, row: dict[str, Any]) -> None:
        """Prints an iteration; one in which no episode ended repeats the returns. Args: row: as in progress.txt."""
        if self.rows % ROWS_PER_HEADING == 0:
            self.say("".join(f" {head:>{width}}" for _, head, width, _ in self.columns), BOLD)
        self.rows += 1
        self.known |= {key: row[key] for key in self.known if not math.isnan(row[key])}
        row = row | self.known
        self.say("".join(f" {format(row[key], form):>{width}}" for key, _, width, form in self.columns))
