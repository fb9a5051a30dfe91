"""Spinning Up's plots: curves of runs, from the tables that their loggers wrote. A process of its own, without MPI.

    python -m mpi_util_spinup.plot data/ppo
    python -m mpi_util_spinup.plot data/ppo data/vpg --legend PPO VPG --value AverageEpRet KL --smooth 5 --out two.png
    python -m mpi_util_spinup.plot data/ppo --x time    # wall-clock hours instead of steps
    python -m mpi_util_spinup.plot data --style paper --out curves.pdf

A folder stands for all runs in it and below it. Each environment has a panel. Runs that differ in the seed only are one
curve, their mean in a band of one standard deviation; a single run is a smoothed line over its rows, drawn pale.
"""

import argparse
import contextlib
import functools
import importlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpi_util.arrays.adapters import framework
from mpi_util.errors import MissingFrameworkError, UsageError, whole_number

from .files import read, replace_file

TABLE = "progress.txt"
SHORT = {"steps": "TotalEnvInteracts", "time": "Time", "iteration": "Iteration", "return": "Performance"}
UNITS = {"TotalEnvInteracts": "environment steps", "Time": "hours"}
LABELS = {"Performance": "return", "AverageEpRet": "return in training", "AverageTestEpRet": "return, evaluated"}
# settings that do not distinguish what a run learns; some hold paths, times or seeds
_OF_ONE_RUN = """seed run_dir resume commands versions logger_kwargs output_dir exp_name thunk hosts hostfile log_dir
tag_output nprocs num_cpu name watchdog_kill save_every total_steps num_episodes framework device logger env_fn"""
OF_ONE_RUN = frozenset(_OF_ONE_RUN.split())
COLUMNS = 3  # of panels at most
ROWS_AVERAGED = 40  # without --smooth the moving average spans one part in so many of a run's rows
_SMALL = {"font.size": 7, "figure.dpi": 300, "lines.linewidth": 1.0, "axes.linewidth": 0.6, "axes.titlesize": 7}
# width and height in inches of a figure's only panel, and of one of several; and matplotlib's settings
STYLES: dict[str, tuple[tuple[float, float], tuple[float, float], dict[str, Any]]] = {
    "screen": ((7.0, 4.2), (4.2, 3.2), {"font.size": 10, "figure.dpi": 120}),
    # a column of two; all of both columns
    "paper": ((3.3, 2.2), (2.2, 1.7), _SMALL | {"axes.spines.top": False, "axes.spines.right": False}),
}


@dataclass
class Run:
    """A run's table. Attributes: columns: float64 (rows,), by name. config: its config.json, {} without one."""

    folder: Path
    columns: dict[str, np.ndarray]
    config: dict[str, Any]

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """What distinguishes it from runs that only have another seed."""
        return {k: json.dumps(v, sort_keys=True) for k, v in self.config.items() if k not in OF_ONE_RUN}

    @property
    def env(self) -> str:
        """Its environment's name; "": it does not say."""
        made = str(self.config.get("env_fn", ""))  # of an experiment: the environment's name
        return str(self.config.get("env") or self.config.get("env_name") or made * ("<" not in made))

    def curve(self, x: str, value: str) -> tuple[np.ndarray, np.ndarray]:
        """(x, value) of the rows that have this value."""
        if missing := [name for name in (x, value) if name not in self.columns]:
            raise UsageError(f"{self.folder} has no column {missing[0]}; it has {', '.join(self.columns)}")
        xs, ys = self.columns[x], self.columns[value]
        order = np.argsort(xs, kind="stable")
        order = order[~np.isnan(xs + ys)[order]]
        return xs[order], ys[order]


def get_datasets(logdir: str | Path, condition: str | None = None) -> list[Run]:
    """The runs in and below a folder, or below the folders whose names begin so, in the order of their paths.

    Args: condition: a name for all of them, instead of config.json's `exp_name`. Raises UsageError: there is none.
    """
    path = Path(logdir)
    tops = [path] if path.is_dir() else sorted(p for p in path.parent.glob(f"{path.name}*") if p.is_dir())
    tables = sorted(table for top in tops for table in top.rglob(TABLE))
    runs = [run for table in tables if (run := _read(table, condition)).columns]
    if not runs:
        raise UsageError(f"{logdir}: no {TABLE} with rows in or below it")
    return runs


