"""A single-file PPO in PyTorch on EnvPool, the same work as benchmarks.end_to_end gives train.py. No part of mpi_util.

    python benchmarks/envpool_ppo.py --envs 20 --env_threads 2 --threads 1 --iterations 10 --out FILE

Runs in an interpreter that has envpool and torch (`pip install envpool torch`), and writes its rate, its work and its
versions as JSON. An iteration steps all environments in EnvPool's threads, then makes 10 passes over the batch in
minibatches: generalised advantages, clipped surrogate, one Adam for a policy and a value network of 2x64 tanh units;
observations are scaled by running moments, rewards by the running deviation of the returns.

EnvPool resets an environment in a step of its own, whose action has no effect. Such a row stays in the batch with
advantage 0 and counts as a step, so that minibatches have their full size; `reset_share` says how many there were.
EnvPool's Humanoid-v4 leaves the contact forces in the observations at 0, and the time to compute them out.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import envpool
import numpy as np
import torch
from torch import nn

EPOCHS = 10
GAMMA, LAM, LR, CLIP, MAX_GRAD_NORM = 0.99, 0.95, 3e-4, 0.2, 0.5  # as benchmarks.end_to_end gives train.py
BETA1, BETA2, EPS = 0.9, 0.999, 1e-5  # of Adam
INIT_LOG_STD = -0.5  # in units of half an action's range
VALUE_WEIGHT = 0.5
WIDEST = 10.0  # of a scaled observation
FLOOR = 1e-8  # of a variance
Step = Callable[..., object]  # one step of Adam on a minibatch, the arguments of Agent.forward


class Moments:
    """Running mean and variance of rows, merged batch by batch."""

    def __init__(self, shape: tuple[int, ...]):
        """Args: shape: of a row."""
        self.count, self.mean, self.var = 0, np.zeros(shape), np.ones(shape)

    def update(self, rows: np.ndarray) -> None:
        """Args: rows: (N, *shape)."""
        total = self.count + len(rows)
        mean, var, new = rows.mean(0), rows.var(0), len(rows) / total
        delta = mean - self.mean
        self.var = (1 - new) * self.var + new * var + new * (1 - new) * delta**2
        self.mean, self.count = self.mean + new * delta, total


def tanh_network(n_in: int, n_out: int, last_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 units, orthogonal weights. Args: last_gain: of the output layer's."""
    network = nn.Sequential(nn.Linear(n_in, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_out))
    for layer, gain in zip(network[::2], (math.sqrt(2), math.sqrt(2), last_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return network


class Agent(nn.Module):
    """A Gaussian policy with deviations that do not depend on the state, and a value function."""

    def __init__(self, obs_dim: int, act_dim: int):
        """Args: lengths of an observation and of an action."""
        super().__init__()
        self.policy, self.value = tanh_network(obs_dim, act_dim, 0.01), tanh_network(obs_dim, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((act_dim,), INIT_LOG_STD))

    def logp(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        """Log-probabilities but for a constant: (N,). Args: obs: (N, obs_dim). act: (N, act_dim)."""
        z = (act - self.policy(obs)) * torch.exp(-self.log_std)
        return -0.5 * z.square().sum(1) - self.log_std.sum()

    def forward(self, obs, act, old_logp, adv, ret) -> torch.Tensor:
        """The loss of one minibatch: clipped surrogate (arXiv:1707.06347, equation 7), squared error of the values."""
        ratio = torch.exp(self.logp(obs, act) - old_logp)
        surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
        return VALUE_WEIGHT * (self.value(obs).squeeze(1) - ret).square().mean() - surrogate


class Rollout:
    """Environments, and the arrays that one batch of their steps is written into, (steps, environments, ...)."""

    def __init__(self, args: argparse.Namespace, steps: int):
        """Args: args: of `main`. steps: of each environment per batch."""
        counts = {"num_envs": args.envs, "num_threads": args.env_threads, "seed": args.seed}
        self.envs, n_envs = envpool.make(args.env, env_type="gymnasium", **counts), args.envs
        (obs_dim,), (act_dim,) = self.envs.observation_space.shape, self.envs.action_space.shape
        self.raw = np.empty((steps + 1, n_envs, obs_dim))
        self.obs = torch.empty(steps + 1, n_envs, obs_dim)
        self.act = torch.empty(steps, n_envs, act_dim)
        self.rewards = np.empty((steps, n_envs))
        self.terminated, self.done = np.empty((2, steps, n_envs), bool)
        self.reset = np.zeros((steps + 1, n_envs), bool)  # rows whose step only resets
        self.obs_moments, self.return_moments = Moments((obs_dim,)), Moments(())
        self.discounted, self.undiscounted = np.zeros((2, n_envs))  # returns up to now
        self.episodes: list[float] = []  # returns of those that ended in this batch
        self.raw[-1] = self.envs.reset()[0]

    def bounded(self, act: np.ndarray) -> np.ndarray:
        """Actions for the environments. Args: act: (..., act_dim), where -1 and 1 are the bounds."""
        low, high = self.envs.action_space.low, self.envs.action_space.high
        return np.clip((low + high) / 2 + (high - low) / 2 * act, low, high)

    def scale(self, t: int) -> torch.Tensor:
        """Writes the scaled observations of step t and returns them."""
        rows = self.obs[t].numpy()
        np.subtract(self.raw[t], self.obs_moments.mean, out=rows, casting="same_kind")
        rows *= self.inv_std
        return torch.from_numpy(rows.clip(-WIDEST, WIDEST, out=rows))

    @torch.no_grad()
    def collect(self, agent: Agent) -> None:
        """Fills the arrays with a batch of the agent's steps."""
        self.inv_std = (1 / np.sqrt(self.obs_moments.var + FLOOR)).astype(np.float32)
        self.raw[0], self.reset[0] = self.raw[-1], self.reset[-1]
        noise = torch.randn_like(self.act).mul_(agent.log_std.exp())
        for t in range(len(self.act)):
            torch.add(agent.policy(self.scale(t)), noise[t], out=self.act[t])
            action = self.bounded(self.act[t].numpy())
            self.raw[t + 1], self.rewards[t], self.terminated[t], truncated, _ = self.envs.step(action)
            np.logical_or(self.terminated[t], truncated, out=self.done[t])
            self.reset[t + 1] = self.done[t]
        self.scale(len(self.act))

    @torch.no_grad()
    def batch(self, agent: Agent) -> tuple[torch.Tensor, ...]:
        """Arguments of Agent.forward for all rows; then the moments of the next batch."""
        n = self.rewards.size
        values = agent.value(self.obs.flatten(0, 1)).view(self.reset.shape).numpy()
        scale = 1 / math.sqrt(self.return_moments.var + FLOOR)
        adv = advantages(self.rewards * scale, values, self.terminated, self.done)
        ret = adv + values[:-1]
        valid = ~self.reset[:-1]
        adv = np.where(valid, (adv - adv[valid].mean()) / (adv[valid].std() + FLOOR), 0)
        ret = np.where(valid, ret, values[:-1])
        obs, act = self.obs[:-1].flatten(0, 1), self.act.flatten(0, 1)
        as_rows = [torch.from_numpy(array.astype(np.float32)).view(n) for array in (adv, ret)]
        self.update_moments()
        return obs, act, agent.logp(obs, act), *as_rows

    def update_moments(self) -> None:
        """Merges this batch into the moments of observations and of discounted returns; notes the episodes' returns."""
        self.obs_moments.update(self.raw[:-1].reshape(self.rewards.size, -1))
        returns, self.episodes = np.empty_like(self.rewards), []
        for t, (reward, done) in enumerate(zip(self.rewards, self.done)):
            returns[t] = self.discounted = GAMMA * self.discounted + reward
            self.undiscounted += reward
            self.episodes += self.undiscounted[done].tolist()
            self.discounted[done] = self.undiscounted[done] = 0
        self.return_moments.update(returns.ravel())


def advantages(rewards, values, terminated, done) -> np.ndarray:
    """Generalised advantage estimates (arXiv:1506.02438): (T, N).

    Args: rewards, terminated, done: (T, N). values: (T + 1, N); the one after the last step of an episode is of its
    last observation, so an episode that was cut off counts with what would have followed.
    """
    adv = rewards + GAMMA * values[1:] * ~terminated - values[:-1]
    rate = GAMMA * LAM * ~done
    for t in range(len(adv) - 2, -1, -1):
        adv[t] += rate[t] * adv[t + 1]
    return adv


def eager_step(agent: Agent) -> Step:
    """The usual step, operation by operation."""
    optimizer = torch.optim.Adam(agent.parameters(), LR, (BETA1, BETA2), EPS, fused=True)
    params = list(agent.parameters())

    def step(*minibatch):
        optimizer.zero_grad()
        agent(*minibatch).backward()
        nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        optimizer.step()

    return step


def compiled_step(agent: Agent) -> Step:
    """The same step as one compiled function, with Adam written out: torch's own took 1.3 times as long in it."""
    params = {name: parameter.detach() for name, parameter in agent.named_parameters()}
    means, squares = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
    count = torch.zeros(())

    @torch.no_grad()
    @torch.compile
    def step(*minibatch):
        grads = torch.func.grad(lambda params: torch.func.functional_call(agent, params, minibatch))(params)
        norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
        shrink = (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1)
        count.add_(1)
        for name, param in params.items():
            grad = grads[name] * shrink
            mean, square = means[name].lerp_(grad, 1 - BETA1), squares[name].lerp_(grad.square(), 1 - BETA2)
            deviation = (square / (1 - BETA2**count)).sqrt() + EPS
            param.sub_(LR / (1 - BETA1**count) * mean / deviation)

    return step


def update(step: Step, batch: tuple[torch.Tensor, ...], n_rows: int) -> int:
    """Passes over the batch in minibatches of n_rows rows. Returns the number of steps made."""
    minibatches = [rows for _ in range(EPOCHS) for rows in torch.randperm(len(batch[0])).split(n_rows)]
    for rows in minibatches:
        step(*(whole[rows] for whole in batch))
    return len(minibatches)


def train(rollout: Rollout, make_step: Callable[[Agent], Step], args: argparse.Namespace) -> dict[str, Any]:
    """Trains an agent. Returns what shows how much work it was, and `at`: when each iteration began or ended."""
    agent = Agent(rollout.obs.shape[-1], rollout.act.shape[-1])
    step = make_step(agent)
    at, optimizer_steps, resets, returns = [time.perf_counter()], 0, 0, []
    for _ in range(args.iterations):
        rollout.collect(agent)
        batch = rollout.batch(agent)
        torch.set_num_threads(args.threads)
        optimizer_steps += update(step, batch, args.rows)
        torch.set_num_threads(1)  # EnvPool's threads need the cores
        resets += int(rollout.reset[:-1].sum())
        returns.append(float(np.mean(rollout.episodes)) if rollout.episodes else None)
        at.append(time.perf_counter())
    return {
        "at": at,
        "env_steps": args.iterations * rollout.rewards.size,
        "optimizer_steps": optimizer_steps,
        "parameters": {name: p.numel() for name, p in agent.named_parameters()},
        "reset_share": resets / (args.iterations * rollout.rewards.size),
        "returns": returns,
    }


def step_only(rollout: Rollout, args: argparse.Namespace) -> dict[str, Any]:
    """Steps the environments with actions drawn before. Returns what `train` does, as far as it applies."""
    actions = rollout.bounded(torch.randn_like(rollout.act).mul_(math.exp(INIT_LOG_STD)).numpy())
    at = [time.perf_counter()]
    for _ in range(args.iterations):
        for action in actions:
            rollout.envs.step(action)
        at.append(time.perf_counter())
    return {"at": at, "env_steps": args.iterations * rollout.rewards.size}


def main() -> None:
    """Trains, and writes steps per second over whole iterations after the first --skip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Humanoid-v4")
    parser.add_argument("--envs", type=int, default=20)
    parser.add_argument("--env_threads", type=int, default=2, help="of EnvPool")
    parser.add_argument("--threads", type=int, default=1, help="of torch in the update")
    parser.add_argument("--update", choices=("eager", "compiled", "none"), default="eager", help="none: only env.step")
    parser.add_argument("--steps", type=int, default=4000, help="of an iteration, all environments together")
    parser.add_argument("--rows", type=int, default=125, help="of a minibatch")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rollout = Rollout(args, args.steps // args.envs)
    if args.update == "none":
        done = step_only(rollout, args)
    else:
        done = train(rollout, eager_step if args.update == "eager" else compiled_step, args)
    rollout.envs.close()
    seconds = done["at"][-1] - done["at"][args.skip]
    done["steps_per_s"] = rollout.rewards.size * (args.iterations - args.skip) / seconds
    done["versions"] = {package: version(package) for package in ("envpool", "torch", "gymnasium", "numpy")}
    args.out.write_text(json.dumps(done))


if __name__ == "__main__":
    main()
