"""PPO with vector environments: each process steps its share of them, a fixed number of steps an iteration.

    python examples/vector_envs.py --env CartPole-v1 --nprocs 2
    python examples/vector_envs.py --env HalfCheetah-v5 --nprocs 10 --num_envs 20 --num_steps 200
    mpiexec -n 2 python examples/vector_envs.py

This is the quick way: each process has one seed, and its environments continue where they stopped. The price: results
depend on the number of processes, because random numbers, normalisation and the rows of a forward pass depend on which
process has which environments. Two runs with the same number are bit-identical. Lines marked `# +` need mpi_util.
"""

import argparse
import sys
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--num_envs", type=int, default=8, help="of all ranks together, one each at least (default: 8)")
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
def collect(obs: np.ndarray, over: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Steps this rank's environments.

    Args:
        obs: the last observations, shape (own environments, n_obs).
        over: which environments have ended; their next step only resets them (Gymnasium's AutoresetMode.NEXT_STEP).

    Returns:
        The rows of these steps and the returns of the episodes that ended; the last `obs` and `over`.
    """
    steps: list[tuple[np.ndarray, ...]] = []
    finished: list[float] = []
    for _ in range(args.num_steps):
        dist, value = agent(torch.as_tensor(obs, dtype=torch.float32))
        act = dist.sample()
        next_obs, rew, terminated, truncated, info = envs.step(act.numpy())
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
    return rows | {"returns": finished}, obs, over


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


if args.num_envs < mpi_util.nworkers:  # +
    mpi_util.fail(f"--num_envs {args.num_envs}: each of {mpi_util.nworkers} processes needs one at least")  # +
n_own = len(mpi_util.share(args.num_envs))  # +  8 on 3 ranks: 3, 3 and 2
envs: Any = gym.make_vec(args.env, num_envs=n_own, vectorization_mode="sync")
envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.wrappers.vector.FlattenObservation(envs))
envs = gym.wrappers.vector.NormalizeObservation(envs)
seed = mpi_util.rank_seed(args.seed)  # +
torch.manual_seed(seed)
discrete = isinstance(envs.single_action_space, gym.spaces.Discrete)
envs = envs if discrete else gym.wrappers.vector.ClipAction(envs)
n_act = int(envs.single_action_space.n) if discrete else envs.single_action_space.shape[0]
agent = Agent(envs.single_observation_space.shape[0], n_act, discrete)
optimizer = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
obs, over = envs.reset(seed=seed)[0], np.zeros(n_own, bool)
for iteration in range(args.iterations):
    mpi_util.rank0_bcast_wts(agent)  # +
    mpi_util.merge_moments(envs)  # +  every rank normalises with the mean and deviation of all ranks' samples
    own, obs, over = collect(obs, over)
    batch = mpi_util.rank0_accum_batches(own)  # +  numbers of rows and of returns may differ between ranks
    if mpi_util.rank:  # +
        continue  # +
    returns = batch.pop("returns")
    update({key: torch.as_tensor(x) for key, x in batch.items()})
    print(f"iteration {iteration}: return {np.mean(returns or np.nan):.1f} of {len(returns)} episodes")

mpi_util.print0("checksum", mpi_util.chksum(agent))  # +