def _read(table: Path, condition: str | None) -> Run:
    try:
        config = dict(json.loads(read(table.parent / "config.json")))
    except (OSError, ValueError, TypeError, RecursionError):  # Spinning Up's plots did without it too
        config = {}
    if condition is not None:  # the only name of its curve
        kept = {k: config.get(k) for k in ("env", "env_name", "env_fn", "nprocs", "num_cpu")}
        config = kept | {"exp_name": condition}
    header, *rows = read(table).decode(errors="replace").splitlines() or [""]
    whole = [row for row in rows if row.count("\t") == header.count("\t")]  # the last one may be half written
    columns: dict[str, np.ndarray] = {}
    if whole:
        values = np.genfromtxt(whole, delimiter="\t", comments="\n", ndmin=2)  # no comments; NaN: no number
        columns |= zip(header.split("\t"), values.T)
        tests = columns.get("AverageTestEpRet", np.array([math.nan]))
        best = "AverageEpRet" if np.isnan(tests).all() else "AverageTestEpRet"
        columns.setdefault("Performance", columns.get(best, np.full(len(values), math.nan)))
    return Run(table.parent, columns, config)


def last_return(folder: Path) -> str:
    """Of the run's table; "": it has none."""
    with contextlib.suppress(OSError, UsageError, IndexError):
        return f"{_read(folder / TABLE, None).curve('Performance', 'Performance')[1][-1]:,.1f}"
    return ""


def grouped(runs: list[Run], by_processes: bool = False) -> dict[str, list[Run]]:
    """Runs by their entry in the legend. Args: by_processes: another number of processes is another group."""
    envs, keys = {run.env for run in runs}, {key for run in runs for key in run.settings} - {"env", "algo"}
    differ = sorted(k for k in keys if any(len({r.settings.get(k) for r in runs if r.env == env}) > 1 for env in envs))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        name = str(run.config.get("exp_name") or run.config.get("algo") or "")
        words = [f"{key} {run.settings[key].strip(chr(34))}" for key in differ if key in run.settings]
        n_processes = run.config.get("nprocs") or run.config.get("num_cpu") or 1
        words += [f"{n_processes} processes"] * by_processes
        groups.setdefault(", ".join(filter(None, [name or run.folder.name, *words])), []).append(run)
    return groups


def make_plots(
    all_logdirs: Sequence[str | Path], legend: Sequence[str] | None = None, xaxis: str | None = None,
    values: str | Sequence[str] | None = None, count: bool = False, font_scale: float = 1.5,
    smooth: int | None = 1, select: Sequence[str] | None = None, exclude: Sequence[str] | None = None,
    estimator: str = "mean", style: str = "screen",
) -> Any:  # fmt: skip
    """Draws the runs of these folders. Returns: a matplotlib Figure, with a panel for each value and environment.

    Args:
        legend: a name for each folder; None: from the runs' config.json, in which equal settings are one curve.
        xaxis, values: columns; None: steps, and Performance: the evaluations' return, or without any the training's.
        count: each run has a curve of its own, instead of mean and standard deviation over a group's.
        font_scale: 1.5 is the style's own size.
        smooth: rows in a moving average; None: a fortieth of them.
        select, exclude: only folders whose paths contain all words of `select`, and none of `exclude`.
        estimator: "mean", "max" or "min" of a group's runs.
        style: "screen", or "paper": the width of a column, or of the page where there are several environments.
    Raises UsageError: no runs, or a column is missing; MissingFrameworkError: no matplotlib.
    """
    if legend and len(legend) != len(all_logdirs):
        raise UsageError(f"--legend has {len(legend)} names for {len(all_logdirs)} folders")
    names: Sequence[str | None] = legend or [None] * len(all_logdirs)
    runs = [run for folder, name in zip(all_logdirs, names) for run in get_datasets(folder, name)]
    runs = list({run.folder.resolve(): run for run in runs}.values())
    chosen = [run for run in runs if all(word in str(run.folder) for word in select or [])]
    runs = [run for run in chosen if not any(word in str(run.folder) for word in exclude or [])]
    if not runs:
        raise UsageError("no run is left by --select and --exclude")
    smooth = None if smooth is None else whole_number("--smooth", smooth, 1)
    values = [values] if isinstance(values, str) else list(values or ["Performance"])
    x = SHORT.get(xaxis or "steps", xaxis or "")
    groups = grouped(runs, by_processes=x == "Time")
    if count:
        several = {name: members for name, members in groups.items() if len(members) > 1}
        groups |= {f"{name} {i}": [run] for name in several for i, run in enumerate(groups.pop(name), 1)}
    settings = STYLES[style][2]
    with framework("matplotlib").rc_context(settings | {"font.size": settings["font.size"] * font_scale / 1.5}):
        return _figure(groups, x, [SHORT.get(value, value) for value in values], smooth, estimator, style)


