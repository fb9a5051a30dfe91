"""What the programs of this folder share, whatever their framework: options, environment, buffer with GAE, loop."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_tools import mpi_fork, mpi_statistics_scalar, num_procs, proc_id
from mpi_util_spinup.run_utils import setup_logger_kwargs

# an observation -> an action, its value and its log-probability
Step = Callable[[np.ndarray], tuple[Any, Any, Any]]


def command_line(doc: str | None, exp_name: str) -> argparse.ArgumentParser:
    """The options that all programs have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", help="of Gymnasium (default: CartPole-v1)")
    parser.add_argument("--cpu", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--steps", type=int, default=2000, help="per epoch, of all processes together (default: 2000)")
    parser.add_argument("--epochs", type=int, default=20, help="(default: 20)")
    parser.add_argument("--hid", type=int, default=64, help="units in a hidden layer (default: 64)")
    parser.add_argument("--l", type=int, default=2, help="hidden layers (default: 2)")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount, 0 to 1 (default: 0.99)")
    parser.add_argument("--seed", "-s", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--exp_name", default=exp_name, help=f"folder of the results, under data/ (default: {exp_name})"
    )
    parser.add_argument("--data_dir", help="another place for that folder")
    parser.add_argument("--check", action="store_true", help="at the end each rank prints a checksum of its weights")
    return parser


def main(doc: str | None, exp_name: str, algorithm: Callable[..., None]) -> None:
    """Reads the options, starts the ranks, and trains on them."""
    args = command_line(doc, exp_name).parse_args()
    mpi_fork(args.cpu)
    algorithm(
        lambda: make_env(args.env),
        ac_kwargs={"hidden_sizes": [args.hid] * args.l},
        seed=args.seed,
        steps_per_epoch=args.steps,
        epochs=args.epochs,
        gamma=args.gamma,
        check=args.check,
        logger_kwargs=setup_logger_kwargs(args.exp_name, args.seed, args.data_dir),
    )


def make_env(name: str) -> gym.Env:
    """An environment whose observations are flat arrays."""
    env = gym.make(name)
    space = env.observation_space
    flat = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    return env if flat else gym.wrappers.FlattenObservation(env)  # it cannot be pickled, so only where it is needed


def seeded_env(env_fn: Callable[[], gym.Env], seed: int, set_framework_seed: Callable[[int], object]) -> gym.Env:
    """This rank's environment. It, NumPy and the framework get this rank's seed."""
    seed += 10000 * proc_id()
    set_framework_seed(seed)
    np.random.seed(seed)
    env = env_fn()
    env.reset(seed=seed)
    return env


def share_of_steps(steps: int) -> int:
    """How many of an epoch's steps this rank makes: an equal share, and one of the remainder."""
    return len(range(proc_id(), steps, num_procs()))


def discount(x: np.ndarray, factor: float) -> np.ndarray:
    """y[t] = x[t] + factor * y[t + 1], along the first axis."""
    y = np.array(x, np.float64)
    for t in range(len(y) - 2, -1, -1):
        y[t] += factor * y[t + 1]
    return y


class Buffer:
    """One epoch's steps on this rank.

    Attributes:
        obs, act: float32 (int64 for Discrete actions), shape (size, *shape of the space).
        rew, val, logp, adv, ret: float32, shape (size,).
    """

    def __init__(self, env: gym.Env, size: int, gamma: float, lam: float):
        discrete = isinstance(env.action_space, gym.spaces.Discrete)
        self.obs = np.zeros((size, *(env.observation_space.shape or ())), np.float32)
        self.act = np.zeros((size, *(env.action_space.shape or ())), np.int64 if discrete else np.float32)
        self.rew, self.val, self.logp, self.adv, self.ret = np.zeros((5, size), np.float32)
        self.gamma, self.lam, self.size = gamma, lam, size
        self.n = self.start = 0  # steps stored so far; where the current episode starts

    def store(self, obs: np.ndarray, act: Any, rew: SupportsFloat, val: Any, logp: Any) -> None:
        """Adds a step."""
        i = self.n
        self.obs[i], self.act[i], self.rew[i], self.val[i], self.logp[i] = obs, act, float(rew), val, logp
        self.n += 1

    def finish_path(self, last_val: float) -> None:
        """Computes advantages (GAE, arXiv 1506.02438, eq. 16) and returns of the episode that ends here.

        Args:
            last_val: value of the state behind the last step; 0 if the episode has terminated there.
        """
        path = slice(self.start, self.n)
        val = np.append(self.val[path], last_val)
        delta = self.rew[path] + self.gamma * val[1:] - val[:-1]
        self.adv[path] = discount(delta, self.gamma * self.lam)
        self.ret[path] = discount(np.append(self.rew[path], last_val), self.gamma)[:-1]
        self.start = self.n

    def get(self) -> dict[str, np.ndarray]:
        """Collective: the epoch's data, with advantages of mean 0 and deviation 1 over all ranks; the buffer is empty.

        Returns:
            obs, act, adv, ret, logp.
        """
        self.n = self.start = 0
        mean, std = mpi_statistics_scalar(self.adv)
        adv = (self.adv - mean) / (std + 1e-8)
        return {"obs": self.obs, "act": self.act, "adv": adv, "ret": self.ret, "logp": self.logp}


def collect(env: gym.Env, step: Step, buf: Buffer, logger: EpochLogger) -> None:
    """Fills the buffer. The last episode is cut where the buffer is full.

    Args:
        step: function of an observation that returns an action, its value and its log-probability.
        logger: gets EpRet and EpLen of each whole episode, and VVals of each step.
    """
    obs, ep_ret, ep_len = env.reset()[0], 0.0, 0
    while buf.n < buf.size:
        act, val, logp = step(obs)
        next_obs, rew, terminated, truncated, _ = env.step(act)
        buf.store(obs, act, rew, val, logp)
        logger.store(VVals=val)
        obs, ep_ret, ep_len = next_obs, ep_ret + float(rew), ep_len + 1
        if terminated or truncated or buf.n == buf.size:
            buf.finish_path(0.0 if terminated else step(obs)[1])
            if terminated or truncated:
                logger.store(EpRet=ep_ret, EpLen=ep_len)
            obs, ep_ret, ep_len = env.reset()[0], 0.0, 0


def train(
    env: gym.Env,
    step: Step,
    buf: Buffer,
    update: Callable[[], None],
    logger: EpochLogger,
    epochs: int,
    steps_per_epoch: int,
    save_freq: int,
    columns: Sequence[str] = (),
) -> None:
    """The loop: collect, save, update, log.

    Args:
        step: as `collect` takes it.
        update: learns from the buffer, and stores losses and other statistics.
        save_freq: epochs from one save to the next; the last is always saved.
        columns: what `update` stores in addition to LossPi, LossV, DeltaLossPi, DeltaLossV, Entropy and KL.
    """
    start_time = time.time()
    for epoch in range(epochs):
        collect(env, step, buf, logger)
        if epoch % save_freq == 0 or epoch == epochs - 1:
            logger.save_state({"env": env}, None)
        update()
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.log_tabular("EpLen", average_only=True)
        logger.log_tabular("VVals", with_min_and_max=True)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * steps_per_epoch)
        for key in ("LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL", *columns):
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("Time", time.time() - start_time)
        logger.dump_tabular()
