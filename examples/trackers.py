"""TensorBoard and Weights & Biases in a program of one's own: `on_rank0` makes them on rank 0 alone.

    python examples/trackers.py --nprocs 2 --tensorboard runs/mine             # pip install tensorboardX
    WANDB_MODE=offline python examples/trackers.py --nprocs 2 --wandb mine     # pip install wandb

The program is a random search for a linear policy: each episode tries weights of its own, and rank 0 moves towards the
best ones.
"""

import argparse
import importlib
import sys

import gymnasium as gym
import numpy as np

import mpi_util

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nprocs", type=int, default=1)
parser.add_argument("--iterations", type=int, default=10)
parser.add_argument("--tensorboard", metavar="FOLDER")
parser.add_argument("--wandb", metavar="PROJECT")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":
    sys.exit()

env = gym.make("CartPole-v1")
weights = {"w": np.zeros(4)}


def play(seed: int) -> dict[str, np.ndarray]:
    """An episode with weights near the current ones."""
    tried, ret, ended = weights["w"] + np.random.standard_normal(4), 0.0, False
    obs, _ = env.reset(seed=seed)
    while not ended:
        obs, rew, terminated, truncated, _ = env.step(int(obs @ tried > 0))
        ret, ended = ret + float(rew), terminated or truncated
    return {"tried": tried[None], "ret": np.array([ret])}


# the packages are imported on rank 0 only, where they are used
writer = run = None
if args.tensorboard:
    writer = mpi_util.on_rank0(lambda: importlib.import_module("tensorboardX").SummaryWriter(args.tensorboard))
if args.wandb:
    run = mpi_util.on_rank0(lambda: importlib.import_module("wandb").init(project=args.wandb, config=vars(args)))
for iteration in range(args.iterations):
    batch = mpi_util.collect(play, episodes=20, weights=weights, seed=1)
    if batch is None:
        continue
    weights["w"] = batch["tried"][np.argsort(batch["ret"])[-5:]].mean(axis=0)
    ret, episodes = float(batch["ret"].mean()), mpi_util.collected.rollouts
    print(f"iteration {iteration}: return {ret:.1f}")
    if writer is not None:
        writer.add_scalar("return", ret, episodes)
    if run is not None:
        run.log({"return": ret}, step=episodes)
if writer is not None:
    writer.close()
if run is not None:
    run.finish()
