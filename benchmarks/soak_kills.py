"""Kills train.py again and again, and compares what it has learned in the end with an undisturbed run, bit by bit.

    python -m benchmarks.soak_kills                      # continues where it was, until 500 kills
    python -m benchmarks.soak_kills --modes episodes --options=--save_every=1

A case starts train.py, sends a random process of the job (the parent, its guard, mpiexec, hydra's proxy, any rank) a
random signal at a random time, from the first moment of the start to the last save, waits until all of it is gone, and
resumes with another number of ranks under another MPI, until the run comes to its end or has been struck eight times.
"""

import contextlib
import functools
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import record, soak
from trainer.run_folder import load

MODES = {
    "episodes": "Hopper-v4 -n 48 -b 8",
    "segments": "Hopper-v4 --total_steps 2400 --batch_steps 400 --num_envs 8",
    "evaluations": "Hopper-v4 -n 40 -b 8 --eval_every 400 --eval_episodes 3",
}
SIGNALS = ("TERM", "INT", "HUP", "KILL", "SEGV", "STOP")
TIME_COLUMNS = ("Time", "StepsPerSecond", "RolloutS", "GatherS", "UpdateS", "BcastS", "IdleShare")  # differ
POLICIES = ("policy.safetensors", "best.safetensors")
MOST_STRIKES, MOST_RANKS = 8, 4
TIMEOUT_S = 180.0
GOAL = 500


def main() -> None:
    """Runs the cases of each mode."""
    parser = soak.command_line(__doc__, repeats=GOAL)
    parser.add_argument("--modes", type=record.words, default=list(MODES), help=f"of {','.join(MODES)} (default: all)")
    parser.add_argument("--options", default="", help="more options of train.py, such as --options=--save_every=1")
    args = parser.parse_args()
    claims = functools.partial(soak.count_claims, "random kills in a row, resumed to the same bits", GOAL)
    case = functools.partial(chain, mpis=args.mpi, options=args.options.split())
    soak.soak(args, args.modes, case, lambda done, failures, _: claims(done, failures), modes=MODES)


def chain(mode: str, number: int, mpis: list[str], options: list[str]) -> tuple[int, dict[str, float]]:
    """One run that is struck, resumed, and compared; counts its strikes."""
    rng = random.Random(f"{mode} {number}")
    expected, duration_s = undisturbed(mode, tuple(options))
    struck = 0
    with soak.box() as box:
        folder = box.folder / "run"
        while True:
            resumed = (folder / "checkpoint.safetensors").exists()
            if not resumed:
                shutil.rmtree(folder, ignore_errors=True)
            words = ["--resume", folder] if resumed else [*MODES[mode].split(), *options, "--run_dir", folder]
            mpi, n = rng.choice(mpis), rng.randint(1, MOST_RANKS)
            process = box.start([sys.executable, "train.py", *words, "--nprocs", n], mpi)
            hit = 0 if struck >= MOST_STRIKES else strike(box, process, rng, duration_s)
            struck += hit
            status = box.wait(process, TIMEOUT_S)
            if status == 0:
                break
            if not hit:
                raise soak.CaseError(f"{words[0]} with {n} ranks under {mpi}: status {status}; {box.said()}")
        if different := [name for name, content in results(folder).items() if content != expected[name]]:
            keep = shutil.copytree(folder, f"/tmp/soak_kills-{mode}-{number}", dirs_exist_ok=True)
            raise soak.CaseError(f"after {struck} strikes other bits in {different}; kept in {keep}")
    return struck, {}


def strike(box: soak.Box, process: Any, rng: random.Random, duration_s: float) -> int:
    """Sends a signal, sometimes a second one soon after. Returns how many were sent; 0 if the job had ended by then."""
    time.sleep(rng.uniform(0, 0.8 * duration_s))
    sent = 0
    for _ in range(rng.choice((1, 1, 2))):
        pids = box.pids()
        if process.poll() is not None or not pids:
            break
        name, pid = rng.choice(SIGNALS), rng.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, f"SIG{name}"))
            sent += 1
            if name == "STOP":
                time.sleep(rng.uniform(0, 2))
                os.kill(pid, signal.SIGCONT)
        time.sleep(rng.uniform(0, 0.5))
    return sent


@functools.cache
def undisturbed(mode: str, options: tuple[str, ...]) -> tuple[dict[str, Any], float]:
    """Results and seconds of a run with two ranks that nothing disturbs."""
    with soak.box() as box:
        began, folder = time.monotonic(), box.folder / "run"
        words = [*MODES[mode].split(), *options, "--run_dir", folder, "--nprocs", 2]
        box.run([sys.executable, "train.py", *words], "mpich", TIMEOUT_S)
        return results(folder), time.monotonic() - began


def results(folder: Path) -> dict[str, Any]:
    """The policies, the arrays of the checkpoint, and progress.txt without the columns of time."""
    lines = [line.split("\t") for line in (folder / "progress.txt").read_text().splitlines()]
    rows = [{k: v for k, v in zip(lines[0], line) if k not in TIME_COLUMNS} for line in lines[1:]]
    arrays = {name: array.tobytes() for name, array in load(folder / "checkpoint.safetensors")[0].items()}
    policies = {name: (folder / name).read_bytes() for name in POLICIES if (folder / name).exists()}
    return {"progress.txt": rows, "checkpoint": arrays, "policies": policies}


if __name__ == "__main__":
    main()
