"""PPO with environments that continue: a fixed number of steps of each an iteration, with normalizing wrappers.

    python examples/vector_envs.py --env CartPole-v1 --nprocs 2
    python examples/vector_envs.py --env HalfCheetah-v5 --nprocs 10 --num_envs 20 --num_steps 200
    mpiexec -n 2 python examples/vector_envs.py

The environments are numbered, and each is a vector environment of its own, which stays on one rank: the policy acts on
one observation per call, and random numbers depend on the environment's number. So results are bit-identical on any
number of processes. Lines marked `# +` need mpi_util.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")  # +
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--num_envs", type=int, default=8, help="of all ranks together (default: 8)")
parser.add_argument("--num_steps", type=int, default=256, help="of each in an iteration (default: 256)")
parser.add_argument("--iterations", type=int, default=20, help="(default: 20)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # +
    sys.exit()  # +

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

GAMMA, LAM, CLIP, LR, EPOCHS, MINIBATCH_SIZE = 0.99, 0.95, 0.2, 1e-3, 10, 128


class Agent(nn.Module):
    """A distribution over actions, and the value of an observation."""

    def __init__(self, n_obs: int, n_act: int, discrete: bool):
        super().__init__()
        self.discrete = discrete
        self.actor = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, n_act))
        self.critic = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.zeros(n_act))

    def forward(self, obs: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
        out = self.actor(obs)
        dist = Categorical(logits=out) if self.discrete else Independent(Normal(out, self.log_std.exp()), 1)
        return dist, self.critic(obs).squeeze(-1)


@torch.no_grad()
def play(number: int, seed: int) -> Iterator[dict[str, Any]]:  # +
    """Yields in each iteration the rows of the next steps, and the returns of the episodes that ended in them."""
    env = envs[number] = make_env()  # +
    # over: its next step only resets it (Gymnasium's AutoresetMode.NEXT_STEP)
    obs, over = env.reset(seed=seed)[0], np.zeros(1, bool)  # +
    while True:
        steps: list[tuple[np.ndarray, ...]] = []
        finished: list[float] = []
        for _ in range(args.num_steps):
            dist, value = agent(torch.as_tensor(obs, dtype=torch.float32))
            act = dist.sample()
            next_obs, rew, terminated, truncated, info = env.step(act.numpy())
            steps.append((obs, act.numpy(), dist.log_prob(act).numpy(), value.numpy(), rew, terminated, over))
            obs, over = next_obs, terminated | truncated
            finished += info["episode"]["r"][over].tolist() if over.any() else []
        last_value = agent(torch.as_tensor(obs, dtype=torch.float32))[1].numpy()
        observes, act, logp, value, rew, terminated, only_reset = (np.array(x) for x in zip(*steps))
        next_value = np.append(value[1:], last_value[None], axis=0) * ~terminated
        delta = rew + GAMMA * next_value - value
        ends, adv = np.append(only_reset[1:], over[None], axis=0), np.zeros_like(delta)
        running = np.zeros(len(over))
        for t in reversed(range(args.num_steps)):
            adv[t] = running = delta[t] + GAMMA * LAM * ~ends[t] * running
        rows = {"obs": observes, "act": act, "logp": logp, "adv": adv, "ret": adv + value}
        rows = {key: x[~only_reset] for key, x in rows.items()}  # (steps, environments, ...) becomes (rows, ...)
        rows = {key: x if key == "act" else x.astype(np.float32) for key, x in rows.items()}
        yield rows | {"returns": finished}


def update(batch: dict[str, torch.Tensor]) -> None:
    """Epochs of minibatches with the clipped objective (Schulman et al., arXiv 1707.06347)."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(batch["obs"])).split(MINIBATCH_SIZE):
            obs, act, old_logp, adv, ret = (batch[key][rows] for key in ("obs", "act", "logp", "adv", "ret"))
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
            dist, value = agent(obs)
            ratio = (dist.log_prob(act) - old_logp).exp()
            policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
            optimizer.zero_grad()
            (policy_loss + 0.25 * (value - ret).square().mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def make_env() -> Any:
    """A vector environment of one."""
    env: Any = gym.make_vec(args.env, num_envs=1, vectorization_mode="sync")
    env = gym.wrappers.vector.RecordEpisodeStatistics(gym.wrappers.vector.FlattenObservation(env))
    env = gym.wrappers.vector.NormalizeObservation(env)
    discrete = isinstance(env.single_action_space, gym.spaces.Discrete)
    return env if discrete else gym.wrappers.vector.ClipAction(env)


torch.manual_seed(args.seed)
envs: dict[int, Any] = {}  # +  this rank's, by their numbers
env = make_env()
space, n_obs = env.single_action_space, env.single_observation_space.shape[0]
discrete = isinstance(space, gym.spaces.Discrete)
agent = Agent(n_obs, int(space.n) if discrete else space.shape[0], discrete)
optimizer = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
for iteration in range(args.iterations):
    batch = mpi_util.collect(play, envs=args.num_envs, weights=agent, seed=args.seed)  # +
    mpi_util.merge_moments(envs)  # +  all environments normalize with the mean and deviation of all their samples
    if batch is None:  # +  this is not rank 0
        continue  # +
    returns = batch.pop("returns")
    update({key: torch.as_tensor(x) for key, x in batch.items()})
    print(f"iteration {iteration}: return {np.mean(returns or np.nan):.1f} of {len(returns)} episodes")

mpi_util.print0("checksum", mpi_util.chksum(agent))  # +
