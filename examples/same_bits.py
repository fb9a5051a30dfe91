"""A small program with bit-identical results on any number of processes, call by call.

    python examples/same_bits.py --nprocs 1
    python examples/same_bits.py --nprocs 3          # prints the same checksum
    mpiexec -n 3 python examples/same_bits.py        # so does this

Random search (Mania et al., arXiv 1803.07055, much shortened): each episode evaluates the linear policy with some noise
added, and the policy moves towards the noise with above-average returns. This program makes the calls by hand of which
`mpi_util.collect` is made. Three names make the results identical: `deal` gives each episode to a rank that is free,
`stream` gives an episode random numbers that depend on its number alone, and `index=` puts the episodes back in the
order of their numbers. Lines marked `# +` need mpi_util.
"""

import argparse
import sys
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--episodes", type=int, default=40, help="an iteration, all ranks together (default: 40)")
parser.add_argument("--iterations", type=int, default=10, help="(default: 10)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # +
    sys.exit()  # +

import gymnasium as gym
import numpy as np

STEP, NOISE = 0.5, 0.5
env: Any = gym.wrappers.FlattenObservation(gym.make(args.env))
discrete = isinstance(env.action_space, gym.spaces.Discrete)
n_act = int(env.action_space.n) if discrete else int(env.action_space.shape[0])
shape = (n_act, int(env.observation_space.shape[0]))
policy = {"weights": np.zeros(shape)}


def episode(rng: np.random.Generator) -> dict[str, Any]:
    """Tests the policy with noise from `rng`. Returns the noise, shape (1, n_act, n_obs), and the sum of rewards."""
    noise = NOISE * rng.normal(size=shape)
    obs, _ = env.reset(seed=int(rng.integers(2**31)))  # nothing carries over from the episode before
    ret, over = 0.0, False
    while not over:
        scores = (policy["weights"] + noise) @ obs
        act = scores.argmax() if discrete else scores.clip(env.action_space.low, env.action_space.high)
        obs, rew, terminated, truncated, _ = env.step(act)
        ret, over = ret + float(rew), terminated or truncated
    return {"noise": noise[None], "returns": ret}


for iteration in range(args.iterations):
    mpi_util.rank0_bcast_wts(policy)  # +
    episodes = mpi_util.deal(args.episodes)  # +
    mine = [episode(np.random.default_rng(mpi_util.stream(args.seed, iteration, i))) for i in episodes]  # +
    batch = mpi_util.rank0_accum_batches(mine, index=episodes.taken)  # +
    if mpi_util.rank:  # +
        continue  # +
    returns = batch["returns"]
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    policy["weights"] += STEP * (advantages[:, None, None] * batch["noise"]).mean(axis=0) / NOISE
    print(f"iteration {iteration}: return {returns.mean():.1f} of {len(returns)} episodes")

mpi_util.print0("checksum", mpi_util.chksum(policy))  # +
