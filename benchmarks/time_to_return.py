"""Wall-clock time to a mean return of 1000, 2500 and 5000 on Humanoid-v4: train.py and its peers.

    python -m benchmarks.time_to_return --sb3_python ../sb3/bin/python --envpool_python ../envpool/bin/python

train.py with its default settings; Stable-Baselines3 with rl-baselines3-zoo's settings (sb3_humanoid.py); a single-file
PPO on EnvPool (envpool_humanoid.py). One run at a time has the whole machine, train.py with --ranks processes. A return
is the mean over the last 100 training episodes, as SB3 prints it. A run ends when it reaches the highest return, or
after --steps; the next begins with the next seed only when all have made this one.

Ctrl-C or SIGTERM stops, and the program continues where it was, also after kill -9: benchmarks.learning says more. Time
is that of the training, over all starts; --hours 0 makes no run, and writes the results of those there are.
"""

import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import record
from benchmarks.background import Job, locked, run_all, say
from benchmarks.learning_tasks import FIRST_SEED, M
from trainer.run_folder import checkpoints

ENV = "Humanoid-v4"
EPISODES = 100  # that a return is the mean of
OURS = "train.py, default settings"
SB3, ENVPOOL = "Stable-Baselines3, settings of rl-baselines3-zoo", "PPO on EnvPool"


def main() -> int:
    """Makes the runs that are missing, and saves when each reached which return. Returns the exit status."""
    parser = record.command_line(__doc__, repeats=3, ranks="2")
    parser.add_argument("--sb3_python", type=Path, help="interpreter that has stable-baselines3; none: without it")
    parser.add_argument("--envpool_python", type=Path, help="interpreter that has envpool and torch; none: without it")
    parser.add_argument("--returns", type=record.numbers, default=[1000, 2500, 5000], help="to reach: 1000,2500,5000")
    parser.add_argument("--steps", type=int, default=10 * M, help="of a run at most (default: 10,000,000)")
    parser.add_argument("--hours", type=float, help="after so many hours no run begins (default: no limit)")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/ in that of the result's file)")
    args = parser.parse_args()
    folder = (args.runs or args.results / "runs").resolve() / "time_to_return"
    commands = alternatives(args)
    jobs, folders = [], {name: [] for name in commands}
    for seed in range(FIRST_SEED, FIRST_SEED + args.repeats):
        for name, command in commands.items():
            path = folder / re.sub(r"\W+", "-", name) / f"seed{seed}"
            folders[name].append(path)
            finished = partial(is_finished, path, args)
            if not finished():
                environment = record.mpi_environment(args.mpi[0])
                jobs.append(Job(f"{name}, seed {seed}", path, partial(command, path, seed), finished, environment))
    with locked(folder) as lock:
        outcome = run_all(jobs, 1, args.hours, lock)
    save(args, folders)
    if outcome.failed:
        say(f"failed: {', '.join(outcome.failed)}; start this program again to continue them")
    return 128 + outcome.stopped if outcome.stopped else int(bool(outcome.failed))


def alternatives(args) -> dict[str, Callable[[Path, int], list[str]]]:
    """By name: the command that begins or continues a run in a folder with a seed."""

    def ours(folder: Path, seed: int) -> list[str]:
        new = [ENV, "--total_steps", str(args.steps), "--seed", str(seed), "--run_dir", str(folder)]
        how = ["--resume", str(folder)] if checkpoints(folder) else new
        return [sys.executable, str(record.ROOT / "train.py"), *how, "--nprocs", str(args.ranks[0])]

    def peer(python: Path, program: str, folder: Path, seed: int) -> list[str]:
        path = Path(__file__).with_name(program)
        return [str(python), str(path), "--folder", str(folder), "--seed", str(seed), "--steps", str(args.steps)]

    found: dict[str, Callable[[Path, int], list[str]]] = {OURS: ours}
    if args.sb3_python:
        found[SB3] = partial(peer, args.sb3_python, "sb3_humanoid.py")
    if args.envpool_python:
        found[ENVPOOL] = partial(peer, args.envpool_python, "envpool_humanoid.py")
    return found


def is_finished(folder: Path, args) -> bool:
    """Whether a run has reached the highest return, or its last step."""
    rows = record.progress(folder)
    over = bool(rows) and rows[-1]["TotalEnvInteracts"] >= args.steps
    return over or reached(rows, max(args.returns)) is not None


def reached(rows: list[dict[str, float]], target: float) -> dict[str, float] | None:
    """The first row at which the mean return of the last 100 episodes, by whole rows, is as high; None: there is none.

    Args:
        rows: of a run's progress.txt.
    """
    before, ended = 0.0, []  # (number of episodes, sum of their returns)
    for row in rows:
        n, before = row["Episodes"] - before, row["Episodes"]
        if n:
            ended.append((n, n * row["AverageEpRet"]))
        while sum(n for n, _ in ended[1:]) >= EPISODES:
            ended.pop(0)
        episodes, total = (sum(column) for column in zip(*ended)) if ended else (0, 0.0)
        if episodes >= EPISODES and total >= target * episodes:
            return row
    return None


def save(args, folders: dict[str, list[Path]]) -> None:
    """Writes the result's file: seconds and steps to each return, of the runs that are finished."""
    found: dict[str, dict] = {}
    for name, paths in folders.items():
        runs = [record.progress(path) for path in paths if is_finished(path, args)]
        found[name] = {"runs": len(runs)}
        for target in args.returns if runs else []:
            rows = [row for run in runs if (row := reached(run, target))]
            seconds, steps = [row["Time"] for row in rows], [int(row["TotalEnvInteracts"]) for row in rows]
            found[name][f"to {target}"] = {"reached by": len(rows), "seconds": seconds, "steps": steps}
            if rows:
                found[name][f"to {target}"] |= record.spread(seconds)
    record.save(
        args, found, claims_of(found, args.returns), unit="seconds of training",
        note="spreads are of the runs that reached the return; claims are made where all runs did",
    )  # fmt: skip


def claims_of(found: dict[str, dict], targets: list[int]) -> list[dict]:
    """Each peer's median time to each return against train.py's."""
    claims = []
    for target in targets:
        medians = {
            name: statistics.median(times["seconds"])
            for name, sample in found.items()
            if (times := sample.get(f"to {target}")) and times["reached by"] == sample["runs"]
        }
        mine = medians.pop(OURS, None)
        for name in medians if mine else ():
            text = f"{ENV}, time to a mean return of {target}: {name} / {OURS}"
            claims.append(record.claim(text, medians[name] / mine, at_least=1.0))
    return claims


if __name__ == "__main__":
    sys.exit(main())
