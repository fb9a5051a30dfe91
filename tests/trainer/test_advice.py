"""What a run is told of a return that stays flat."""

import math

import numpy as np
from conftest import ROOT

from trainer.advice import Standstill
from trainer.config import Config


def rows(returns, every=30_000, length=1000.0, entropy=3.0):
    """Of progress.txt: ten episodes each."""
    for i, ret in enumerate(returns, 1):
        yield {"TotalEnvInteracts": i * every, "Episodes": 10 * i, "AverageEpRet": ret, "EpLen": length} | {
            "Entropy": entropy
        }


def told(env, rows, components=3, total_steps=1_000_000):
    """(steps, text) of each advice of a run."""
    watch = Standstill(Config(env=env, total_steps=total_steps), components)
    return [(row["TotalEnvInteracts"], text) for row in rows if (text := watch.after(row))]


def test_a_flat_return_is_told_once():
    rising = [10.0 * i for i in range(34)]
    assert not told("Env-v0", rows(rising))
    ((steps, text),) = told("Env-v0", rows([10.0, 40.0] + [60.0] * 32))
    assert steps == 300_000 and text.startswith("the return has been flat for 150,000 steps: 60.0, before that 60.0; ")
    assert "--gamma 0.999" in text and "\n" not in text
    ((_, text),) = told("Env-v0", rows([10.0, 40.0] + [60.0] * 31, entropy=-6.1))
    assert "its actions hardly vary" in text
    ((steps, _),) = told("Env-v0", rows([1.0] * 34), total_steps=None)
    assert steps == 510_000  # a run without an end has time


def test_standing_still_is_told_and_a_solved_task_is_not():
    falls = list(rows([20.0, 500.0] + [1000.0] * 20))
    falls[0]["EpLen"] = 20.0
    ((_, text),) = told("Hopper-v4", falls)
    assert "it may have learned to stand" in text
    assert not told("CartPole-v1", rows([20.0, 200.0] + [480.0] * 20, length=480.0), 0)
    nothing_ended = [row | {"Episodes": 10, "AverageEpRet": row["AverageEpRet"] if i == 0 else math.nan}
                     for i, row in enumerate(rows([1.0] * 30))]  # fmt: skip
    assert not told("Env-v0", nothing_ended)


def test_it_is_silent_in_the_runs_that_are_kept():
    """But for those of two tasks, which ended below what was published or recovered from a fall after long."""
    found = set()
    for path in sorted((ROOT / "benchmarks" / "results" / "learning").glob("PPO*.csv")):
        curves = np.loadtxt(path, delimiter=",", skiprows=2, ndmin=2)
        env = "-".join(path.stem.split("-")[-2:])
        for seed in np.unique(curves[:, 0]):
            at = curves[(curves[:, 0] == seed) & ~np.isnan(curves[:, 3])]
            names = ("TotalEnvInteracts", "AverageEpRet", "Episodes", "EpLen", "Entropy")
            values = zip(at[:, 1], at[:, 3], at[:, 4].cumsum(), 0 * at[:, 0], 0 * at[:, 0])
            if told(env, (dict(zip(names, row)) for row in values)):
                found.add(env)
    assert found <= {"Swimmer-v4", "InvertedDoublePendulum-v4"}
