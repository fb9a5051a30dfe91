"""How much of `collect(steps=...)` is played in vain or waited for, and what `collect` costs beside the same by hand.

    python -m benchmarks.collect

Episodes of three kinds of length, each step of which sleeps 50 us: all 1000 steps, as HalfCheetah's; 50 to 1000, most
of them short, as Hopper's; exponential. An iteration gathers at least 20000 steps. Unneeded: episodes that were begun,
but that no batch got, for each iteration and rank. Waited: the part of the ranks' time in which they did not play. The
first iteration counts in neither, as it is the only one without a guess.

What an episode costs more than with `deal`, `rank0_bcast_wts` and `rank0_accum_batches`, which seed nothing: 40 of 100
rows, which take no time to play.
"""

import time
from functools import partial

import numpy as np

import mpi_util
from benchmarks import record

STEP_S = 50e-6
STEPS = 20_000
LENGTHS = {
    "equal": lambda rng: 1000,
    "varied": lambda rng: 50 + int(950 * rng.beta(0.6, 1.8)),
    "exponential": lambda rng: 1 + int(rng.exponential(300)),
}
ROWS = {"obs": np.zeros((100, 17), np.float32), "act": np.zeros((100, 6), np.float32), "rew": np.zeros(100)}
EPISODES = 40


def main() -> None:
    """Starts a job for each number of ranks, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=5, ranks="1,2,3,5,10")
    parser.add_argument("--n", type=int, help="ranks of the part")
    args = parser.parse_args()
    if args.part:
        measure(args)
        return
    parts = {
        n: record.run_part("benchmarks.collect", args.mpi[0], "--repeats", args.repeats, "--n", n) for n in args.ranks
    }
    claims = []
    for n, (found, seconds) in parts.items():
        more_us = (min(seconds["collect"]) - min(seconds["by hand"])) / EPISODES * 1e6
        claims.append(
            record.claim(f"us of an episode that collect takes more than by hand, {n} ranks", more_us, at_most=1000)
        )
        for kind, row in found.items():
            text = f"unneeded episodes per iteration and rank, {kind} lengths, {n} ranks"
            claims.append(record.claim(text, row["unneeded"] / n, at_most=1.0))
    samples = {
        str(n): found | {name: record.spread(of_name) for name, of_name in seconds.items()}
        for n, (found, seconds) in parts.items()
    }
    record.save(args, samples, claims, unit="seconds of an iteration; episodes of an iteration, all ranks together")


def measure(args) -> None:
    """Of one number of ranks: what was unneeded and waited for, by kind, and the seconds of `collect` and by hand."""
    if mpi_util.mpi_fork(args.n) == "parent":
        return
    found = {kind: of_kind(kind, args.repeats) for kind in LENGTHS}
    weights = np.zeros(50_000)
    calls = {"collect": partial(with_collect, weights), "by hand": partial(by_hand, weights)}
    seconds = record.in_turn({name: partial(clock, call) for name, call in calls.items()}, 10 * args.repeats, warmup=3)
    if mpi_util.rank == 0:
        record.write_part(args.part, [found, seconds])


def of_kind(kind: str, repeats: int) -> dict[str, float]:
    """Collective: figures of an iteration, the mean of `repeats`."""
    played_s = 0.0

    def play(rng: np.random.Generator) -> dict[str, np.ndarray]:
        nonlocal played_s
        start, n = time.perf_counter(), LENGTHS[kind](rng)
        time.sleep(n * STEP_S)
        played_s += time.perf_counter() - start
        return {"rew": np.zeros(n)}

    mpi_util.collect(play, steps=STEPS, seed=1, phase=f"rollout {kind}")
    before, played_s, start = mpi_util.collected, 0.0, time.perf_counter()
    for _ in range(repeats):
        mpi_util.collect(play, steps=STEPS, seed=1)
    wall_s = (time.perf_counter() - start) / repeats
    used, steps, unneeded, unneeded_steps = (np.subtract(mpi_util.collected, before) / repeats).tolist()
    waited = 1 - mpi_util.all_sum(played_s) / mpi_util.nworkers / repeats / wall_s
    row = dict(episodes=used, steps=steps, unneeded=unneeded, unneeded_steps=unneeded_steps)
    return {**row, "iteration_s": wall_s, "waited": waited, "of_ideal": steps * STEP_S / mpi_util.nworkers / wall_s}


def with_collect(weights: np.ndarray) -> None:
    """One call of `collect`."""
    mpi_util.collect(lambda rng: ROWS, episodes=EPISODES, weights=[weights], seed=1, phase="cost")


def by_hand(weights: np.ndarray) -> None:
    """What `collect` does, without seeds and random states."""
    mpi_util.rank0_bcast_wts([weights])
    numbers = mpi_util.deal(EPISODES)
    rows = [ROWS for _ in numbers]
    mpi_util.rank0_accum_batches(rows, index=numbers.taken)


def clock(call) -> float:
    """Seconds of a collective call, from when all ranks are ready."""
    mpi_util.all_sum(0)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
