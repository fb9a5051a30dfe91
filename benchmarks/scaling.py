"""An iteration on 10 to 10,000 ranks, simulated from what other benchmarks have measured, for docs/scaling.md.

    python -m benchmarks.scaling            # writes the tables into docs/scaling.md
    python -m benchmarks.scaling --check    # status 1 if the tables there are not the results'

Episodes are dealt to whichever rank is free, as `deal` does; gather and broadcast are limited by the network link of
rank 0's machine, the update by rank 0. What an agreement costs is the law that benchmarks.machines has fitted.
"""

import argparse
import heapq
import json
import sys
from typing import NamedTuple

import numpy as np

from benchmarks import record

DOCUMENT = record.ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- results: made by benchmarks/scaling.py -->\n", "<!-- end of results -->"

RANKS = (1, 10, 100, 1_000, 10_000)
RANKS_PER_MACHINE = 64
STEPS_S = {"10 us": 10e-6, "200 us": 200e-6, "5 ms": 5e-3}  # of the environment alone
LINK_BYTES_S = 1.2e9  # assumed: 10 Gbit/s
MEMORY_BYTES_S = 8e9  # one rank's copies
ROW_BYTES = 4 * (376 + 17 + 6)  # Humanoid-v4: obs, act, and six numbers of a step
WEIGHTS_BYTES = 250_000  # of its policy of two layers of 64
CALLS = 2  # agreements in an iteration: gather, broadcast
HOP_S = 100e-6  # a message between two machines, and a wake-up there
EPISODES = {"200 episodes": lambda n: 200, "10 episodes for each rank": lambda n: 10 * n}
WORTH = 1.5  # times as fast, of twice as many ranks


class Costs(NamedTuple):
    """What was measured on this project's machine.

    Attributes:
        row_s: of the update, with rank 0's cores. act_s: a step of a rollout beside that of the environment.
        law_ms: of rank 0 in an agreement: for the call, for each other rank of its machine, other leader, rank.
    """

    row_s: float
    act_s: float
    law_ms: dict[str, float]


class Iteration(NamedTuple):
    """Seconds of each phase."""

    rollout: float
    agree: float
    gather: float
    update: float
    bcast: float


def main() -> int:
    """Writes the document, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    before, after = DOCUMENT.read_text(), document()
    if args.check:
        return int(before != after)
    DOCUMENT.write_text(after)
    return 0


def document() -> str:
    """docs/scaling.md with the tables of the results there are."""
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    return head + BEGIN + tables(measured()) + END + rest.partition(END)[2]


def measured() -> Costs:
    """From the files of benchmarks/results."""
    update, rollout, machines = (
        json.loads((record.ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        for name in ("update", "rollout", "machines")
    )
    one = rollout["samples"]["mpich, 1 ranks"]["steps_per_s"]
    act_s = 1 / one["rollout"]["median"] - 1 / one["bare"]["median"]
    return Costs(update["samples"]["numpy: wall-clock time"]["median"] / 4000, act_s, machines["law_ms"])


def tables(costs: Costs) -> str:
    """Markdown: the law, and a table for each size of a batch."""
    law = costs.law_ms
    text = (
        f"Rank 0's processor time in an agreement, in ms: {law['all']:.3f} + {law['member']:.4f} x (other ranks of its "
        f"machine) + {law['leader']:.4f} x (other leaders) + {law['rank']:.6f} x (ranks). Update: "
        f"{costs.row_s * 1e6:.0f} us a row. A step beside the environment's own: {costs.act_s * 1e6:.0f} us.\n"
    )
    for batch, episodes in EPISODES.items():
        text += f"\nA batch of {batch}, on average {mean_length():.0f} steps long:\n\n"
        columns = ("a step", "ranks", *(f"{phase} s" for phase in Iteration._fields), "iteration s", "x 1 rank")
        text += f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
        for name, step_s in STEPS_S.items():
            found = {n: simulate(n, episodes(n), step_s, costs) for n in RANKS}
            for n, phases in found.items():
                gain = sum(found[1]) / sum(phases) * episodes(n) / episodes(1)
                shown = " | ".join(f"{each:.3g}" for each in (*phases, sum(phases)))
                text += f"| {name} | {n:,} | {shown} | {gain:.3g} |\n"
        limits = ", ".join(f"{limit(episodes, step_s, costs):,} ({name})" for name, step_s in STEPS_S.items())
        text += f"\nTwice as many ranks make it at least {WORTH} times as fast up to this number of ranks: {limits}.\n"
    return text


def limit(episodes, step_s: float, costs: Costs) -> int:
    """The largest power of 2 to which doubling the ranks still gains `WORTH`."""
    n, rate = 1, 0.0
    while n <= RANKS[-1]:
        now = episodes(n) / sum(simulate(n, episodes(n), step_s, costs))
        if now < WORTH * rate:
            return n // 2
        n, rate = 2 * n, now
    return n // 2


def lengths(n: int) -> np.ndarray:
    """Steps of `n` episodes: from 20 to 1000, most of them short."""
    return np.clip(np.random.default_rng(0).lognormal(5.0, 0.9, n), 20, 1000).astype(int)


def mean_length() -> float:
    """Of many episodes."""
    return float(lengths(100_000).mean())


def simulate(n: int, episodes: int, step_s: float, costs: Costs) -> Iteration:
    """One iteration of `n` ranks."""
    steps = lengths(episodes)
    machines = -(-n // RANKS_PER_MACHINE)
    rows = int(steps.sum())
    elsewhere = rows * max(0, n - RANKS_PER_MACHINE) / n
    law = costs.law_ms
    sent = min(n, RANKS_PER_MACHINE) - 1, machines - 1, n
    agree_ms = law["all"] + sum(law[name] * count for name, count in zip(("member", "leader", "rank"), sent))
    return Iteration(
        rollout=last_done(steps * (step_s + costs.act_s), n),
        agree=0.0 if n == 1 else CALLS * (agree_ms * 1e-3 + 2 * (machines > 1) * HOP_S),
        gather=ROW_BYTES * (elsewhere / LINK_BYTES_S + rows / n / MEMORY_BYTES_S),
        update=rows * costs.row_s,
        bcast=(machines - 1) * (HOP_S + WEIGHTS_BYTES / LINK_BYTES_S),
    )


def last_done(seconds: np.ndarray, n: int) -> float:
    """When the last of `n` ranks is done, each of which takes the next episode as soon as it is free."""
    free = [0.0] * min(n, len(seconds))
    for each in seconds:
        heapq.heapreplace(free, free[0] + float(each))
    return max(free)


if __name__ == "__main__":
    sys.exit(main())
