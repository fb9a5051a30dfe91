"""train.py on the work of Spinning Up's PPO, against a loop written in that style, in turn.

    python -m benchmarks.spinup

An iteration on Humanoid-v4: 4000 steps, up to 80 full-batch steps of the policy with a stop by KL divergence, 80 of the
value function, 2x64 tanh networks. The loop (spinup_loop.py) has one torch inference per step and averages gradients
parameter by parameter with blocking MPI calls. Steps per second over whole iterations, the first two left out.

"env.step and products alone" bounds what can be reached: as many processes step the bare environment, and then two
threads make the matrix products of the update, and nothing else of it.
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
from threadpoolctl import threadpool_limits

import mpi_util
from benchmarks import record

ENV = "Humanoid-v4"
WORK = "--batch_steps 4000 --num_envs 20 --algo ppo --minibatches 1 --epochs 80 --vf_epochs 80 --kl_targ 0.015"
WORK += " --lr 3e-4 --vf_lr 1e-3 --policy_hid_list 64,64 --valfunc_hid_list 64,64"
AT_LEAST = {2: 2.0, 10: 2.5}
LEAST = "env.step and products alone"
PASSES = (12, 17), (80, 1)  # of the policy, which the divergence stops about there, and of the value function; outputs


def main() -> None:
    """Takes train.py in both modes and the loop in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=3, ranks="2,10")
    parser.add_argument("--iterations", type=int, default=10, help="of each run (default: 10)")
    args = parser.parse_args()
    if args.part:
        return part(args)

    def ours(n: int, mode: str) -> float:
        limit = ("--nprocs", n, "--parallel", mode, "--total_steps", 4000 * args.iterations)
        return record.steps_per_s(record.train(args.mpi[0], ENV, *WORK.split(), *limit))

    alternatives = {}
    for n in args.ranks:
        for mode in ("gather", "average"):
            alternatives[f"train.py --parallel {mode}, {n} ranks"] = partial(ours, n, mode)
        alternatives[f"the loop, {n} ranks"] = partial(run_loop, args.mpi[0], n, args.iterations)
        alternatives[f"{LEAST}, {n} ranks"] = partial(record.run_part, "benchmarks.spinup", args.mpi[0], "--ranks", n)
    found = {name: record.spread(rates) for name, rates in record.in_turn(alternatives, args.repeats).items()}
    claims = []
    for n in args.ranks:
        loop = found[f"the loop, {n} ranks"]["median"]
        for mode in ("gather", "average"):
            ratio = found[f"train.py --parallel {mode}, {n} ranks"]["median"] / loop
            text = f"Spinning Up's PPO work, {n} ranks, --parallel {mode}: rate / the loop's"
            claims.append(record.claim(text, ratio, at_least=AT_LEAST.get(n, 1.0)))
        text = f"{LEAST}, {n} ranks: rate / the loop's"
        claims.append(record.claim(text, found[f"{LEAST}, {n} ranks"]["median"] / loop, at_least=AT_LEAST.get(n, 1.0)))
    record.save(args, found, claims, unit="environment steps per second", work=WORK)


def part(args: argparse.Namespace) -> None:
    """Steps per second with nothing but env.step and the update's products, the fastest of some iterations."""
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    rng = np.random.default_rng(mpi_util.rank)
    env = gym.make(ENV, disable_env_checker=True)
    env.reset(seed=mpi_util.rank)
    stepping, updating = [], []
    for _ in range(4):
        mpi_util.all_sum(0)
        began = time.perf_counter()
        for action in rng.normal(0.0, 0.6, (len(range(mpi_util.rank, 4000, mpi_util.nworkers)), 17)):
            if any(env.step(action)[2:4]):
                env.reset()
        mpi_util.all_sum(0)
        stepping.append(time.perf_counter() - began)
        if mpi_util.rank == 0:
            updating.append(sum(passes * products_s(outputs) for passes, outputs in PASSES))
    if mpi_util.rank == 0:
        record.write_part(args.part, 4000 / (min(stepping) + min(updating)))


def products_s(outputs: int) -> float:
    """Seconds of one pass over 4000 rows forwards and backwards, its products alone, half of them in each thread."""

    def one(n: int) -> None:
        sizes = (376, 64, 64, outputs)
        xs = [np.zeros((n, size), np.float32) for size in sizes]
        weights = [np.zeros(pair, np.float32) for pair in itertools.pairwise(sizes)]
        grads = [np.empty_like(weight) for weight in weights]
        meet.wait()
        for _ in range(10):
            for x, weight, out in zip(xs, weights, xs[1:]):
                x.dot(weight, out)
            for i in (2, 1, 0):
                xs[i].T.dot(xs[i + 1], grads[i])
                if i:
                    xs[i + 1].dot(weights[i].T, xs[i])
        meet.wait()

    meet = threading.Barrier(3)
    with threadpool_limits(1):
        for _ in range(2):
            threading.Thread(target=one, args=(2000,)).start()
        meet.wait()
        began = time.perf_counter()
        meet.wait()
    return (time.perf_counter() - began) / 10


def run_loop(mpi: str, n: int, iterations: int) -> float:
    """Steps per second of the loop on `n` ranks.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    from mpi_util.launch import launcher as mpi_launcher
    from mpi_util.ranks import threads

    family, launcher = mpi_launcher.find_launcher()  # the one that belongs to mpi4py's library, with its flags
    environment = mpi_launcher.ENVIRONMENT | record.mpi_environment(mpi) | threads.environment(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "loop.json"
        program = Path(__file__).with_name("spinup_loop.py")
        command = [launcher, *family.flags.split(), "-n", str(n), sys.executable, str(program)]
        command += ["--iterations", str(iterations), "--out", str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())["steps_per_s"]


if __name__ == "__main__":
    main()
