"""What a run is told of a return that stays flat."""

import math

import gymnasium as gym
import numpy as np
from conftest import ROOT

from trainer.advice import Standstill
from trainer.config import Config


def told(env, returns, total_steps=1_000_000):
    """(steps, text) of each advice of a run with a row every 30,000 steps."""
    watch = Standstill(Config(env=env, total_steps=total_steps))
    rows = ({"TotalEnvInteracts": 30_000 * i, "AverageEpRet": ret} for i, ret in enumerate(returns, 1))
    return [(row["TotalEnvInteracts"], text) for row in rows if (text := watch.after(row))]


def test_a_flat_return_is_told_once():
    assert not told("Env-v0", [10.0 * i for i in range(34)])
    ((steps, text),) = told("Hopper-v4", [20.0, 500.0] + [1000.0] * 32)
    assert steps == 300_000 and text.startswith(
        "the return has hardly risen for 150,000 steps: 1,000.0, before that 1,0"
    )
    assert "--seed" in text and "\n" not in text
    ((steps, _),) = told("Env-v0", [1.0] * 34, total_steps=None)
    assert steps == 510_000  # a run without an end has time


def test_a_solved_task_is_not_told():
    for env in ("CartPole-v1", "gymnasium:CartPole-v1"):
        assert not told(env, [20.0, 200.0] + [480.0] * 20)
    gym.register("OfCosts-v0", "module:Env", reward_threshold=0.0)
    assert not told("OfCosts-v0", [-100.0, -50.0] + [-0.5] * 20)
    assert not told("Env-v0", [1.0] + [math.nan] * 30)  # no episode has ended


def test_it_is_silent_in_the_runs_that_are_kept():
    """But for those that lost half of what they had, and for two tasks and a run that were flat or fell for long."""
    found = set()
    for path in sorted((ROOT / "benchmarks" / "results" / "learning").glob("PPO*.csv")):
        curves = np.loadtxt(path, delimiter=",", skiprows=2, ndmin=2)
        env = "-".join(path.stem.split("-")[-2:])
        for seed in np.unique(curves[:, 0]):
            returns = curves[curves[:, 0] == seed][:, 3]
            if told(env, returns) and returns[-1] > returns.max() / 2:
                found.add((env, int(seed)))
    found -= {("Hopper-v5", 20)}  # at 2000 from step 240,000 on
    assert {env.partition("-")[0] for env, _ in found} <= {"Swimmer", "InvertedDoublePendulum"}
