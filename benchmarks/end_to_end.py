"""train.py's PPO end to end on Humanoid-v4 against Stable-Baselines3's PPO, the same work on both sides, in turn.

    python -m benchmarks.end_to_end --sb3_python ../sb3/bin/python

An iteration: 4000 steps, 10 epochs of 32 minibatches of 125 rows, separate 2x64 tanh networks for policy and value,
observations scaled by running moments. Steps per second over whole iterations, the first two left out. SB3 runs with 1,
2 and 10 workers (1: environments in its own process, one or, as train.py has, 20; else SubprocVecEnv), each with 1 and
with 2 torch threads; the best of all these is what train.py is compared with. --sb3_python is an interpreter with
stable-baselines3, gymnasium[mujoco] and torch of the versions that train.py runs on.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import record

ENV = "Humanoid-v4"
WORK = "--batch_steps 4000 --num_envs 20 --epochs 10 --minibatches 32 --policy_hid_list 64,64 --valfunc_hid_list 64,64"
WORK += " --kl_targ 0"  # no early stop: all epochs, as in SB3
SB3_ENVIRONMENTS = {  # (workers, environments)
    (1, 1): "1 worker",
    (1, 20): "1 worker, 20 environments",
    (2, 2): "2 workers",
    (10, 10): "10 workers",
}


def main() -> None:
    """Takes train.py at each rank count and SB3 at each setting in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=3, ranks="2,10")
    parser.add_argument("--sb3_python", type=Path, help="interpreter that has stable-baselines3; none: train.py alone")
    parser.add_argument("--threads", type=record.numbers, default=[1, 2], help="torch threads of SB3 (default: 1,2)")
    parser.add_argument("--iterations", type=int, default=10, help="of each run (default: 10)")
    args = parser.parse_args()
    sb3_versions: dict[str, str] = {}

    def ours(n: int) -> float:
        limit = ("--nprocs", n, "--total_steps", 4000 * args.iterations)
        return record.steps_per_s(record.train(args.mpi[0], ENV, *WORK.split(), *limit))

    def sb3(workers: int, envs: int, threads: int) -> float:
        settings = {"workers": workers, "envs": envs, "threads": threads, "iterations": args.iterations}
        found = run_sb3(args.sb3_python, settings)
        sb3_versions.update(found["versions"])
        return found["steps_per_s"]

    alternatives = {f"train.py, {n} ranks": partial(ours, n) for n in args.ranks}
    if args.sb3_python:
        for (workers, envs), name in SB3_ENVIRONMENTS.items():
            for threads in args.threads:
                alternatives[f"SB3, {name}, {threads} torch threads"] = partial(sb3, workers, envs, threads)
    found = {name: record.spread(rates) for name, rates in record.in_turn(alternatives, args.repeats).items()}
    median = {name: rates["median"] for name, rates in found.items()}
    claims = []
    if args.sb3_python and 2 in args.ranks:
        best = max((name for name in median if name.startswith("SB3")), key=median.get)
        ratio = median["train.py, 2 ranks"] / median[best]
        claims.append(record.claim(f"PPO on {ENV}, 2 ranks: rate / SB3's best ({best[5:]})", ratio, at_least=2.5))
    if {2, 10} <= set(args.ranks):
        ratio = median["train.py, 10 ranks"] / median["train.py, 2 ranks"]
        claims.append(record.claim(f"PPO on {ENV}, 10 ranks: rate / 2 ranks", ratio, at_least=0.9))
    record.save(args, found, claims, unit="environment steps per second", work=WORK, sb3_versions=sb3_versions)


def run_sb3(python: Path, settings: dict) -> dict:
    """What benchmarks/sb3_ppo.py measured in that interpreter. Args: settings: its options, without --out."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sb3.json"
        command = [str(python), str(Path(__file__).with_name("sb3_ppo.py")), "--out", str(out)]
        command += [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()
