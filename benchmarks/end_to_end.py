"""train.py's PPO end to end on Humanoid-v4 against two other PPOs, the same work on all sides, in turn.

    python -m benchmarks.end_to_end --sb3_python ../sb3/bin/python --envpool_python ../envpool/bin/python

An iteration: 4000 steps, 10 epochs of 32 minibatches of 125 rows, separate 2x64 tanh networks for policy and value,
observations scaled by running moments. Steps per second over whole iterations, the first two left out. train.py is
compared with the best of each:

- Stable-Baselines3 with 1, 2 and 10 workers (1: environments in its own process, one or, as train.py has, 20; else
  SubprocVecEnv). --sb3_python is an interpreter with stable-baselines3, gymnasium[mujoco] and torch.
- benchmarks/envpool_ppo.py, a single-file torch PPO on EnvPool's 20 environments in 2 threads: as one writes it, and
  with each step of its update compiled (torch.compile: needs a C++ compiler and some ten seconds, which are left out).
  EnvPool's `env.step` alone is measured too, as a reference. --envpool_python is an interpreter with envpool and torch.

Both run with 1 and with 2 torch threads, and should have the versions that train.py runs on (EnvPool brings its own
MuJoCo). The virtual environments are made with

    python -m venv ../envpool && ../envpool/bin/pip install -c constraints.txt envpool torch
"""

import json
import shlex
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import record

ENV = "Humanoid-v4"
WORK = "--batch_steps 4000 --num_envs 20 --epochs 10 --minibatches 32 --policy_hid_list 64,64 --valfunc_hid_list 64,64"
WORK += " --gamma 0.99 --lam 0.95 --lr 3e-4 --rew_scale gamma --kl_targ 0"  # no early stop, as in the others
SB3_ENVIRONMENTS = {  # (workers, environments)
    (1, 1): "1 worker",
    (1, 20): "1 worker, 20 environments",
    (2, 2): "2 workers",
    (10, 10): "10 workers",
}
TARGETS = {"SB3": 3.0, "EnvPool": 1.7, "compiled EnvPool": 1.4}  # of train.py's rate at 2 ranks, to the best of each


def main() -> None:
    """Takes train.py at each rank count and the others at each setting in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=3, ranks="2,10")
    parser.add_argument("--sb3_python", type=Path, help="interpreter that has stable-baselines3; none: without it")
    parser.add_argument("--envpool_python", type=Path, help="interpreter that has envpool; none: without it")
    parser.add_argument("--threads", type=record.numbers, default=[1, 2], help="torch threads of both (default: 1,2)")
    parser.add_argument("--iterations", type=int, default=10, help="of each run (default: 10)")
    args = parser.parse_args()
    versions: dict[str, dict[str, str]] = {}
    alternatives = {f"train.py, {n} ranks": partial(ours, n, args) for n in args.ranks} | others(args, versions)
    found = {name: record.spread(rates) for name, rates in record.in_turn(alternatives, args.repeats).items()}
    median = {name: rates["median"] for name, rates in found.items()}
    claims = []
    for side, target in TARGETS.items():
        rates = {name.removeprefix(f"{side}, "): median[name] for name in median if name.startswith(f"{side}, ")}
        if rates and 2 in args.ranks:
            best = max(rates, key=rates.get)
            ratio = median["train.py, 2 ranks"] / rates[best]
            claims.append(record.claim(f"PPO on {ENV}, 2 ranks: rate / {side}'s best ({best})", ratio, at_least=target))
    if {2, 10} <= set(args.ranks):
        ratio = median["train.py, 10 ranks"] / median["train.py, 2 ranks"]
        claims.append(record.claim(f"PPO on {ENV}, 10 ranks: rate / 2 ranks", ratio, at_least=0.9))
    record.save(args, found, claims, unit="environment steps per second", work=WORK, **versions)


def ours(n: int, args: Namespace) -> float:
    """Steps per second of train.py with n ranks."""
    limit = ("--nprocs", n, "--total_steps", 4000 * args.iterations)
    return record.steps_per_s(record.train(args.mpi[0], ENV, *WORK.split(), *limit))


def others(args: Namespace, versions: dict[str, dict[str, str]]) -> dict[str, Callable[[], float]]:
    """What measures the others at each setting, by name; each notes its versions."""

    def rate(name: str, python: Path, **settings) -> float:
        measured = run_other(python, f"{name}_ppo", settings | {"iterations": args.iterations})
        versions[f"{name}_versions"] = measured["versions"]
        return measured["steps_per_s"]

    found = {}
    if args.sb3_python:
        sb3 = partial(rate, "sb3", args.sb3_python)
        for (workers, envs), name in SB3_ENVIRONMENTS.items():
            for n in args.threads:
                found[f"SB3, {name}, {n} torch threads"] = partial(sb3, workers=workers, envs=envs, threads=n)
    if args.envpool_python:
        envpool = partial(rate, "envpool", args.envpool_python, envs=20, env_threads=2)
        for n in args.threads:
            for update, side in ("eager", "EnvPool"), ("compiled", "compiled EnvPool"):
                found[f"{side}, {n} torch threads"] = partial(envpool, threads=n, update=update)
        found["env.step of EnvPool alone"] = partial(envpool, threads=1, update="none")
    return found


def run_other(python: Path, program: str, settings: dict) -> dict:
    """What another learner measured. Args: program: of this folder. settings: its options, without --out."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [str(python), str(Path(__file__).with_name(f"{program}.py")), "--out", str(out)]
        command += [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())


if __name__ == "__main__":
    main()
