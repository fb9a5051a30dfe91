"""What other settings of train.py come to: each line of results/tried.csv is a run, which is made if it has no result.

    nice -n 19 python -m benchmarks.tried --jobs 2

A line is a command, such as `Hopper-v4 --total_steps 1e6 --lam 0.9 --seed 7`, and what it has reached: the highest
point and the last tenth of the evaluations (deterministic actions) and of the training episodes (sampled actions).
Neighbouring lines run at the same time; others may be added meanwhile. Ctrl-C stops the runs, which save; started
again, it continues them. Each was made with the code of its time, whose defaults count where the command is silent.
"""

import csv
import hashlib
import shlex
import sys
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.background import Job, locked, run_all
from benchmarks.learning_results import CURVES, curves_of, is_complete, last_part
from benchmarks.learning_tasks import EVAL_EVERY
from trainer.command_line import parse
from trainer.run_folder import checkpoints

COLUMNS = ("command", *(f"{curve}_{what}" for curve in CURVES for what in ("highest", "last_tenth")), "minutes")


def read(path: Path) -> dict[str, list[str]]:
    """By command: what it reached; [] if nothing is known yet."""
    with open(path, newline="") as file:
        return {line[0]: line[1:] for line in list(csv.reader(file))[1:] if line}


def write(path: Path, command: str, reached: list[str]) -> None:
    """Fills in one line; the file may have others by now."""
    known = read(path) | {command: reached}
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *([key, *value] for key, value in known.items())])


def job(command: str, runs: Path) -> Job:
    """The run of a line, to begin or to continue."""
    folder = runs / hashlib.sha256(command.encode()).hexdigest()[:12]

    def arguments() -> list[str]:
        new = [*shlex.split(command), "--eval_every", str(EVAL_EVERY), "--run_dir", str(folder)]
        how = ["--resume", str(folder)] if checkpoints(folder) else new
        return [sys.executable, str(record.ROOT / "train.py"), *how]

    return Job(command, folder, arguments)


def reached(command: str, folder: Path) -> list[str]:
    """The columns of a run that is complete; [] if it is not."""
    steps = (parse(shlex.split(command)).total_steps or 0) if checkpoints(folder) else 0
    if not steps or not is_complete(folder, steps):
        return []
    curve = curves_of(record.progress(folder), 0)
    found = [f(curve, column) for column in CURVES.values() for f in (highest, lambda *of: last_part(*of, steps))]
    return [f"{number:.4g}" for number in (*found, record.progress(folder)[-1]["Time"] / 60)]


def highest(curve: np.ndarray, column: int) -> float:
    return float(np.nanmax(curve[:, column]))


def main() -> int:
    """Makes the runs that are missing. Returns the exit status."""
    parser = record.command_line(__doc__, repeats=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--runs", type=Path, default=Path("runs/tried"), help="folder of the runs")
    args = parser.parse_args()
    path, runs, failed = args.results / "tried.csv", args.runs.resolve(), set[str]()
    with locked(runs) as lock:
        while waiting := [c for c, value in read(path).items() if not value and c not in failed][: args.jobs]:
            outcome = run_all([job(command, runs) for command in waiting], args.jobs, None, lock)
            failed |= set(outcome.failed)
            for command in waiting:
                if done := reached(command, job(command, runs).folder):
                    write(path, command, done)
                elif not outcome.stopped:
                    failed.add(command)  # it has ended without a last step
            if outcome.stopped:
                return 128 + outcome.stopped
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
