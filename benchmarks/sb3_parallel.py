"""parallel(PPO) on N ranks against plain Stable-Baselines3 with SubprocVecEnv, the same work on both sides, in turn.

    python -m benchmarks.sb3_parallel

An iteration on Humanoid-v4: 4000 steps, 10 epochs of 32 minibatches of 125 rows, 2x64 tanh networks, VecNormalize.
Steps per second over whole iterations, the first two left out. Ranks and workers have an environment each. Plain SB3
runs with each of --threads torch threads; parallel(PPO) untouched (a thread for each rank, all cores for rank 0's
update) and with OMP_NUM_THREADS=1 (one for the update too). The best of each side are compared.
"""

import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import mpi_util
from benchmarks import record
from benchmarks.end_to_end import run_other

ENV = "Humanoid-v4"
STEPS, ROWS, SKIP = 4000, 125, 2


def main() -> None:
    """Takes every alternative in turn and saves what they measured."""
    parser = record.command_line(__doc__, repeats=3, ranks="1,2,10")
    parser.add_argument("--threads", type=record.numbers, default=[1, 2], help="torch threads of SB3 (default: 1,2)")
    parser.add_argument("--iterations", type=int, default=8, help="of each run (default: 8)")
    args = parser.parse_args()
    if args.part:
        measure(args.part, args.ranks[0], args.threads[0], args.iterations)
        return

    def ours(n: int, threads: int) -> dict:
        limits = ("--ranks", n, "--threads", threads, "--iterations", args.iterations)
        return record.run_part("benchmarks.sb3_parallel", args.mpi[0], *limits)

    def plain(n: int, threads: int) -> dict:
        settings = {"env": ENV, "workers": n, "envs": n, "threads": threads, "iterations": args.iterations}
        return run_other(Path(sys.executable), "sb3_ppo", settings)

    alternatives = {}
    for n in args.ranks:
        alternatives[f"parallel, {n} ranks"] = partial(ours, n, 0)
        alternatives[f"parallel, {n} ranks, OMP_NUM_THREADS=1"] = partial(ours, n, 1)
        for threads in args.threads:
            alternatives[f"SB3, {n} workers, {threads} torch threads"] = partial(plain, n, threads)
    samples = record.in_turn(alternatives, args.repeats)
    found = {name: record.spread([run["steps_per_s"] for run in runs]) for name, runs in samples.items()}
    phases = {
        name: {part: record.spread([run["phases"][part] for run in runs]) for part in runs[0]["phases"]}
        for name, runs in samples.items()
        if name.startswith("parallel")
    }
    claims = [compare(found, n, at_least) for n, at_least in ((2, 1.8), (10, 1.0)) if n in args.ranks]
    versions = next(runs[0]["versions"] for name, runs in samples.items() if name.startswith("SB3"))
    record.save(
        args, found, claims, unit="environment steps per second", seconds_of_an_iteration=phases, sb3_versions=versions
    )


def compare(found: dict, n: int, at_least: float) -> dict:
    """The claim on the best of both sides with n ranks or workers."""
    best = [
        max((name for name in found if name.startswith(f"{side}, {n} ")), key=lambda name: found[name]["median"])
        for side in ("parallel", "SB3")
    ]
    ratio = found[best[0]]["median"] / found[best[1]]["median"]
    return record.claim(f"PPO on {ENV}: rate of {best[0]} / {best[1]}", ratio, at_least=at_least)


def measure(out: Path, ranks: int, threads: int, iterations: int) -> None:
    """Becomes the ranks, trains, and writes rank 0's rate and the seconds of each part of an iteration."""
    warnings.simplefilter("ignore")
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if mpi_util.mpi_fork(ranks) == "parent":
        return
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    from benchmarks.sb3_ppo import Clock, normalised, settings
    from mpi_util_sb3 import parallel

    class Phases(Clock):
        """When the steps of rank 0, the gather and the update of each iteration ended."""

        def __init__(self):
            super().__init__()
            self.steps: list[float] = []
            self.gathered: list[float] = []

        def _on_step(self) -> bool:
            self.last = time.perf_counter()
            return True

        def _on_rollout_end(self) -> None:
            self.steps.append(self.last)
            self.gathered.append(time.perf_counter())

    def environment() -> object:
        return normalised(DummyVecEnv([lambda: gym.make(ENV, disable_env_checker=True)]))

    model, clock = parallel(PPO)(env=environment, n_steps=STEPS, **settings(ROWS)), Phases()
    model.learn(STEPS * iterations, callback=clock)
    if mpi_util.rank == 0:
        marks = zip(clock.at[SKIP:], clock.steps[SKIP:], clock.gathered[SKIP:], clock.at[SKIP + 1 :])
        parts = [(steps - start, gathered - steps, end - gathered) for start, steps, gathered, end in marks]
        means = [sum(column) / len(parts) for column in zip(*parts)]
        rate = STEPS * (iterations - SKIP) / (clock.at[-1] - clock.at[SKIP])
        record.write_part(out, {"steps_per_s": rate, "phases": dict(zip(("steps", "gather", "update"), means))})


if __name__ == "__main__":
    main()
