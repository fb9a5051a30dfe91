"""PPO on Humanoid-v4 as Spinning Up does it, on plain mpi4py and torch. No part of mpi_util.

    mpiexec -n 2 python benchmarks/spinup_loop.py --iterations 6 --skip 2 --out FILE

Every rank collects and updates: one inference of torch for each step, full-batch updates, and each parameter's gradient
averaged in a blocking Allreduce of its own. Writes its rate and its versions as JSON.
"""

import argparse
import json
import os
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.distributions import Normal

STEPS_PER_ITERATION = 4000  # over all ranks
PI_STEPS, V_STEPS = 80, 80  # the settings of Spinning Up's ppo
CLIP, TARGET_KL, PI_LR, V_LR, GAMMA, LAM = 0.2, 0.01, 3e-4, 1e-3, 0.99, 0.97
HIDDEN = 64

COMM = MPI.COMM_WORLD


class ActorCritic(nn.Module):
    """Two nets of 2x64 with tanh, and the policy's deviations."""

    def __init__(self, obs_dim: int, act_dim: int):
        super().__init__()
        self.mu, self.v = mlp(obs_dim, act_dim), mlp(obs_dim, 1)
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def pi(self, obs: torch.Tensor) -> Normal:
        return Normal(self.mu(obs), self.log_std.exp())

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.v(obs).squeeze(-1)

    @torch.no_grad()
    def step(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An action for one observation, the value, the action's log-probability."""
        obs = torch.as_tensor(obs, dtype=torch.float32)
        pi = self.pi(obs)
        act = pi.sample()
        return act.numpy(), self.value(obs).numpy(), pi.log_prob(act).sum(-1).numpy()


def mlp(n_in: int, n_out: int) -> nn.Sequential:
    """Dense layers, tanh between them."""
    return nn.Sequential(
        nn.Linear(n_in, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, n_out)
    )


def mpi_sum(x) -> np.ndarray:
    """The sum over the ranks, in float32."""
    own = np.asarray(x, np.float32)
    total = np.zeros_like(own)
    COMM.Allreduce(own, total, op=MPI.SUM)
    return total


def avg_grads(parameters: list[nn.Parameter]) -> None:
    """Averages gradients over the ranks, one parameter after another."""
    if COMM.size > 1:
        for p in parameters:
            grad = p.grad.numpy()
            grad[:] = mpi_sum(grad) / COMM.size


def mean_std(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the samples of all ranks."""
    total, n = mpi_sum([np.sum(x), len(x)])
    mean = total / n
    return mean, np.sqrt(mpi_sum(np.sum((x - mean) ** 2)) / n)


def discount(x: np.ndarray, factor: float) -> np.ndarray:
    """y[t] = x[t] + factor * y[t + 1]."""
    y = x.astype(np.float64)
    for t in range(len(y) - 2, -1, -1):
        y[t] += factor * y[t + 1]
    return y


def collect(env: gym.Env, ac: ActorCritic, n_steps: int) -> dict[str, torch.Tensor]:
    """This rank's part of an iteration."""
    obs_buf = np.zeros((n_steps, *env.observation_space.shape), np.float32)
    act_buf = np.zeros((n_steps, *env.action_space.shape), np.float32)
    rew_buf, val_buf, logp_buf, adv, ret = np.zeros((5, n_steps), np.float32)
    obs, start, returns = env.reset()[0], 0, []
    for t in range(n_steps):
        act, val, logp = ac.step(obs)
        obs_buf[t], act_buf[t], val_buf[t], logp_buf[t] = obs, act, val, logp
        obs, rew_buf[t], terminated, truncated, _ = env.step(act)
        if terminated or truncated or t == n_steps - 1:
            last = 0.0 if terminated else ac.step(obs)[1]
            path = slice(start, t + 1)
            rews, vals = np.append(rew_buf[path], last), np.append(val_buf[path], last)
            adv[path] = discount(rews[:-1] + GAMMA * vals[1:] - vals[:-1], GAMMA * LAM)
            ret[path] = discount(rews, GAMMA)[:-1]
            returns.append(rew_buf[path].sum())
            obs, start = env.reset()[0], t + 1
    mean_std(np.array(returns))  # for the log
    mean, std = mean_std(adv)
    adv = (adv - mean) / std
    data = {"obs": obs_buf, "act": act_buf, "adv": adv, "ret": ret, "logp": logp_buf}
    return {key: torch.as_tensor(value, dtype=torch.float32) for key, value in data.items()}


def update(ac: ActorCritic, optimizers: tuple, data: dict[str, torch.Tensor]) -> int:
    """Policy steps until the KL stop, then value steps. Returns how many policy steps there were."""
    pi_optimizer, v_optimizer = optimizers
    pi_parameters, v_parameters = [*ac.mu.parameters(), ac.log_std], [*ac.v.parameters()]
    n_pi_steps = 0
    while n_pi_steps < PI_STEPS:
        pi_optimizer.zero_grad()
        pi = ac.pi(data["obs"])
        logp = pi.log_prob(data["act"]).sum(-1)
        ratio = torch.exp(logp - data["logp"])
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.min(ratio * data["adv"], clipped * data["adv"]).mean()
        kl = (data["logp"] - logp).mean().item()
        (pi.entropy().mean().item(), (ratio != clipped).float().mean().item())  # for the log, as in the original
        if mpi_sum(kl) / COMM.size > 1.5 * TARGET_KL:
            break
        loss.backward()
        avg_grads(pi_parameters)
        pi_optimizer.step()
        n_pi_steps += 1
    for _ in range(V_STEPS):
        v_optimizer.zero_grad()
        ((ac.value(data["obs"]) - data["ret"]) ** 2).mean().backward()
        avg_grads(v_parameters)
        v_optimizer.step()
    return n_pi_steps


def main() -> None:
    """Trains, and writes steps per second over the iterations after the first --skip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Humanoid-v4")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // COMM.size))
    torch.manual_seed(10000 * COMM.rank)
    np.random.seed(10000 * COMM.rank)
    env = gym.make(args.env, disable_env_checker=True)
    env.reset(seed=10000 * COMM.rank)
    ac = ActorCritic(env.observation_space.shape[0], env.action_space.shape[0])
    for p in ac.parameters():
        COMM.Bcast(p.data.numpy(), root=0)
    optimizers = (
        torch.optim.Adam([*ac.mu.parameters(), ac.log_std], lr=PI_LR),
        torch.optim.Adam(ac.v.parameters(), lr=V_LR),
    )
    n_own = len(range(COMM.rank, STEPS_PER_ITERATION, COMM.size))
    at, pi_steps = [time.perf_counter()], []
    for _ in range(args.iterations):
        pi_steps.append(update(ac, optimizers, collect(env, ac, n_own)))
        COMM.Barrier()
        at.append(time.perf_counter())
    if COMM.rank == 0:
        steps_per_s = STEPS_PER_ITERATION * (args.iterations - args.skip) / (at[-1] - at[args.skip])
        packages = ("mpi4py", "torch", "gymnasium", "mujoco", "numpy")
        found = {package: version(package) for package in packages}
        found["mpi"] = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        args.out.write_text(json.dumps({"steps_per_s": steps_per_s, "pi_steps": pi_steps, "versions": found}))


if __name__ == "__main__":
    main()
