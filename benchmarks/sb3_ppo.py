"""Stable-Baselines3's PPO, the same work as benchmarks.end_to_end gives train.py. No part of mpi_util.

    python benchmarks/sb3_ppo.py --workers 2 --envs 2 --threads 1 --iterations 10 --out FILE

Runs in an interpreter that has stable-baselines3, gymnasium and mujoco, and writes its rate and its versions as JSON.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

EPOCHS = 10
GAMMA, LAM, LR = 0.99, 0.95, 3e-4  # as benchmarks.end_to_end gives train.py


class Clock(BaseCallback):
    """Notes when each rollout begins, which is when the iteration before it ended."""

    def __init__(self):
        super().__init__()
        self.at: list[float] = []

    def _on_rollout_start(self) -> None:
        self.at.append(time.perf_counter())

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self.at.append(time.perf_counter())


def settings(rows: int) -> dict:
    """Of the learner, all but n_steps. Args: rows: of a minibatch."""
    return {
        "policy": "MlpPolicy",  # 2x64 tanh, for the policy and for the value function
        "learning_rate": LR,
        "batch_size": rows,
        "n_epochs": EPOCHS,
        "gamma": GAMMA,
        "gae_lambda": LAM,
        "device": "cpu",
        "seed": 0,
    }


def normalised(envs) -> VecNormalize:
    """The environments with observations scaled by running moments."""
    return VecNormalize(envs, norm_reward=False, gamma=GAMMA)


def main() -> None:
    """Trains, and writes steps per second over whole iterations after the first --skip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Humanoid-v4")
    parser.add_argument("--workers", type=int, default=1, help="1: environments in this process; else one process each")
    parser.add_argument("--envs", type=int, default=1, help="as many as --workers, if that is above 1")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--steps", type=int, default=4000, help="of an iteration, all environments together")
    parser.add_argument("--rows", type=int, default=125, help="of a minibatch")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    makers = [lambda: gym.make(args.env, disable_env_checker=True)] * args.envs
    envs = SubprocVecEnv(makers) if args.workers > 1 else DummyVecEnv(makers)
    model = PPO(env=normalised(envs), n_steps=args.steps // args.envs, **settings(args.rows))
    clock = Clock()
    model.learn(args.steps * args.iterations, callback=clock)
    envs.close()
    seconds = clock.at[-1] - clock.at[args.skip]
    steps_per_s = args.steps * (args.iterations - args.skip) / seconds
    versions = {package: version(package) for package in ("stable_baselines3", "torch", "gymnasium", "mujoco", "numpy")}
    args.out.write_text(json.dumps({"steps_per_s": steps_per_s, "versions": versions}))


if __name__ == "__main__":
    main()
