"""The update on rank 0's GPU, the rollouts on the CPU: no other process opens the GPU.

    python examples/gpu_on_rank0.py --env CartPole-v1 --nprocs 4
    python examples/gpu_on_rank0.py --env Humanoid-v5 --nprocs 10 --hidden 1024 --episodes 100
    mpiexec -n 4 python examples/gpu_on_rank0.py --device cpu

A process that only opens the GPU takes some hundred megabytes of its memory, and a forward pass for a single
observation is slower there than on the CPU. So every rank acts with a copy of the policy in its own memory (`actor`),
and rank 0 has a second one on the GPU (`learner`), which it updates and copies back. Without a GPU the learner is on
the CPU. Results are bit-identical on any number of processes with the same device. To keep torch itself out of the
workers, act with NumPy as keras_reinforce.py does. PPO with full batches, as in Spinning Up.
"""

import argparse
import sys
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--episodes", type=int, default=20, help="an iteration, all ranks together (default: 20)")
parser.add_argument("--iterations", type=int, default=10, help="(default: 10)")
parser.add_argument("--hidden", type=int, default=128, help="units in each of two layers (default: 128)")
parser.add_argument("--device", default="", help="of rank 0's update (default: cuda if there is one, or else cpu)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # +
    sys.exit()  # +

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

GAMMA, CLIP, LR, UPDATE_STEPS = 0.99, 0.2, 3e-3, 40


class Policy(nn.Module):
    """A distribution over actions, and the value of an observation."""

    def __init__(self, n_obs: int, n_act: int, discrete: bool):
        super().__init__()
        self.discrete = discrete
        width = args.hidden
        self.body = nn.Sequential(nn.Linear(n_obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.act, self.value = nn.Linear(width, n_act), nn.Linear(width, 1)
        self.log_std = nn.Parameter(torch.zeros(n_act))

    def forward(self, obs: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
        hidden = self.body(obs)
        out = self.act(hidden)
        dist = Categorical(logits=out) if self.discrete else Independent(Normal(out, self.log_std.exp()), 1)
        return dist, self.value(hidden).squeeze(-1)


@torch.no_grad()
def play(seed: int) -> dict[str, Any]:
    """Plays one episode. Returns its rows, CPU tensors whose first axis is steps, and the sum of its rewards."""
    obs, _ = env.reset(seed=seed)
    observes, actions, rewards, terminated, truncated = [], [], [], False, False
    while not (terminated or truncated):
        observes.append(torch.as_tensor(obs, dtype=torch.float32))
        actions.append(actor(observes[-1])[0].sample())  # one row per call: bit-identical on every rank
        obs, rew, terminated, truncated, _ = env.step(actions[-1].numpy())
        rewards.append(float(rew))
    to_go = 0.0 if terminated else float(actor(torch.as_tensor(obs, dtype=torch.float32))[1])
    ret = torch.empty(len(rewards))
    for t in reversed(range(len(rewards))):
        to_go = rewards[t] + GAMMA * to_go
        ret[t] = to_go
    return {"obs": torch.stack(observes), "act": torch.stack(actions), "ret": ret, "returns": sum(rewards)}


def update(
    learner: Policy, optimizer: torch.optim.Optimizer, obs: torch.Tensor, act: torch.Tensor, ret: torch.Tensor
) -> None:
    """Full-batch steps with the clipped objective (Schulman et al., arXiv 1707.06347), on the learner's device."""
    with torch.no_grad():
        dist, value = learner(obs)
        old_logp, adv = dist.log_prob(act), ret - value
        adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
        scale = ret.std(correction=0) + 1e-8
    for _ in range(UPDATE_STEPS):
        dist, value = learner(obs)
        ratio = (dist.log_prob(act) - old_logp).exp()
        policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
        loss = policy_loss + 0.5 * ((value - ret) / scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.manual_seed(args.seed)
env: Any = gym.wrappers.FlattenObservation(gym.make(args.env))
discrete = isinstance(env.action_space, gym.spaces.Discrete)
env = env if discrete else gym.wrappers.ClipAction(env)
n_act = int(env.action_space.n) if discrete else env.action_space.shape[0]
actor = Policy(env.observation_space.shape[0], n_act, discrete)
device = "cpu"
if mpi_util.rank == 0:  # +  only here: even `cuda.is_available()` may open the GPU
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
learner = Policy(env.observation_space.shape[0], n_act, discrete).to(device)  # unused on other ranks
learner.load_state_dict(actor.state_dict())
optimizer = torch.optim.Adam(learner.parameters(), lr=LR)

for iteration in range(args.iterations):
    batch = mpi_util.collect(play, episodes=args.episodes, weights=actor, seed=args.seed)  # +
    if batch is None:  # +
        continue  # +
    update(learner, optimizer, *(batch[key].to(device) for key in ("obs", "act", "ret")))
    actor.load_state_dict(learner.state_dict())
    print(f"iteration {iteration}: return {batch['returns'].mean():.1f}, {len(batch['ret'])} steps on {device}")

assert mpi_util.rank == 0 or not torch.cuda.is_initialized(), "a worker has opened the GPU"  # +
mpi_util.msg("has CUDA open:", torch.cuda.is_initialized())  # +
mpi_util.print0("checksum", mpi_util.chksum(actor))  # +
