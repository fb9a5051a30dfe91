"""Stable-Baselines3's PPO on Humanoid-v4 with rl-baselines3-zoo's settings, as a run that can be continued.

    python benchmarks/sb3_humanoid.py --folder FOLDER --seed 20

For benchmarks.time_to_return. Runs in an interpreter that has stable-baselines3, gymnasium and mujoco. The settings:
https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml, Humanoid-v4.
"""

import gymnasium as gym
import torch
from peer_run import PeerRun, command_line
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

ENV = "Humanoid-v4"
THREADS = 1  # of torch; 2 are slower, and far slower beside other work
SETTINGS = {
    "n_steps": 512,
    "batch_size": 256,
    "gamma": 0.95,
    "learning_rate": 3.56987e-05,
    "ent_coef": 0.00238306,
    "clip_range": 0.3,
    "n_epochs": 5,
    "gae_lambda": 0.9,
    "max_grad_norm": 2,
    "vf_coef": 0.431892,
    "policy_kwargs": {
        "log_std_init": -2,
        "ortho_init": False,
        "activation_fn": nn.ReLU,
        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
    },
}


class Progress(BaseCallback):
    """Writes a row after each update, and saves; ends the training at a stop."""

    def __init__(self, run: PeerRun):
        super().__init__()
        self.run = run

    def _on_step(self) -> bool:
        self.run.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return not self.run.stop

    def _on_rollout_start(self) -> None:
        if self.num_timesteps > self.run.steps:
            self.note()

    def _on_training_end(self) -> None:
        self.run.stop = True  # the last row is worth a save
        self.note()

    def note(self) -> None:
        """A row, and a save if it is due."""
        self.run.row(self.num_timesteps)
        if self.run.due():
            self.run.save(self.num_timesteps, self.write)

    def write(self, folder) -> None:
        """The model and the scales of observations and rewards."""
        self.model.save(folder / "model.zip")
        self.model.get_vec_normalize_env().save(folder / "scales.pkl")


def main() -> None:
    """Trains until there are --steps, or until it is stopped."""
    args = command_line(__doc__)
    run = PeerRun(args.folder)
    torch.set_num_threads(THREADS)
    envs = DummyVecEnv([lambda: Monitor(gym.make(ENV, disable_env_checker=True))])
    if run.checkpoint:
        envs = VecNormalize.load(run.checkpoint / "scales.pkl", envs)
        model = PPO.load(run.checkpoint / "model.zip", envs, device="cpu")
        model.set_random_seed(args.seed + run.steps)
    else:
        envs = VecNormalize(envs, gamma=SETTINGS["gamma"])
        model = PPO("MlpPolicy", envs, seed=args.seed, device="cpu", **SETTINGS)
    if args.steps > run.steps:
        model.learn(args.steps - run.steps, callback=Progress(run), reset_num_timesteps=False)


if __name__ == "__main__":
    main()
