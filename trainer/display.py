"""The screen of a run: a live panel on a terminal; elsewhere a table, a row per iteration."""

import contextlib
import itertools
import math
import os
import shutil
import time
from collections import deque
from typing import Any

from mpi_util_spinup.table import say
from trainer.config import Config

# column of progress.txt, heading, width without the space before it, format
COLUMNS: tuple[tuple[str, str, int, str], ...] = (
    ("Iteration", "iter", 5, "d"),
    ("TotalEnvInteracts", "steps", 10, ",d"),
    ("Episodes", "episodes", 8, ",d"),
    ("AverageEpRet", "return", 7, ".1f"),
    ("EpLen", "length", 6, ".0f"),
    ("KL", "KL", 6, ".4f"),
    ("Entropy", "entropy", 7, ".2f"),
    ("LossV", "loss V", 7, ".2g"),
    ("StepsPerSecond", "steps/s", 7, ",.0f"),
    ("RolloutS", "rollout s", 9, ".3f"),
    ("UpdateS", "update s", 8, ".3f"),
    ("IdleShare", "idle", 4, ".0%"),
)
PHASES = ("rollout", "gather", "update", "bcast")  # of an iteration
ROWS_PER_HEADING = 30
EPISODES = 100  # the last ones, of which the mean is shown
BETWEEN_S = 0.2  # two drawings of the panel, which takes about 2 ms
WIDEST, NARROWEST = 100, 50  # columns; on a narrower terminal there is a table
FRAME = 15  # columns of the panel's edges and headings
BARS = "▁▂▃▄▅▆▇█"


class Display:
    """Shows rows and messages. On a terminal the panel stays below the messages."""

    def __init__(self, config: Config):
        # under a launcher stdout is always a pipe or a pty; only the launching process knows about the terminal
        launched = "MPI_UTIL_JOB" in os.environ
        terminal = "MPI_UTIL_TTY" in os.environ if launched else os.isatty(1)
        live = terminal and columns() >= NARROWEST and os.environ.get("TERM", "dumb") != "dumb"
        self.panel = Panel(config) if live else None
        self.rows, self.recent = 0, Recent()
        self.columns = COLUMNS + (("AverageTestEpRet", "evaluated", 9, ".1f"),) * bool(config.eval_every)

    def begin(self, steps: int, episodes: int, seconds: float) -> None:
        """Says how far the run is before its first row. Args: seconds: of training, in earlier starts."""
        self.recent.seen = self.recent.seen or episodes  # those of the rows, if they are known
        if self.panel:
            self.panel.begin(steps, episodes, seconds)

    def before(self, row: dict[str, Any]) -> dict[str, float]:
        """Takes a row, perhaps of an earlier start, into means and curves. Returns: the means."""
        recent = self.recent.add(row)
        if self.panel:
            self.panel.show(row, recent)
        return recent

    def say(self, text: str) -> None:
        """Prints `text`, above the panel if there is one, unless it is empty."""
        if text:
            say(f"{self.panel.clear()}{text}\n{self.panel.draw()}" if self.panel else f"{text}\n")

    def doing(self, text: str) -> None:
        """Says in the panel what is going on."""
        if self.panel:
            self.panel.doing = text
            self._draw()

    def row(self, row: dict[str, Any]) -> None:
        """Shows an iteration; without an ended episode the mean of the last 100. Args: row: as in progress.txt."""
        recent = self.before(row)
        if self.panel:
            return self._draw()
        if self.rows % ROWS_PER_HEADING == 0:
            self.say("".join(f" {head:>{width}}" for _, head, width, _ in self.columns))
        self.rows += 1
        row = row | recent if math.isnan(row["AverageEpRet"]) else row
        cells = ("-" if math.isnan(row[name]) else format(row[name], form) for name, _, _, form in self.columns)
        self.say("".join(f" {cell:>{width}}" for cell, (_, _, width, _) in zip(cells, self.columns)))

    def _draw(self) -> None:
        if self.panel and time.monotonic() - self.panel.drawn > BETWEEN_S:
            say(self.panel.clear() + self.panel.draw())

    def end(self) -> None:
        """Leaves the panel as it is; what follows is printed below it."""
        if self.panel:
            say(f"{self.panel.clear()}{self.panel.draw()}\n")
            self.panel = None


class Recent:
    """Means of the last 100 episodes, each with the mean of its iteration."""

    def __init__(self) -> None:
        self.seen = 0
        self._means = {name: deque[float](maxlen=EPISODES) for name in ("AverageEpRet", "EpLen")}

    def add(self, row: dict[str, Any]) -> dict[str, float]:
        """Adds a row of progress.txt. Returns: the means; nan before the first episode has ended."""
        for name, last in self._means.items():
            last.extend([row[name]] * (row["Episodes"] - self.seen))
        self.seen = row["Episodes"]
        return {name: sum(last) / (len(last) or math.nan) for name, last in self._means.items()}


