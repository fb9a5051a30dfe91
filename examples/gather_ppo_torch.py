"""PPO in one file, in the style of CleanRL's ppo.py: every process collects, rank 0 updates.

    python examples/gather_ppo_torch.py --env CartPole-v1 --nprocs 4
    python examples/gather_ppo_torch.py --env Humanoid-v5 --nprocs 10 --episodes 50 --total_steps 2000000
    mpiexec -n 4 python examples/gather_ppo_torch.py

Lines marked `# +` are those that mpi_util added or changed in a program for one process; docs/cleanrl.md shows
both versions. Results are bit-identical on any number of processes. PPO: Schulman et al., arXiv 1707.06347.
"""

import argparse
import sys
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")  # +
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--episodes", type=int, default=20, help="an iteration, all ranks together (default: 20)")
parser.add_argument("--total_steps", type=int, default=50_000, help="ends the run (default: 50000)")
parser.add_argument("--stop_at", type=float, default=1e9, help="a mean return that ends the run (default: none)")
parser.add_argument("--epochs", type=int, default=10, help="passes over a batch (default: 10)")
parser.add_argument("--minibatch_size", type=int, default=64, help="rows (default: 64)")
parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
parser.add_argument("--gamma", type=float, default=0.99, help="discount, 0 to 1 (default: 0.99)")
parser.add_argument("--lam", type=float, default=0.95, help="of GAE, 0 to 1 (default: 0.95)")
parser.add_argument("--clip", type=float, default=0.2, help="of the probability ratio (default: 0.2)")
parser.add_argument("--ent_coef", type=float, default=0.0, help="weight of the entropy (default: 0)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # +  above the heavy imports, which only the ranks need
    sys.exit()  # +

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal


def mlp(n_in: int, n_out: int, out_std: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, with orthogonal weights and zero biases."""
    layers = [nn.Linear(n_in, 64), nn.Linear(64, 64), nn.Linear(64, n_out)]
    for layer, std in zip(layers, (2**0.5, 2**0.5, out_std)):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Policy, value function, and the scale of observations, in buffers, which are sent with the weights."""

    count: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, env: Any):
        super().__init__()
        n_obs = env.observation_space.shape[0]
        self.discrete = isinstance(env.action_space, gym.spaces.Discrete)
        n_act = int(env.action_space.n) if self.discrete else env.action_space.shape[0]
        self.actor, self.critic = mlp(n_obs, n_act, 0.01), mlp(n_obs, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(n_act))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(n_obs))
        self.register_buffer("var", torch.ones(n_obs))

    def scale(self, obs: torch.Tensor) -> torch.Tensor:
        return ((obs - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)

    @torch.no_grad()
    def learn_scale(self, obs: torch.Tensor) -> None:
        """Adds a batch to the running mean and variance (Chan, Golub and LeVeque, 1983)."""
        share = len(obs) / (self.count + len(obs))
        delta = obs.mean(0) - self.mean
        self.var += share * (obs.var(0, correction=0) - self.var + (1 - share) * delta.square())
        self.mean += share * delta
        self.count += len(obs)

    def distribution(self, obs: torch.Tensor) -> Distribution:
        out = self.actor(self.scale(obs))
        return Categorical(logits=out) if self.discrete else Independent(Normal(out, self.log_std.exp()), 1)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.critic(self.scale(obs))
        return value.squeeze(-1)


@torch.no_grad()
def play(seed: int) -> dict[str, Any]:  # +  of the episode: it is then the same on any rank
    """Plays one episode. Returns its rows, tensors whose first axis is steps, and the sum of its rewards."""
    obs, terminated, truncated = torch.as_tensor(env.reset(seed=seed)[0], dtype=torch.float32), False, False  # +
    rows: dict[str, list[torch.Tensor]] = {"obs": [], "act": [], "logp": [], "value": [], "rew": []}
    while not (terminated or truncated):
        # one row per call: in a batch, a row's last bits depend on the number of rows
        dist = agent.distribution(obs)
        act = dist.sample()
        next_obs, rew, terminated, truncated, _ = env.step(act.numpy())
        for key, x in zip(rows, (obs, act, dist.log_prob(act), agent.value(obs), torch.tensor(float(rew)))):
            rows[key].append(x)
        obs = torch.as_tensor(next_obs, dtype=torch.float32)
    episode = {key: torch.stack(tensors) for key, tensors in rows.items()}
    last_value = torch.zeros(()) if terminated else agent.value(obs)  # a truncated episode has a future
    episode["adv"] = gae(episode["rew"], episode["value"], last_value)
    return episode | {"returns": episode["rew"].sum()}


def gae(rew: torch.Tensor, value: torch.Tensor, last_value: torch.Tensor) -> torch.Tensor:
    """Generalised advantage estimates, shape (n_steps,), of one episode (Schulman et al., arXiv 1506.02438)."""
    delta = rew + args.gamma * torch.cat([value[1:], last_value[None]]) - value
    adv, running = torch.zeros_like(delta), torch.zeros(())
    for t in reversed(range(len(delta))):
        running = delta[t] + args.gamma * args.lam * running
        adv[t] = running
    return adv


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """Epochs of minibatches with the clipped objective."""
    for _ in range(args.epochs):
        for rows in torch.randperm(len(batch["obs"])).split(args.minibatch_size):
            obs, act, old_logp, adv = (batch[key][rows] for key in ("obs", "act", "logp", "adv"))
            ret = adv + batch["value"][rows]
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
            dist = agent.distribution(obs)
            ratio = (dist.log_prob(act) - old_logp).exp()
            policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - args.clip, 1 + args.clip) * adv).mean()
            value_loss = 0.5 * (agent.value(obs) - ret).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - args.ent_coef * dist.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


torch.manual_seed(args.seed)
env: Any = gym.wrappers.FlattenObservation(gym.make(args.env))
if isinstance(env.action_space, gym.spaces.Box):
    env = gym.wrappers.ClipAction(env)
agent = Agent(env)
optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
total_steps, iteration, stop = 0, 0, False
while total_steps < args.total_steps and not mpi_util.all_sum(stop):  # +  when one rank stops, all do
    iteration += 1
    batch = mpi_util.collect(play, episodes=args.episodes, weights=agent, seed=args.seed)  # +
    total_steps = mpi_util.collected.steps  # +  of all ranks, the same on each
    if batch is None:  # +  this is not rank 0
        continue  # +
    update(agent, optimizer, batch)
    agent.learn_scale(batch["obs"])  # from all ranks' rows; normalizers updated on each rank would drift apart
    stop = bool(batch["returns"].mean() >= args.stop_at)
    print(f"iteration {iteration}: return {batch['returns'].mean():.1f}, {total_steps} steps")

mpi_util.print0("checksum", mpi_util.chksum(agent))  # +
