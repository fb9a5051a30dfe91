"""The curves of benchmarks.learning's runs, as files, and what they come to.

Two curves of each run: the mean return of 10 episodes with deterministic actions, every 30,000 steps; and the mean
return of the training episodes, with sampled actions, that have ended since the evaluation before.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import record
from benchmarks.learning_tasks import EVAL_EVERY, GROUPS, RANDOM, Task

COLUMNS = ("seed", "steps", "evaluation", "training", "episodes", "seconds")
SEED, STEPS, EVALUATION, TRAINING, EPISODES, SECONDS = range(len(COLUMNS))
CURVES = {"evaluation": EVALUATION, "training": TRAINING}
LAST = 0.1  # of the training
RESAMPLES = 50_000  # rliable's number


def is_complete(folder: Path, steps: int) -> bool:
    """Whether the folder holds a run to its end, the evaluation there included."""
    rows = record.progress(folder)
    return (
        bool(rows)
        and rows[-1]["TotalEnvInteracts"] >= steps
        and not math.isnan(rows[-1].get("AverageTestEpRet", math.nan))
    )


def curves_of(rows: list[dict[str, float]], seed: int) -> np.ndarray:
    """A run's curves, (evaluations, COLUMNS). Args: rows: of its progress.txt."""
    found, returns, counts, before = [], [], [], 0.0
    for row in rows:
        new, before = row["Episodes"] - before, row["Episodes"]
        if new:
            returns.append(row["AverageEpRet"])
            counts.append(new)
        if not math.isnan(row["AverageTestEpRet"]):
            mean = np.average(returns, weights=counts) if counts else math.nan
            found.append([seed, row["TotalEnvInteracts"], row["AverageTestEpRet"], mean, sum(counts), row["Time"]])
            returns, counts = [], []
    return np.array(found)


def write(path: Path, command: str, curves: dict[int, np.ndarray]) -> None:
    """Saves the curves of a task's runs, by seed. Args: command: of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.concatenate([curves[seed] for seed in sorted(curves)])
    header = f"# {command}\n{','.join(COLUMNS)}"
    np.savetxt(path, rows, "%.10g", ",", header=header, comments="")


def read(path: Path, command: str) -> dict[int, np.ndarray]:
    """The curves that `write` saved, by seed; none if they are of another command."""
    if not path.exists() or path.read_text().partition("\n")[0] != f"# {command}":
        return {}
    rows = np.loadtxt(path, delimiter=",", skiprows=2, ndmin=2)
    return {int(seed): rows[rows[:, SEED] == seed] for seed in np.unique(rows[:, SEED])}


def mean_curve(curves: dict[int, np.ndarray], column: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the returns of all seeds at them, (seeds, steps).

    Runs in segments are evaluated at the same steps. Iterations of whole episodes end at others: those are interpolated
    between, at multiples of the evaluations' distance.
    """
    runs = list(curves.values())
    steps = runs[0][:, STEPS]
    if any(not np.array_equal(run[:, STEPS], steps) for run in runs):
        end = min(run[-1, STEPS] for run in runs)
        every = min(EVAL_EVERY, end // 2)
        steps = np.arange(every, end + 1, every)
    return steps, np.array([np.interp(steps, run[:, STEPS], run[:, column]) for run in runs])


def last_part(curve: np.ndarray, column: int, steps: int) -> float:
    """Mean return over the last tenth of a run; nan: no episode ended in it. Args: steps: of the whole run."""
    rows = curve[(curve[:, STEPS] > (1 - LAST) * steps) & ~np.isnan(curve[:, column])]
    weights = rows[:, EPISODES] if column == TRAINING else None
    return float(np.average(rows[:, column], weights=weights)) if len(rows) else np.nan


def interquartile_mean(*scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean of the middle half of all tasks' scores together, as in rliable (arXiv:2108.13264).

    Args:
        scores: of each task, by run.
    """
    return stats.trim_mean(np.concatenate(scores, axis=axis), 0.25, axis=axis)


def interval(scores: list[np.ndarray]) -> list[float] | None:
    """95 % interval of `interquartile_mean`: percentiles of a bootstrap that draws each task's runs among themselves.

    Returns:
        [low, high]; None where a task has one run.
    """
    if min(map(len, scores)) < 2:
        return None
    rng = np.random.default_rng(0)
    result = stats.bootstrap(
        scores, interquartile_mean, n_resamples=RESAMPLES, batch=1000, method="percentile", vectorized=True, rng=rng
    )
    return [float(bound) for bound in result.confidence_interval]


def statistics_of(curves: dict[int, np.ndarray], column: int, steps: int) -> dict[str, Any] | None:
    """What the result's file says of one kind of curve of a task.

    Args:
        steps: of each run.

    Returns:
        None where the runs are so short that a curve is undefined at its end: no episode has ended there.
    """
    if any(np.isnan(curve[-1, column]) for curve in curves.values()):
        return None
    at, returns = mean_curve(curves, column)
    mean = returns.mean(axis=0)
    best = int(np.nanargmax(mean))
    last = [last_part(curve, column, steps) for curve in curves.values()]
    return {
        "peak": float(mean[best]),
        "peak_at_steps": int(at[best]),
        "last_by_seed": last,
        "last": record.spread(last) | {"mean": float(np.mean(last))},
        "iqm": float(interquartile_mean(np.array(last))),
        "interval": interval([np.array(last)]),
    }


def describe(task: Task, curves: dict[int, np.ndarray]) -> dict[str, Any]:
    """What the result's file says of a task."""
    found = {
        "command": f"python {task.command} --seed {task.seeds[0]}",
        "settings": task.settings,
        "published": [list(figure) for figure in task.published],
        "seeds": sorted(curves),
        "hours_by_seed": [round(float(curve[-1, SECONDS]) / 3600, 3) for curve in curves.values()],
    }
    return found | {name: statistics_of(curves, column, task.steps) for name, column in CURVES.items() if curves}


def describe_group(found: dict[str, dict[str, Any]], group: str) -> dict[str, Any] | None:
    """Over the tasks of a group that have runs: interquartile mean of their scores, 0: random actions, 1: published.

    Args:
        found: of `describe`, by task.

    Returns:
        None where fewer than two tasks have runs and figures.
    """
    samples = {env: found.get(f"{group}/{env}", {}) for env in GROUPS[group].published}
    ran = {env: sample for env, sample in samples.items() if sample.get("seeds") and sample["published"]}
    if len(ran) < 2:
        return None
    result: dict[str, Any] = {"tasks": len(ran)}
    for name in CURVES:
        if any(sample[name] is None for sample in ran.values()):
            return None
        scores = [
            (np.array(sample[name]["last_by_seed"]) - RANDOM[env]) / (sample["published"][0][0] - RANDOM[env])
            for env, sample in ran.items()
        ]
        result[name] = {"iqm": float(interquartile_mean(*scores)), "interval": interval(scores)}
    return result
