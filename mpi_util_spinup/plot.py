"""Spinning Up's plots: curves of runs, from the tables that their loggers wrote. A process of its own, without MPI.

    python -m mpi_util_spinup.plot data/ppo
    python -m mpi_util_spinup.plot data/ppo data/vpg --legend PPO VPG --value AverageEpRet KL --smooth 5 --out two.png
    python -m mpi_util_spinup.plot data/ppo --x time    # wall-clock hours instead of steps

A folder stands for all runs in it and below it. Runs that differ in the seed only are one curve, with mean and spread.
"""

import argparse
import functools
import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpi_util.arrays.adapters import framework
from mpi_util.errors import MissingFrameworkError, UsageError

from .files import read, replace_file

TABLE = "progress.txt"
SHORT = {"steps": "TotalEnvInteracts", "time": "Time", "iteration": "Iteration", "return": "Performance"}
LABELS = {"Performance": "return", "AverageEpRet": "return in training", "AverageTestEpRet": "return, evaluated"}
# settings that do not distinguish what a run learns; some hold paths, times or seeds
_OF_ONE_RUN = """seed run_dir resume commands versions logger_kwargs output_dir exp_name thunk hosts hostfile log_dir
tag_output nprocs num_cpu name watchdog_kill save_every total_steps num_episodes framework device"""
OF_ONE_RUN = frozenset(_OF_ONE_RUN.split())
WIDTH, HEIGHT, DPI = 7.0, 4.2, 120


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

    def curve(self, x: str, value: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
        """(x, value) of the rows that have this value. Args: smooth: rows in a moving average."""
        if missing := [name for name in (x, value) if name not in self.columns]:
            raise UsageError(f"{self.folder} has no column {missing[0]}; it has {', '.join(self.columns)}")
        known = ~np.isnan(self.columns[value])
        xs, ys = self.columns[x][known], self.columns[value][known]
        if smooth > 1 and len(ys):
            width = np.ones(smooth)
            ys = np.convolve(ys, width, "same") / np.convolve(np.ones_like(ys), width, "same")[: len(ys)]
        return xs, ys


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
    config |= {} if condition is None else {"exp_name": condition}
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


def grouped(runs: list[Run], by_processes: bool = False) -> dict[str, list[Run]]:
    """Runs by their entry in the legend. Args: by_processes: another number of processes is another group."""
    known = {key: {run.settings.get(key) for run in runs} for run in runs for key in run.settings}
    differ = [key for key, found in known.items() if len(found) > 1 and key not in ("env", "algo")]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        name = run.config.get("exp_name") or " ".join(str(run.config.get(key, "")) for key in ("env", "algo")).strip()
        words = [f"{key} {run.settings[key].strip(chr(34))}" for key in differ if key in run.settings]
        n_processes = run.config.get("nprocs") or run.config.get("num_cpu") or 1
        words += [f"{n_processes} processes"] * by_processes
        groups.setdefault(", ".join(filter(None, [name or run.folder.name, *words])), []).append(run)
    return groups


def make_plots(
    all_logdirs: Sequence[str | Path], legend: Sequence[str] | None = None, xaxis: str | None = None,
    values: str | Sequence[str] | None = None, count: bool = False, font_scale: float = 1.5, smooth: int = 1,
    select: Sequence[str] | None = None, exclude: Sequence[str] | None = None, estimator: str = "mean",
) -> Any:  # fmt: skip
    """Draws the runs of these folders. Returns: a matplotlib Figure, with a part for each value.

    Args:
        legend: a name for each folder; None: from the runs' config.json, in which equal settings are one curve.
        xaxis, values: columns; None: steps, and Performance: the evaluations' return, or without any the training's.
        count: each run has a curve of its own, instead of mean and standard deviation over a group's.
        font_scale: 1.5 is matplotlib's own size.
        smooth: rows in a moving average.
        select, exclude: only folders whose paths contain all words of `select`, and none of `exclude`.
        estimator: "mean", "max" or "min" of a group's runs.
    Raises UsageError: no runs, or a column is missing; MissingFrameworkError: no matplotlib.
    """
    if legend and len(legend) != len(all_logdirs):
        raise UsageError(f"--legend has {len(legend)} names for {len(all_logdirs)} folders")
    names: Sequence[str | None] = legend or [None] * len(all_logdirs)
    runs = [run for folder, name in zip(all_logdirs, names) for run in get_datasets(folder, name)]
    runs = list({run.folder.resolve(): run for run in runs}.values())
    runs = [run for run in runs if all(word in str(run.folder) for word in select or [])]
    runs = [run for run in runs if not any(word in str(run.folder) for word in exclude or [])]
    if not runs:
        raise UsageError("no run is left by --select and --exclude")
    values = [values] if isinstance(values, str) else list(values or ["Performance"])
    x = SHORT.get(xaxis or "steps", xaxis or "")
    matplotlib = framework("matplotlib")
    Figure = importlib.import_module("matplotlib.figure").Figure
    with matplotlib.rc_context({"font.size": 10 * font_scale / 1.5}):
        figure = Figure((WIDTH, HEIGHT * len(values)), DPI, layout="constrained")
        for axes, value in zip(figure.subplots(len(values), squeeze=False)[:, 0], values):
            _curves(axes, runs, x, SHORT.get(value, value), count, smooth, estimator)
    return figure


def _curves(axes: Any, runs: list[Run], x: str, value: str, count: bool, smooth: int, estimator: str) -> None:
    scale, unit = (3600.0, "hours") if x == "Time" else (1.0, {"TotalEnvInteracts": "environment steps"}.get(x, x))
    for name, members in grouped(runs, by_processes=x == "Time").items():
        curves = [run.curve(x, value, smooth) for run in members]
        for i, (xs, ys) in enumerate(curves if count else [], 1):
            axes.plot(xs / scale, ys, marker="." * (len(xs) < 2), label=f"{name} {i}" if len(curves) > 1 else name)
        known = [curve for curve in curves if len(curve[0])]
        if not count and known:
            xs = np.unique(np.concatenate([x for x, _ in known]))
            ys = np.array([np.interp(xs, *curve, np.nan, np.nan) for curve in known])  # NaN beyond a curve's ends
            seeds = f" ({len(curves)} runs)" * (len(curves) > 1)
            middle = getattr(np, f"nan{estimator}")(ys, axis=0)
            (line,) = axes.plot(xs / scale, middle, marker="." * (len(xs) < 2), label=name + seeds)
            if len(curves) > 1:
                spread = np.nanstd(ys, axis=0)
                axes.fill_between(xs / scale, middle - spread, middle + spread, color=line.get_color(), alpha=0.2, lw=0)
    axes.set(xlabel=unit, ylabel=LABELS.get(value, value))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 4))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="mpi_util_spinup.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logdir", nargs="+", metavar="RUN", help="folder of a run, or of several")
    parser.add_argument("--legend", "-l", nargs="*", metavar="NAME", help="a name for each RUN")
    parser.add_argument("--x", "--xaxis", "-x", dest="x", help="steps (default), time, iteration, or a column")
    parser.add_argument("--value", "-y", nargs="*", metavar="COLUMN", help="return (default), or columns")
    parser.add_argument("--smooth", "-s", type=int, default=1, metavar="N", help="moving average of N rows")
    parser.add_argument("--count", action="store_true", help="a curve for each run, no mean")
    parser.add_argument("--est", choices=("mean", "max", "min"), default="mean", help="of the runs of a group")
    parser.add_argument("--select", nargs="*", metavar="WORD", help="only runs whose path contains each WORD")
    parser.add_argument("--exclude", nargs="*", metavar="WORD", help="no runs whose path contains a WORD")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), metavar="FILE", help="default: curves.png")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (see --help)\n")  # type: ignore[method-assign]
    args = parser.parse_args(arguments)
    try:
        if args.smooth < 1:
            raise UsageError(f"--smooth is {args.smooth}; it must be 1 or more")
        chosen = args.legend, args.x, args.value, args.count, 1.5, args.smooth, args.select, args.exclude, args.est
        figure = make_plots(args.logdir, *chosen)
        kind = args.out.suffix[1:] or "png"
        if kind not in figure.canvas.get_supported_filetypes():
            raise UsageError(f"--out {args.out}: a picture ends in .png, .pdf or .svg")
        replace_file(args.out, lambda file: figure.savefig(file, format=kind))
    except (UsageError, MissingFrameworkError, OSError) as error:
        parser.error(str(error))
    print(args.out)


if __name__ == "__main__":
    main()
