"""What a run is told, once each: which --nprocs or --overlap would be faster, and that it no longer learns.

All times are wall-clock times. Rollouts are shared by all processes; rank 0 updates on the whole machine, with
`overlap` while the others collect. More processes than cores help only where environments sleep, such as those that
wait for another machine.
"""

import contextlib
import math
import socket
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import gymnasium as gym
import numpy as np

import mpi_util
from trainer.config import Config

FIRST, LAST = 2, 6  # iterations that are measured; the first one warms up
WORTH = 0.2  # least gain to advise another way for, by the cautious estimate
REACHED = 0.75  # part of the ideal gain of sharing that the cautious estimate counts on
SLEEPS = 0.5  # an environment that sleeps gives up its core at least this often per step
PHASES = ("rollout", "gather", "update", "bcast")
# Chosen on the 87 kept curves of docs/learning.md: 10 are found flat, none of which reaches the published figure. Runs
# that learn well may rest for 250,000 of a million steps.
FLAT_SHARE, FLAT_STEPS, FLAT_STEPS_ENDLESS = 0.3, 150_000, 500_000  # least age, of the whole run; of one without an end
GROWTH = 0.05  # least rise, of what was learned before
SOLVED = 0.8  # of the way to the environment's reward threshold: from here on a flat return is no failure
CERTAIN = -2.0  # entropy of an action's component, nats: a deviation of 1/30 of half its range


@dataclass
class Measured:
    """Sums over the measured iterations, in seconds of wall-clock time unless stated otherwise."""

    n: int  # number of processes
    cores: int  # that the run may use
    pieces: int  # episodes or environments per iteration, which the processes share
    rollout: float = 0.0  # this and the other phases: on rank 0
    gather: float = 0.0
    update: float = 0.0
    bcast: float = 0.0
    busy: float = 0.0  # of rollouts, summed over the processes
    asleep: float = 0.0  # part of it neither on a core nor waiting for one
    sleeps: float = 0.0  # number of times that rollouts gave up their core voluntarily
    env_steps: float = 0.0  # their number

    @property
    def total(self) -> float:
        return self.rollout + self.gather + self.update + self.bcast

    @property
    def awake_share(self) -> float:
        """Share of the rollouts in which environments did not sleep; 1 if the host took the cores away instead."""
        slept = self.busy and self.sleeps >= SLEEPS * self.env_steps
        return max(1.0 - self.asleep / self.busy, 0.001) if slept else 1.0

    def speed(self, n: int) -> float:
        """Speed-up of the rollouts with `n` processes over one process with a core."""
        return min(n, self.cores / self.awake_share, self.pieces)


def estimate(seen: Measured, n: int, overlap: bool = False, reached: float = 1.0) -> float:
    """Seconds of the measured iterations with `n` processes. Args: reached: part of the ideal gain expected, 0 to 1."""

    def share(seconds: float, gain: float) -> float:
        return seconds / (1.0 + (gain - 1.0) * (reached if gain > 1.0 else 1.0))

    rollout = share(seen.rollout, seen.speed(n - overlap) / seen.speed(seen.n))
    both = rollout + seen.update
    if overlap:
        longest = max(rollout, seen.update, (seen.busy * seen.awake_share + seen.update) / seen.cores)
        both = share(both, both / longest)
    return both + seen.gather + seen.bcast


def advise(seen: Measured) -> str:
    """The advice, two lines. Never promises more than the advised processes can gain."""
    n, cores = seen.n, seen.cores
    powers = {n, *(2**k for k in range(7) if 2**k <= 2 * max(cores, n)), cores}
    counts = sorted(k for k in powers if k <= max(seen.pieces, n))
    ways = [(n, False), *((k, overlap) for overlap in (False, True) for k in counts if k > overlap)]
    times = {way: estimate(seen, *way, REACHED) for way in ways}
    k, overlap = choice = next(way for way in ways if times[way] <= (1.0 + WORTH) * min(times.values()))
    shares = ", ".join(f"{name} {getattr(seen, name) / seen.total:.0%}" for name in PHASES)
    text = f"time: {shares} of {seen.total / (LAST - FIRST + 1):.2f} s an iteration, "
    text += f"with {n} process{'es' * (n > 1)} on {cores} core{'s' * (cores > 1)}\n"
    if choice == (n, False):
        text += "no other --nprocs or --overlap is expected to be clearly faster here"
    else:
        most = k / n if not overlap and k > n else k * (1 + overlap)
        low, high = (min(seen.total / seconds, most) for seconds in (times[choice], estimate(seen, *choice)))
        text += f"--nprocs {k}{' --overlap' * overlap} is likely to be {low:.1f} to {high:.1f} x as fast"
        text += " (--overlap: other results, with a lag of one update)" * overlap
    rest = max(seen.total - seen.rollout, 1e-9)
    return f"{text}; if rollouts took no time, the run would be {seen.total / rest:.1f} x as fast"


def all_cores() -> int:
    """Collective: the number of cores that the ranks may use, on all hosts.

    Not by a gather to rank 0: after that rank 0 would act with all its cores, and other bits.
    """
    found = mpi_util.all_accum_batches([f"{socket.gethostname()} {mpi_util.usable_cores()}"])
    return sum(map(int, dict(text.split() for text in found).values()))


class Advice:
    """Adds up the phases of the first iterations, and then gives its advice once."""

    def __init__(self, config: Config, n: int, cores: int):
        self.seen = Measured(n, cores, config.num_envs if config.batch_steps else config.batch_size)
        # with --overlap phases hide each other; with --parallel average updates contain waiting
        self.measures, self.iteration = config.parallel == "gather" and not config.overlap, 0

    def after(self, **numbers: float) -> str:
        """Adds an iteration. Args: numbers: of it, by Measured's names. Returns: advice after the last one; else ""."""
        self.iteration += 1
        if not self.measures or not FIRST <= self.iteration <= LAST:
            return ""
        for name, number in numbers.items():
            setattr(self.seen, name, getattr(self.seen, name) + number)
        return advise(self.seen) if self.iteration == LAST else ""


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