def _figure(
    groups: dict[str, list[Run]], x: str, values: list[str], smooth: int | None, estimator: str, style: str
) -> Any:
    envs = sorted({run.env for members in groups.values() for run in members})
    most = {name: max(Counter(run.env for run in members).values()) for name, members in groups.items()}
    labels = {name: name + f" ({n} runs)" * (n > 1) for name, n in most.items()}
    columns = 2 if len(envs) == 4 else min(len(envs), COLUMNS)
    rows = -(-len(envs) // columns)  # of each value's panels
    size = np.multiply(STYLES[style][:2][columns > 1], (columns, rows * len(values)))  # width, height
    figure = importlib.import_module("matplotlib.figure").Figure(size, layout="constrained")
    for k, value in enumerate(values):
        for place, env in enumerate(envs, k * rows * columns + 1):
            axes = figure.add_subplot(rows * len(values), columns, place)
            for i, (name, members) in enumerate(groups.items()):
                how = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "label": labels[name]}
                _draw(axes, [run.curve(x, value) for run in members if run.env == env], x, smooth, estimator, how)
            axes.set_title(", ".join(filter(None, [env, *(labels.values() if len(labels) == 1 else ())])))
            axes.set(xlabel=UNITS.get(x, x), ylabel=LABELS.get(value, value))
            if x != "Time":  # steps as 50k or 1M
                axes.xaxis.set_major_formatter(importlib.import_module("matplotlib.ticker").EngFormatter(sep=""))
            axes.yaxis.get_major_formatter().set_useOffset(False)
            axes.grid(alpha=0.3)
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    if len(groups) > 1 and lines:  # below all panels, where it covers nothing
        n = max(1, int(figure.get_figwidth() * 8 // max(map(len, lines))))
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=n, fontsize="small", frameon=False)
    return figure


def _draw(
    axes: Any, curves: list[tuple[np.ndarray, np.ndarray]], x: str, smooth: int | None, estimator: str, how: Any
) -> None:
    """The curve of a group. Args: how: of matplotlib's line."""
    scale = 3600.0 if x == "Time" else 1.0
    known = [(xs / scale, ys) for xs, ys in curves if len(xs)]
    if not known:
        return
    xs = np.unique(np.concatenate([xs for xs, _ in known]))
    smoothed = [(xs, moving_average(ys, smooth)) for xs, ys in known]
    ys = np.array([np.interp(xs, *curve, np.nan, np.nan) for curve in smoothed])  # NaN beyond a curve's ends
    middle, spread = getattr(np, f"nan{estimator}")(ys, axis=0), np.nanstd(ys, axis=0)
    axes.plot(xs, middle, marker="." * (len(xs) < 2), **how)
    if len(known) > 1:
        axes.fill_between(xs, middle - spread, middle + spread, color=how["color"], alpha=0.2, linewidth=0)
    elif smoothed[0][1] is not known[0][1]:
        axes.plot(*known[0], color=how["color"], alpha=0.25, linewidth=0.6)


def moving_average(ys: np.ndarray, smooth: int | None) -> np.ndarray:
    """Means of rows around each one, fewer at the ends. Args: smooth: as of `make_plots`; 1: `ys` itself."""
    n = len(ys) // ROWS_AVERAGED if smooth is None else min(smooth, len(ys))
    if n < 2:
        return ys
    return np.convolve(ys, np.ones(n), "same") / np.convolve(np.ones_like(ys), np.ones(n), "same")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="mpi_util_spinup.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("all_logdirs", nargs="+", metavar="RUN", help="folder of a run, or of several")
    parser.add_argument("--legend", "-l", nargs="*", metavar="NAME", help="a name for each RUN")
    parser.add_argument("--xaxis", "--x", "-x", help="steps (default), time, iteration, or a column")
    parser.add_argument("--values", "--value", "-y", nargs="*", metavar="COLUMN", help="return (default), or columns")
    parser.add_argument(
        "--smooth", "-s", type=int, metavar="N", help="moving average of N rows (default: a fortieth of them; 1: none)"
    )
    parser.add_argument("--count", action="store_true", help="a curve for each run, no mean")
    parser.add_argument("--est", dest="estimator", choices=("mean", "max", "min"), default="mean", help="of a group")
    parser.add_argument("--select", nargs="*", metavar="WORD", help="only runs whose path contains each WORD")
    parser.add_argument("--exclude", nargs="*", metavar="WORD", help="no runs whose path contains a WORD")
    parser.add_argument("--style", choices=STYLES, default="screen", help="paper: the size and the letters for a page")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), metavar="FILE", help="default: curves.png")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (see --help)\n")  # type: ignore[method-assign]
    args = vars(parser.parse_args(arguments))
    out: Path = args.pop("out")
    try:
        figure = make_plots(**args)
        kind = out.suffix[1:] or "png"
        if kind not in figure.canvas.get_supported_filetypes():
            raise UsageError(f"--out {out}: a picture ends in .png, .pdf or .svg")
        with framework("matplotlib").rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):  # text stays text
            replace_file(out, lambda file: figure.savefig(file, format=kind))
    except (UsageError, MissingFrameworkError, OSError) as error:
        parser.error(str(error))
    print(out)


if __name__ == "__main__":
    main()