class Panel:
    """Draws what the last row says, and how far the run is, as text with codes of a terminal; rich is loaded only here.

    Attributes: doing: what is going on. drawn: when it was drawn, s, by time.monotonic.
    """

    def __init__(self, config: Config):
        from rich.console import Console

        self.config, self.doing, self.drawn = config, "starting", -math.inf
        # no rich.live.Live: it hides the cursor, and a crash would leave it hidden
        self._console = Console(force_terminal=True, legacy_windows=False)
        self._lines = 0  # of the last drawing
        self._row, self._first = dict[str, Any](), dict[str, int]()
        self._returns: list[float] = []  # of the iterations in which episodes have ended
        self._recent = math.nan
        self._tests: list[float] = []
        self._limits = {"steps": config.total_steps, "episodes": config.num_episodes}

    def begin(self, steps: int, episodes: int, seconds: float) -> None:
        self._first = self._done = {"steps": steps, "episodes": episodes}
        self._began, self._before = time.monotonic(), seconds

    def show(self, row: dict[str, Any], recent: dict[str, float]) -> None:
        self._row, self._done = row, {"steps": row["TotalEnvInteracts"], "episodes": row["Episodes"]}
        self._recent = recent["AverageEpRet"]
        for values, name in (self._returns, "AverageEpRet"), (self._tests, "AverageTestEpRet"):
            if not math.isnan(value := row.get(name, math.nan)):
                values.append(value)

    def clear(self) -> str:
        """Codes that remove the last drawing, whose lines are several where the terminal is narrower by now."""
        up, self._lines = max(0, self._lines - 1) * -(-self._console.width // columns()), 0
        return f"\x1b[{up}A" * bool(up) + "\r\x1b[0J"

    def draw(self) -> str:
        self.drawn, self._console.width = time.monotonic(), min(columns() - 1, WIDEST)
        with self._console.capture() as capture:
            self._console.print(self._content())
        text = capture.get().removesuffix("\n")
        self._lines = text.count("\n") + 1
        return text + "\r"  # foreign output then begins at the edge

    def _content(self) -> Any:
        from rich.panel import Panel as Frame
        from rich.table import Table

        config, row, grid = self.config, self._row, Table.grid(padding=(0, 2))
        if self._first:
            grid.add_row("progress", self._progress())
        if self._returns:
            mean = f"mean {self._recent:,.1f} of the last {EPISODES}"  # a narrow terminal cuts its end
            grid.add_row("return", f"[bold]{self._returns[-1]:,.1f}[/] {spark(self._returns)} {mean}")
        if self._tests:
            last, best = self._tests[-1], max(self._tests)
            grid.add_row("evaluated", f"[bold]{last:,.1f}[/] {spark(self._tests)} best {best:,.1f}")
        if row:
            n, total = config.nprocs, sum(row[f"{name.capitalize()}S"] for name in PHASES) or 1.0
            idle = f", idle {row['IdleShare']:.0%}" * (n > 1)
            grid.add_row("speed", f"{row['StepsPerSecond']:,.0f} steps/s, {n} process{'es' * (n > 1)}{idle}")
            grid.add_row("time", ", ".join(f"{name} {row[f'{name.capitalize()}S'] / total:.0%}" for name in PHASES))
            grid.add_row("update", f"KL {row['KL']:.4f}, entropy {row['Entropy']:.2f}, value loss {row['LossV']:.2g}")
        grid.add_row("now", self.doing)
        for column, style in zip(grid.columns, ("dim", "")):
            column.style, column.no_wrap = style, True
        grid.columns[0].min_width = len("evaluated")
        return Frame(grid, title=f"{config.env}, {config.algo}, seed {config.seed}", title_align="left")

    def _progress(self) -> str:
        """How near the nearest limit is; the bar takes what is left of the line."""
        took, limits = time.monotonic() - self._began, {unit: n for unit, n in self._limits.items() if n}
        unit = max(limits, key=lambda unit: self._done[unit] / limits[unit], default="steps")
        first, done = self._first[unit], self._done[unit]
        if not limits:
            return f"{done:,} {unit} after {clock(self._before + took)}; no limit was set"
        limit = limits[unit]
        left = f"{clock(took * (limit - done) / (done - first))} left" if first < done < limit else ""
        count, rest = f"{done:,} of {limit:,} {unit}  ", f"  {done / limit:.0%}  {left}"
        width = min(max(self._console.width - FRAME - len(count) - len(rest), 0), WIDEST // 4)
        full = round(width * min(done / limit, 1.0))
        return f"{count}[green]{'━' * full}[/][dim]{'━' * (width - full)}[/]{rest}"


def spark(values: list[float], width: int = 16) -> str:
    """A small curve of any number of values, as means of `width` parts of them."""
    ends = [round(i * len(values) / width) for i in range(width + 1)] if len(values) > width else range(len(values) + 1)
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    return "".join(BARS[int((mean - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for mean in means)


def clock(seconds: float) -> str:
    """Seconds as 0:42, 12:05 or 3:07:11."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def counted(n: int, thing: str) -> str:
    """Such as 1 step, or 2,000 steps."""
    return f"{n:,} {thing}{'s' * (n != 1)}"


def columns() -> int:
    """The terminal's, as it is now; where it cannot be asked, as from another host: as it was at the start."""
    with contextlib.suppress(OSError, KeyError), open(os.open(os.environ["MPI_UTIL_TTY"], os.O_NOCTTY)) as terminal:
        return os.get_terminal_size(terminal.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns
