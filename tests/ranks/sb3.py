"""Stable-Baselines3's models on N ranks, against plain SB3 and against what each rank is known to collect.

python sb3.py N FOLDER                  every check
python sb3.py N FOLDER crash|interrupt  a rank that raises, or that is interrupted, within a rollout
"""

import copy
import signal
import sys
import types
from pathlib import Path

from harness import fork, raises

fork()
# SB3 loads TensorBoard, which loads TensorFlow where it is installed: that takes longer than these checks
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO  # noqa: E402
from sb3_contrib.common.envs import InvalidActionEnvDiscrete  # noqa: E402
from stable_baselines3 import A2C, DQN, PPO, SAC  # noqa: E402
from stable_baselines3.common import callbacks  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.monitor import Monitor, get_monitor_files  # noqa: E402
from stable_baselines3.common.utils import set_random_seed  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

import mpi_util  # noqa: E402
from mpi_util import UsageError  # noqa: E402
from mpi_util.ranks.state import state  # noqa: E402
from mpi_util.ranks.threads import Threads  # noqa: E402
from mpi_util_sb3 import parallel  # noqa: E402

RANK, SIZE = mpi_util.rank, mpi_util.nworkers
FOLDER = Path(sys.argv[2])
EPISODE = 5  # steps
QUICK = {"n_steps": 31, "batch_size": 16, "n_epochs": 2, "device": "cpu"}  # 31: shares of different sizes
COUNTS = [31 // SIZE + (k < 31 % SIZE) for k in range(SIZE)]  # of each rank


class Known(gym.Env):
    """Episodes of 5 steps with a reward of rank + 1 each; observes rank and step."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-100, 100, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.step_of_episode = 0
        return self.observe(), {}

    def step(self, action):
        self.step_of_episode += 1
        done = self.step_of_episode == EPISODE
        return self.observe(), RANK + 1.0, done, False, {"is_success": RANK == 0}

    def observe(self):
        return np.array([RANK, self.step_of_episode], np.float32)


class Kinds(Known):
    """The same with any space of observations and actions, both drawn."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def observe(self):
        return self.observation_space.sample()


class Noted(callbacks.BaseCallback):
    """What a callback of the user's sees."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after, self.seen, self.rollouts = stop_after, [], []

    def _on_step(self):
        self.seen.append(self.num_timesteps)
        return self.n_calls != self.stop_after

    def _on_rollout_end(self):
        buffer = self.locals["rollout_buffer"]
        assert buffer is self.model.rollout_buffer and buffer.full
        episodes = [info["r"] for info in self.model.ep_info_buffer]
        with torch.no_grad():
            values = self.model.policy.predict_values(torch.as_tensor(buffer.observations).flatten(0, 1)).numpy()
        assert np.allclose(values, buffer.values.reshape(-1, 1), atol=1e-5), "collected with other weights"
        obs = buffer.observations.reshape(-1, *buffer.observations.shape[2:])
        self.rollouts.append((obs.copy(), episodes, self.model.num_timesteps))


def same_on_all(*values):
    """Requires that every rank has these values."""
    everyone = mpi_util.rank0_gather(values)
    assert RANK or all(one == values for one in everyone), everyone


def weights(model):
    return mpi_util.chksum(model.policy)


def normaliser(env):
    return [(rms.mean.tolist(), rms.var.tolist(), rms.count) for rms in (env.obs_rms, env.ret_rms)]


def pendulum():
    return VecNormalize(make_vec_env("Pendulum-v1", 2))


def check_algorithms():
    """The same weights everywhere after `learn`, the whole batch trained on; with one rank the bits of plain SB3."""
    slow = {"n_steps": 31, "device": "cpu"}
    masked = lambda: InvalidActionEnvDiscrete(dim=4, n_invalid_actions=2)  # noqa: E731
    for algorithm, env, n_envs, settings in (
        (PPO, "CartPole-v1", 1, QUICK | {"learning_rate": lambda progress: 1e-3 * progress, "target_kl": 0.5}),
        (PPO, pendulum, 2, QUICK | {"use_sde": True, "sde_sample_freq": 4}),
        (A2C, "CartPole-v1", 1, slow),
        (TRPO, pendulum, 2, slow),
        (MaskablePPO, masked, 1, QUICK),
    ):
        model = parallel(algorithm)("MlpPolicy", env, seed=3, **settings)
        assert isinstance(model, algorithm) and parallel(algorithm) is type(model) is parallel(type(model))
        first = weights(model)
        model.learn(3 * 31 * n_envs)
        same_on_all(weights(model), model.num_timesteps, model._n_updates, model._current_progress_remaining)
        assert model.num_timesteps == 3 * 31 * n_envs == model.n_steps * n_envs * 3
        assert model._current_progress_remaining == 0
        if RANK == 0:
            assert model._n_updates == 3 * settings.get("n_epochs", 1)
            buffer = model.rollout_buffer
            assert len(buffer.advantages) == 31 * n_envs  # flat since train()
        if model.get_vec_normalize_env():
            same_on_all(normaliser(model.get_vec_normalize_env()))
            # the rows of two environments on every rank, and the first ones
            count = model.get_vec_normalize_env().obs_rms.count
            assert abs(count - 3 * 62 - 2 * SIZE) < 0.1, count
        if RANK == 0:
            state(Threads).switch(True, of_any_size=True)  # as in a process without mpi_util
        plain = algorithm("MlpPolicy", env if isinstance(env, str) else env(), seed=3, **settings)
        assert RANK or first == weights(plain), algorithm
        if SIZE == 1:
            plain.learn(3 * 31 * n_envs)
            assert weights(model) == weights(plain), algorithm


def check_what_rank0_gets():
    """Rows in rank order, episodes in the order of steps, num_timesteps of all ranks."""
    model, noted = parallel(PPO)("MlpPolicy", Known, seed=1, **QUICK), Noted()
    model.learn(62, callback=noted)
    assert RANK == 0 or not noted.seen
    if RANK:
        return
    (obs, episodes, steps), (_, more, total) = noted.rollouts
    expected = np.concatenate([[(k, i % EPISODE) for i in range(count)] for k, count in enumerate(COUNTS)])
    assert np.array_equal(obs, expected), obs
    ends = sorted((i + 1, k) for k, count in enumerate(COUNTS) for i in range(count) if (i + 1) % EPISODE == 0)
    assert episodes == [EPISODE * (k + 1.0) for _, k in ends], episodes
    assert list(model.ep_success_buffer)[: len(ends)] == [k == 0 for _, k in ends]
    assert steps == 31 and total == 62 and more[: len(episodes)] == episodes
    assert noted.seen[: COUNTS[0]] == [min(SIZE * (i + 1), 31) for i in range(COUNTS[0])]
    assert noted.seen[-1] == 62


def check_seeds():
    """Ranks draw differently, rank 0 as plain SB3 does."""
    model = parallel(PPO)("MlpPolicy", "CartPole-v1", seed=7, **QUICK)
    first = mpi_util.rank0_gather((model.env.reset().tolist(), model.action_space.sample(), torch.rand(1).item()))
    plain = PPO("MlpPolicy", "CartPole-v1", seed=7, **QUICK)
    if RANK == 0:
        assert first[0][0] == plain.env.reset().tolist() and first[0][2] == torch.rand(1).item()
        assert len({str(one[0]) for one in first}) == len({one[2] for one in first}) == SIZE


def check_ranks_draw_differently_without_a_seed():
    """A program that seeds torch and its environments itself does that alike on all ranks."""
    set_random_seed(3)
    model = parallel(PPO)("MlpPolicy", make_vec_env("CartPole-v1", 2, seed=3), **QUICK)
    drawn = mpi_util.all_accum_batches([str((model.env.reset().tolist(), torch.rand(1).item()))])
    assert len({*drawn}) == SIZE, drawn


def check_callbacks():
    """Built-in callbacks on rank 0, a stop that reaches all, a progress bar of all steps."""
    noted, stop = Noted(), Noted(stop_after=3)
    model = parallel(PPO)("MlpPolicy", Known, **QUICK)
    model.learn(1000, callback=[noted, stop])
    same_on_all(model.num_timesteps, weights(model))
    assert model.num_timesteps == 3 + sum(COUNTS[1:])
    assert RANK or (len(noted.seen) == 3 and noted.num_timesteps == stop.num_timesteps == model.num_timesteps)

    threshold = callbacks.StopTrainingOnRewardThreshold(1)
    best = FOLDER / "best"
    evaluate = callbacks.EvalCallback(
        DummyVecEnv([Known]), threshold, eval_freq=7, best_model_save_path=best, log_path=FOLDER, verbose=0, warn=False
    )
    checkpoint = callbacks.CheckpointCallback(5, FOLDER / "checkpoints")
    bar = callbacks.ProgressBarCallback()
    model.learn(62, callback=[checkpoint, bar])
    assert model.num_timesteps == 62 and (RANK or bar.pbar.n == 62)
    saved = {path.name for path in (FOLDER / "checkpoints").iterdir()}
    assert f"rl_model_{5 * SIZE}_steps.zip" in saved and (RANK == 0) == hasattr(checkpoint, "model")
    model.learn(10_000, callback=evaluate)
    assert model.num_timesteps <= 7 + 31 and (RANK or evaluate.best_mean_reward == EPISODE)
    plain = PPO.load(best / "best_model")
    same_on_all(weights(plain), weights(model))


class Levels(Known):
    """Observes its level; `raised` counts the calls of a method."""

    level, raised = 0, 0

    def observe(self):
        return np.array([RANK, self.level], np.float32)

    def raise_by(self, n):
        self.raised += n
        return self.raised


class Curriculum(callbacks.BaseCallback):
    """Sets levels where callbacks may: before the training, before, within and after a rollout, and at the end."""

    def _init_callback(self):
        self.env = copy.copy(self.training_env) if SIZE > 1 else self.training_env
        assert isinstance(self.env, VecNormalize) and self.env.unwrapped.num_envs == 2

    def set_level(self, level):
        for env in (self.env, self.training_env):
            env.set_attr("level", level)
            assert env.get_attr("level") == [level, level]

    def _on_training_start(self):
        self.set_level(1)
        self.levels = []

    def _on_rollout_start(self):
        if self.num_timesteps:
            self.set_level(2)
        assert self.training_env.env_method("raise_by", 1, indices=[0]) == [1 + self.num_timesteps // 62]

    def _on_step(self):
        if self.n_calls == 2:
            self.training_env.set_attr("level", 9, indices=[1])
        return True

    def _on_rollout_end(self):
        levels = self.model.rollout_buffer.observations.reshape(-1, 2)
        self.levels.append([levels[levels[:, 0] == k, 1].tolist() for k in range(SIZE)])
        self.training_env.norm_reward = False

    def _on_training_end(self):
        self.set_level(3)
        self.training_env.save(FOLDER / "levels")


def check_a_callback_sets_attributes():
    """What a callback sets and calls in its training_env reaches the environments of all ranks."""
    env = VecNormalize(DummyVecEnv([Levels, Levels]), norm_obs=False)
    model, curriculum = parallel(PPO)("MlpPolicy", env, **QUICK), Curriculum()
    model.learn(4 * 31, callback=curriculum)
    assert env.get_attr("level") == [3, 3] and env.get_attr("raised") == [2, 0], (RANK, env.get_attr("raised"))
    assert model.get_env() is env and env.norm_reward == (RANK > 0)
    if RANK == 0:
        first, second = curriculum.levels
        for own, count in zip(first[1:], COUNTS[1:]):
            assert own == [0] + [1] * (count - 1) + [0] + [1] * (count - 1), own  # 0: observed before the training
        for own, count in zip(second[1:], COUNTS[1:]):
            assert own[1:count] == own[count + 1 :] == [2] * (count - 1), own
        assert VecNormalize.load(FOLDER / "levels", DummyVecEnv([Levels, Levels])).norm_reward is False
        curriculum.set_level(4)  # after `learn` it is rank 0's own
    mpi_util.rank0_gather(None)
    assert env.get_attr("level") == ([4, 4] if RANK == 0 else [3, 3])


def check_save_and_load():
    """Plain SB3 reads what was saved, and so does every rank; training goes on; environments can be replaced."""
    model = parallel(PPO)("MlpPolicy", pendulum, seed=2, tensorboard_log=None, **QUICK)
    model.learn(62)
    model.save(FOLDER / "model")
    again = parallel(PPO).load(FOLDER / "model", env=pendulum, device="cpu")
    plain = PPO.load(FOLDER / "model", device="cpu")
    same_on_all(weights(model), weights(again), weights(plain))
    assert weights(model) == weights(again) == weights(plain)
    assert plain.n_steps == again.n_steps == 31 and plain.num_timesteps == 62 and "_ended" not in vars(plain)
    again.learn(62, reset_num_timesteps=False)
    same_on_all(weights(again), again.num_timesteps)
    assert again.num_timesteps == 124 and weights(again) != weights(model)
    again.set_env(lambda: make_vec_env("Pendulum-v1", 2))
    again.learn(62)
    assert again.num_timesteps == 62
    if RANK == 0:
        model.get_vec_normalize_env().save(FOLDER / "normaliser")
    before = mpi_util.bcast(model.get_vec_normalize_env().obs_rms.count)
    env = VecNormalize.load(FOLDER / "normaliser", make_vec_env("Pendulum-v1", 2))
    parallel(PPO)("MlpPolicy", env, **QUICK).learn(62)
    same_on_all(normaliser(env))
    assert abs(env.obs_rms.count - before - 62 - 2 * SIZE) < 0.1  # what all ranks have loaded counts once
    raises(FileNotFoundError, "nothing", lambda: parallel(PPO).load(FOLDER / "nothing"))


def check_spaces():
    """Dict and image observations, Discrete ones, all kinds of actions; n_steps of each rank."""
    image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    both = spaces.Dict({"image": image, "vector": spaces.Box(-1, 1, (3,), np.float32), "which": spaces.Discrete(3)})
    small = {"policy_kwargs": {"normalize_images": True}}
    for policy, observation_space, action_space in (
        ("CnnPolicy", image, spaces.Discrete(2)),
        ("MultiInputPolicy", both, spaces.MultiDiscrete([2, 3])),
        ("MlpPolicy", spaces.Discrete(4), spaces.MultiBinary(2)),
    ):
        model = parallel(PPO)(
            policy, lambda o=observation_space, a=action_space: Kinds(o, a), n_steps=4, divide=False, batch_size=4,
            n_epochs=1, device="cpu", seed=1, **small
        )  # fmt: skip
        assert model.n_steps == 4 * SIZE
        model.learn(4 * SIZE)
        same_on_all(weights(model), model.num_timesteps)
        assert model.num_timesteps == 4 * SIZE


def check_monitor_files():
    """Environments of all ranks with a file each are read as one log; a file that two ranks write is refused."""
    logs = str(FOLDER / "logs")
    (odd := Known()).env = "no environment"
    parallel(PPO)("MlpPolicy", odd, **QUICK).learn(31)
    model = parallel(PPO)("MlpPolicy", lambda: make_vec_env(Known, 2, monitor_dir=logs, start_index=2 * RANK), **QUICK)
    model.learn(62)
    same_on_all(model.num_timesteps)
    if RANK == 0:
        rows = [row for file in get_monitor_files(logs) for row in Path(file).read_text().splitlines()[2:]]
        assert len(rows) == 2 * sum(count // EPISODE for count in COUNTS)
    model = parallel(PPO)("MlpPolicy", lambda: Monitor(Known(), str(FOLDER / "all")), **QUICK)
    if SIZE > 1:
        raises(UsageError, "all.monitor.csv; each needs its own", lambda: model.learn(31))


def check_refusals():
    for algorithm in (SAC, DQN, RecurrentPPO):
        raises(UsageError, f"parallel({algorithm.__name__})", lambda a=algorithm: parallel(a))
    if SIZE > 1:
        uneven = parallel(PPO)("MlpPolicy", make_vec_env("CartPole-v1", 1 + (RANK == 1)), **QUICK)
        raises(UsageError, "the same number of environments; they have [1, 2", lambda: uneven.learn(31))
        raises(UsageError, "n_steps=1 ", lambda: parallel(A2C)("MlpPolicy", Known, n_steps=1, device="cpu"))


def check_output():
    """What SB3 prints, it prints once."""
    assert parallel(PPO).__name__ == "PPO"  # which SB3's warnings name
    parallel(PPO)("MlpPolicy", "CartPole-v1", verbose=1, **QUICK).learn(62)


class Failing(Known):
    """Goes wrong on the last rank."""

    def step(self, action):
        if RANK == SIZE - 1 and self.step_of_episode == 3:
            if sys.argv[3] == "crash":
                raise ValueError("the simulator is broken")
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


if sys.argv[3:]:
    parallel(PPO)("MlpPolicy", Failing, **QUICK).learn(1000)
else:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            mpi_util.print0(f"{name} done")
