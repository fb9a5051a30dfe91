"""What a run is told once: that it no longer learns."""

import contextlib
import math
from bisect import bisect_right
from collections.abc import Mapping

import gymnasium as gym
import numpy as np

from trainer.config import Config

# Chosen on the 87 kept curves of docs/learning.md: 10 are found flat, none of which reaches the published figure. Runs
# that learn well may rest for 250,000 of a million steps.
FLAT_SHARE, FLAT_STEPS, FLAT_STEPS_ENDLESS = 0.3, 150_000, 500_000  # least age, of the whole run; of one without an end
GROWTH = 0.05  # least rise, of what was learned before
SOLVED = 0.8  # of the way to the environment's reward threshold: from here on a flat return is no failure
CERTAIN = -2.0  # entropy of an action's component, nats: a deviation of 1/30 of half its range


class Standstill:
    """Says once that the return does not rise any more: over the second half of the steps against the quarter before.

    Args: components: of an action; 0: it is a choice.
    """

    def __init__(self, config: Config, components: int):
        self.limit, self.threshold, self.components = math.inf, math.inf, components
        with contextlib.suppress(gym.error.Error, ImportError):  # it may have no entry
            of_env = gym.spec(config.env)
            self.limit = of_env.max_episode_steps or math.inf  # steps of an episode
            self.threshold = math.inf if of_env.reward_threshold is None else of_env.reward_threshold
        total = config.total_steps
        self._least = max(FLAT_SHARE * total, FLAT_STEPS) if total else FLAT_STEPS_ENDLESS
        self._steps, self._sums = [0.0], [np.zeros(3)]  # in rows so far: episodes, sums of their returns and lengths
        self.said = False

    def after(self, row: Mapping[str, float]) -> str:
        """Adds a row of progress.txt. Returns: the advice, one line; else ""."""
        steps, new = row["TotalEnvInteracts"], row["Episodes"] - self._sums[-1][0]
        if new:
            self._steps.append(steps)
            self._sums.append(self._sums[-1] + new * np.array([1.0, row["AverageEpRet"], row["EpLen"]]))
        if self.said or steps < self._least:
            return ""
        quarter, half, end = (self._sums[bisect_right(self._steps, at) - 1] for at in (steps / 4, steps / 2, steps))
        spans = (self._sums[0], self._sums[:2][-1]), (quarter, half), (half, end)
        with np.errstate(all="ignore"):  # nan where no episode has ended
            (_, first, first_length), (_, before, _), (_, now, length) = ((b - a) / (b - a)[0] for a, b in spans)
        solved = now > first + SOLVED * (self.threshold - first)
        if solved or not now - before <= GROWTH * abs(before - first):
            return ""
        self.said = True
        text = f"the return has been flat for {steps / 2:,.0f} steps: {now:,.1f}, before that {before:,.1f}; "
        if length > 0.9 * self.limit and first_length < 0.5 * self.limit:
            return text + "episodes last to their time limit: it may have learned to stand; try another --seed"
        if row["Entropy"] < (CERTAIN * self.components or 0.02):
            return text + "its actions hardly vary any more; try --ent_coef 0.01, or another --seed"
        return text + "try another --seed, --gamma 0.999 if rewards come late, --ent_coef 0.01 if it tries too little"
