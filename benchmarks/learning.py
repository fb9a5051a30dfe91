"""What train.py learns: PPO, TRPO and VPG to the end of their runs, over several seeds, against known results.

    python -m benchmarks.learning --jobs 2
    python -m benchmarks.learning --only PPO/Hopper-v4,VPG/Hopper-v4 --repeats 5

Every 20,000 steps a run evaluates its policy deterministically on 10 episodes; their mean return is one evaluation. A
task's figure is the best evaluation of each seed, averaged over the seeds 0 .. --repeats - 1. Complete runs are not
repeated, so the program can be interrupted and started again. The result's file keeps the tasks that this call leaves
out; pictures of the curves go to the folder learning/ next to it, if matplotlib is installed.
"""

import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from trainer.config import Config, parse

EVAL_EVERY = 20_000
PPO = "--batch_steps 2048 --num_envs 16 --minibatches 32 --kl_targ 0 --lr_schedule linear"
TRPO = "--algo trpo --batch_steps 2048 --num_envs 16 --lr_schedule linear"
VPG = "--algo vpg --batch_steps 1024 --num_envs 16 --lr 1e-3"


@dataclass(frozen=True)
class Task:
    """One learning task: train.py's arguments, and the figure to reach."""

    env: str
    steps: int
    target: float
    settings: str

    def arguments(self, seed: int) -> list[str]:
        """train.py's command line, without the folder of the results."""
        limits = f"--total_steps {self.steps} --eval_every {min(EVAL_EVERY, self.steps)}"
        return f"{self.env} {limits} {self.settings} --seed {seed}".split()


# The targets are for one million steps, VPG's for three; runs are shorter where fewer steps reach them.
TASKS = {
    "PPO/Hopper-v4": Task("Hopper-v4", 500_000, 2609, PPO),
    "PPO/Walker2d-v4": Task("Walker2d-v4", 1_000_000, 4000, PPO),
    "PPO/HalfCheetah-v4": Task("HalfCheetah-v4", 1_000_000, 5784, f"{PPO} --rew_scale returns --log_std -1"),
    "PPO/InvertedDoublePendulum-v4": Task("InvertedDoublePendulum-v4", 200_000, 9231, PPO),
    "TRPO/Hopper-v4": Task("Hopper-v4", 500_000, 2200, TRPO),
    "TRPO/Walker2d-v4": Task("Walker2d-v4", 1_000_000, 3827, TRPO),
    "VPG/Hopper-v4": Task("Hopper-v4", 500_000, 800, VPG),
}


def main() -> None:
    """Makes the runs that are missing, and saves their results."""
    parser = record.command_line(__doc__, repeats=3)
    parser.add_argument("--only", type=record.words, default=list(TASKS), help=f"tasks, of: {', '.join(TASKS)}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--steps", type=int, help="of each run, to try this program (default: the task's own)")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/ in that of the result's file)")
    args = parser.parse_args()
    if unknown := set(args.only) - set(TASKS):
        parser.error(f"--only knows no {unknown.pop()}; tasks: {', '.join(TASKS)}")
    runs_folder = args.runs or args.results / "runs"
    tasks = {name: replace(TASKS[name], steps=args.steps or TASKS[name].steps) for name in args.only}
    with ThreadPoolExecutor(args.jobs) as pool:
        made = {name: [] for name in tasks}
        for seed in range(args.repeats):  # seed by seed, so that an interrupted program has runs of every task
            for name, task in tasks.items():
                made[name].append(
                    pool.submit(run, task.arguments(seed), runs_folder / name / f"seed{seed}", args.mpi[0])
                )
    path = args.results / "learning.json"
    found = json.loads(path.read_text())["samples"] if path.exists() else {}
    for name, task in tasks.items():
        runs = [future.result() for future in made[name]]
        found[name] = learned(task, runs)
        picture(args.results / "learning" / f"{name.replace('/', '-')}.png", name, task, runs)
    found = {name: found[name] for name in TASKS if name in found}
    claims = [
        record.claim(
            f"{name}: best evaluation within {sample['steps']:,} steps, mean of {sample['best']['n']} seeds",
            sample["mean"],
            at_least=TASKS[name].target,
        )
        for name, sample in found.items()
    ]
    unit = "undiscounted return, mean of 10 episodes with the most likely actions"
    note = "wall_s includes the evaluations, --jobs runs at once, and whatever else the machine did in that time"
    record.save(args, found, claims, unit=unit, jobs=args.jobs, note=note)


def run(arguments: list[str], folder: Path, mpi: str) -> list[dict[str, float]]:
    """The rows of a run's progress.txt; the run is made if the folder does not hold it to its end.

    Raises:
        SystemExit: train.py failed, and its output is shown; or the folder holds something else.
    """
    wanted, rows = parse(arguments), record.progress(folder)
    if rows:
        made = Config(**json.loads((folder / "config.json").read_text()))
        if replace(made, run_dir=None) != wanted:
            sys.exit(f"{folder} holds a run with other settings; remove it, or give another --runs")
        if rows[-1]["TotalEnvInteracts"] >= wanted.total_steps:
            return rows
    shutil.rmtree(folder, ignore_errors=True)  # segments resume with new episodes: that is another run
    command = [sys.executable, "train.py", *arguments, "--run_dir", str(folder.resolve())]
    done = subprocess.run(command, cwd=record.ROOT, env=record.mpi_environment(mpi), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"{folder}: best evaluation {max(evaluations(record.progress(folder))[1]):.0f}", flush=True)
    return record.progress(folder)


def evaluations(rows: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    """(steps so far, mean return) of each evaluation of a run."""
    tried = [row for row in rows if not math.isnan(row["AverageTestEpRet"])]
    return [row["TotalEnvInteracts"] for row in tried], [row["AverageTestEpRet"] for row in tried]


def learned(task: Task, runs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """What the result's file says of a task. Args: runs: rows of progress.txt, by seed."""
    best = [max(evaluations(rows)[1]) for rows in runs]
    return {
        "command": shlex.join(["python", "train.py", *task.arguments(0)]) + f"  # and so on, to --seed {len(runs) - 1}",
        "steps": task.steps,
        "best_by_seed": best,
        "best": record.spread(best),
        "mean": statistics.mean(best),
        "last_by_seed": [evaluations(rows)[1][-1] for rows in runs],
        "target": task.target,
        "wall_s_by_seed": [rows[-1]["Time"] for rows in runs],
    }


def picture(path: Path, name: str, task: Task, runs: list[list[dict[str, float]]]) -> None:
    """Draws the evaluations against the steps: mean over the seeds, lowest and highest, and the target."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path}: pip install -e '.[plot]'")
        return
    curves = [evaluations(rows) for rows in runs]
    steps = np.array(curves[0][0])
    returns = np.array([np.interp(steps, *curve) for curve in curves])
    steps = steps / 1000
    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, returns.min(axis=0), returns.max(axis=0), alpha=0.25, linewidth=0)
    axes.plot(steps, returns.mean(axis=0), label=f"mean and range of {len(runs)} seeds")
    axes.axhline(task.target, color="black", linestyle="--", linewidth=1, label=f"target for the best: {task.target}")
    axes.set(title=name, xlabel="thousand steps", ylabel="return, mean of 10 episodes")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main()
