"""Learns to control environments that are MPI programs, by the cross-entropy method of cross_entropy.py.

    python examples/simulators.py --nprocs 2                         # 2 workers; each steps its own flow
    python examples/simulators.py --nprocs 4 --ranks_per_env 2       # 2 workers; two ranks step a flow together
    python examples/simulators.py --nprocs 2 --command "mpiexec -n 2 python -m mpi_util.serve examples.kuramoto:make"

The flow is that of kuramoto.py. Each of its four actuators pushes by the same weights of the eight sensors, counted
from where it stands. Results are bit-identical for any number of workers. Lines marked `# +` need mpi_util.
"""

import argparse
import sys
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nprocs", type=int, default=1, help="ranks, of all teams together (default: 1)")
parser.add_argument("--ranks_per_env", type=int, default=1, help="that step an environment together (default: 1)")
parser.add_argument("--command", help="starts an environment as processes of their own, one for each worker")
parser.add_argument("--iterations", type=int, default=8, help="(default: 8)")
parser.add_argument("--candidates", type=int, default=24, help="an iteration, all workers together (default: 24)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs, ranks_per_env=args.ranks_per_env) == "parent":  # +
    sys.exit()  # +

from kuramoto import make

# Only workers come further: the other ranks of a team serve them.
env = mpi_util.simulator(command=args.command) if args.command else mpi_util.simulator(make)  # +

import numpy as np

policy = {"mean": np.zeros(8), "std": np.ones(8)}


def act(weights: np.ndarray, obs: np.ndarray) -> Any:
    """Shape (4,): what each actuator does."""
    return np.clip([weights @ np.roll(obs, -2 * i) for i in range(4)], -1.0, 1.0)


def evaluate(seed: int, rng: np.random.Generator) -> dict[str, Any]:
    """The weights of one candidate, and what it returned in an episode."""
    weights = rng.normal(policy["mean"], policy["std"])
    obs, ret, over = env.reset(seed=seed)[0], 0.0, False
    while not over:
        obs, rew, terminated, truncated, _ = env.step(act(weights, obs))
        ret, over = ret + rew, terminated or truncated
    return {"weights": weights[None], "returns": ret}


for iteration in range(args.iterations):
    batch = mpi_util.collect(evaluate, episodes=args.candidates, weights=policy, seed=args.seed)  # +
    if batch is None:  # +
        continue  # +
    best = batch["returns"].argsort(kind="stable")[-6:]
    elite = batch["weights"][best]
    policy["mean"][:], policy["std"][:] = elite.mean(axis=0), elite.std(axis=0) + 0.1
    print(f"iteration {iteration}: return {batch['returns'].mean():.1f}")

mpi_util.print0("checksum", mpi_util.chksum(policy))  # +
env.close()
