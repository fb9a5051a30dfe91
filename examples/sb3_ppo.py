"""Stable-Baselines3's PPO on N processes: `parallel(PPO)` in place of `PPO`, and the environment as a function.

    python examples/sb3_ppo.py --nprocs 4
    python examples/sb3_ppo.py --env CartPole-v1 --steps 512 --total 2048 --nprocs 2

Needs stable_baselines3 and gymnasium[mujoco]. Every process runs this file; what must happen once, such as the
evaluation here, is inside `if mpi_util.rank == 0`. SB3's logger, callbacks and `save` already run on rank 0 only.
"""

import argparse
import sys

import mpi_util

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="HalfCheetah-v5")
parser.add_argument("--nprocs", type=int, default=2)
parser.add_argument("--steps", type=int, default=2048, help="of a rollout, all processes together")
parser.add_argument("--total", type=int, default=100_000)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", default="", help="file for the model; none: it is not saved")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # above the slow imports
    sys.exit()

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from mpi_util_sb3 import parallel


def make_env() -> VecNormalize:
    """An environment for each process; the running means of all are merged after each rollout."""
    return VecNormalize(make_vec_env(args.env))


model = parallel(PPO)("MlpPolicy", make_env, n_steps=args.steps, seed=args.seed, verbose=1, device="cpu")
model.learn(args.total)
if mpi_util.rank == 0 and (env := model.get_vec_normalize_env()):
    env.training, env.norm_reward = False, False
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=5)
    print(f"return after {model.num_timesteps} steps: {mean:.1f} +/- {deviation:.1f}")
    if args.save:
        model.save(args.save)
