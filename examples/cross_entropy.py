"""The cross-entropy method on a small network, with NumPy alone.

    python examples/cross_entropy.py --env Pendulum-v1 --nprocs 4
    mpiexec -n 4 python examples/cross_entropy.py --env CartPole-v1

Each candidate is a set of weights drawn from a normal distribution, which is then fitted to the best ones (de Boer et
al., 2005, "A Tutorial on the Cross-Entropy Method"). A rank that is free takes the next candidate, and sends only its
seed and its return: rank 0 draws the weights of the best again from their seeds. So the gather stays small however
large the network is, and results are bit-identical on any number of ranks. Lines marked `# +` need mpi_util.
"""

import argparse
import sys
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--candidates", type=int, default=50, help="an iteration, all ranks together (default: 50)")
parser.add_argument("--elite", type=int, default=10, help="how many of the best are kept (default: 10)")
parser.add_argument("--episodes", type=int, default=2, help="to evaluate one candidate (default: 2)")
parser.add_argument("--iterations", type=int, default=20, help="(default: 20)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # +
    sys.exit()  # +

import gymnasium as gym
import numpy as np

HIDDEN, EXTRA_STD = 8, 0.3
env: Any = gym.wrappers.FlattenObservation(gym.make(args.env))
discrete = isinstance(env.action_space, gym.spaces.Discrete)
n_obs, n_act = env.observation_space.shape[0], env.action_space.n if discrete else env.action_space.shape[0]
n_weights = (n_obs + 1) * HIDDEN + (HIDDEN + 1) * n_act
policy = {"mean": np.zeros(n_weights), "std": np.ones(n_weights)}


def draw(rng: np.random.Generator) -> np.ndarray:
    """The weights of one candidate, shape (n_weights,)."""
    return rng.normal(policy["mean"], policy["std"])


def act(weights: np.ndarray, obs: np.ndarray) -> Any:
    """The action of a network with one hidden layer of tanh units."""
    first, second = np.split(weights, [(n_obs + 1) * HIDDEN])
    hidden = np.tanh(np.append(obs, 1.0) @ first.reshape(n_obs + 1, HIDDEN))
    scores = np.append(hidden, 1.0) @ second.reshape(HIDDEN + 1, n_act)
    if discrete:
        return int(scores.argmax())
    low, high = env.action_space.low, env.action_space.high
    return low + (high - low) * (np.tanh(scores) + 1) / 2


def evaluate(seed: int) -> dict[str, Any]:
    """Draws a candidate. Returns its seed and the mean return of its episodes."""
    rng = np.random.default_rng(seed)
    weights, rewards = draw(rng), []
    for _ in range(args.episodes):
        obs, _ = env.reset(seed=int(rng.integers(2**31)))
        over = False
        while not over:
            obs, rew, terminated, truncated, _ = env.step(act(weights, obs))
            rewards.append(float(rew))
            over = terminated or truncated
    return {"seeds": seed, "returns": sum(rewards) / args.episodes}


for iteration in range(args.iterations):
    batch = mpi_util.collect(evaluate, episodes=args.candidates, weights=policy, seed=args.seed)  # +
    if batch is None:  # +
        continue  # +
    returns = batch["returns"]
    best = returns.argsort(kind="stable")[-args.elite :]
    elite = np.array([draw(np.random.default_rng(seed)) for seed in batch["seeds"][best]])
    # the extra deviation fades out; without it the first lucky candidates would end the search (Szita, Lorincz, 2006)
    extra_std = EXTRA_STD * (1 - iteration / args.iterations)
    policy["mean"][:], policy["std"][:] = elite.mean(axis=0), elite.std(axis=0) + extra_std
    print(f"iteration {iteration}: return {returns.mean():.1f}, of the best {args.elite} {returns[best].mean():.1f}")

mpi_util.print0("checksum", mpi_util.chksum(policy))  # +
