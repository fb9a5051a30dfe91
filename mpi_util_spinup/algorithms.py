"""PPO (arXiv:1707.06347), VPG and TRPO (arXiv:1502.05477) with GAE (arXiv:1506.02438), by averaged gradients.

Every rank collects and updates. Arguments, defaults, columns of the table and, for PPO and VPG, all bits are those of
Spinning Up's programs over `logx`, `mpi_tools` and `mpi_pytorch` of this package. Three things differ: environments are
Gymnasium's and are seeded; where the environment truncates an episode, the last state's value counts; and a number of
steps that is no multiple of the number of ranks is dealt out, not cut.
"""

import itertools
import numbers
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Normal
from torch.optim import Adam

from mpi_util.errors import UsageError, whole_number

from .logx import EpochLogger
from .mpi_pytorch import mpi_avg_grads, setup_pytorch_for_mpi, sync_params
from .mpi_tools import mpi_avg, mpi_statistics_scalar, num_procs, proc_id

Data = dict[str, torch.Tensor]
Loss = tuple[torch.Tensor, dict[str, float]]  # and columns of the table
_NO_NUMBERS = {"env_fn", "actor_critic", "ac_kwargs", "logger_kwargs", "algo"}


def discount_cumsum(x: np.ndarray, discount: float) -> np.ndarray:
    """y[t] = x[t] + discount * y[t + 1], float64 (T,)."""
    backward = itertools.accumulate(np.array(x, np.float64)[::-1], lambda after, now: now + discount * after)
    return np.array([*backward])[::-1]


def mlp(sizes: Sequence[int], activation: Any) -> nn.Sequential:
    """Linear layers of these widths, the input's and the output's among them, with activations between them."""
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*layers[:-1])


class MLPActor(nn.Module):
    """A policy for Discrete or Box actions: `forward` gives their distribution, and log-probabilities of some.

    The standard deviations of a Box action's parts do not depend on the state.
    """

    def __init__(self, obs_dim: int, action_space: Any, hidden_sizes: Sequence[int], activation: Any):
        super().__init__()
        self.discrete = hasattr(action_space, "n")
        act_dim = int(action_space.n) if self.discrete else action_space.shape[0]
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))
        self.net = mlp([obs_dim, *hidden_sizes, act_dim], activation)

    def forward(self, obs: torch.Tensor, act: torch.Tensor | None = None) -> tuple[Distribution, Any]:
        out = self.net(obs)
        pi = Categorical(logits=out) if self.discrete else Normal(out, self.log_std.exp())
        return pi, None if act is None else self.log_prob(pi, act)

    def log_prob(self, pi: Distribution, act: torch.Tensor) -> torch.Tensor:
        logp = pi.log_prob(act)
        return logp if self.discrete else logp.sum(-1)  # over the parts of an action


class MLPCritic(nn.Module):
    def __init__(self, obs_dim: int, hidden_sizes: Sequence[int], activation: Any):
        super().__init__()
        self.v_net = mlp([obs_dim, *hidden_sizes, 1], activation)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.squeeze(self.v_net(obs), -1)


class MLPActorCritic(nn.Module):
    """Policy `pi` and value function `v` for these spaces."""

    def __init__(
        self, observation_space: Any, action_space: Any, hidden_sizes: Sequence[int] = (64, 64),
        activation: Any = nn.Tanh,
    ):  # fmt: skip
        super().__init__()
        widths = list(hidden_sizes) if isinstance(hidden_sizes, Iterable) else [0]
        if not all(isinstance(width, numbers.Integral) and width > 0 for width in widths):
            raise UsageError(f"hidden_sizes are the widths of the layers, such as [64,64]; got {hidden_sizes!r}")
        if not callable(activation):
            raise UsageError(f"activation is a class of torch.nn, such as torch.nn.Tanh; got {activation!r}")
        obs_dim = observation_space.shape[0]
        self.pi = MLPActor(obs_dim, action_space, hidden_sizes, activation)
        self.v = MLPCritic(obs_dim, hidden_sizes, activation)

    @torch.no_grad()
    def step(self, obs: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A drawn action for an observation, the state's value, the action's log-probability."""
        pi, _ = self.pi(obs)
        act = pi.sample()
        return act.numpy(), self.v(obs).numpy(), self.pi.log_prob(pi, act).numpy()

    def act(self, obs: torch.Tensor) -> np.ndarray:
        return self.step(obs)[0]


class PPOBuffer:
    """The steps of an epoch on this rank; `get` gives them with advantages (GAE-lambda) and rewards-to-go."""

    def __init__(self, obs_dim: Any, act_dim: Any, size: int, gamma: float = 0.99, lam: float = 0.95):
        self.obs_buf = np.zeros((size, *np.empty(obs_dim).shape), np.float32)
        self.act_buf = np.zeros((size, *np.empty(act_dim).shape), np.float32)
        self.adv_buf, self.rew_buf, self.ret_buf, self.val_buf, self.logp_buf = np.zeros((5, size), np.float32)
        self.gamma, self.lam = gamma, lam
        self.ptr, self.path_start_idx, self.max_size = 0, 0, size

    def store(self, obs: Any, act: Any, rew: Any, val: Any, logp: Any) -> None:
        i = self.ptr
        self.obs_buf[i], self.act_buf[i], self.rew_buf[i], self.val_buf[i], self.logp_buf[i] = obs, act, rew, val, logp
        self.ptr += 1

    def finish_path(self, last_val: Any = 0) -> None:
        """Call it where an episode ends or is cut. Args: last_val: value of the state after it; 0: it has ended."""
        path = slice(self.path_start_idx, self.ptr)
        rews, vals = np.append(self.rew_buf[path], last_val), np.append(self.val_buf[path], last_val)
        deltas = rews[:-1] + self.gamma * vals[1:] - vals[:-1]
        self.adv_buf[path] = discount_cumsum(deltas, self.gamma * self.lam)
        self.ret_buf[path] = discount_cumsum(rews, self.gamma)[:-1]
        self.path_start_idx = self.ptr

    def get(self) -> Data:
        """Collective: the full buffer, advantages with mean 0 and deviation 1 over all ranks; empties it."""
        if self.ptr != self.max_size:
            raise UsageError(f"PPOBuffer.get: {self.ptr} of {self.max_size} steps are stored; the buffer must be full")
        self.ptr = self.path_start_idx = 0
        mean, std = mpi_statistics_scalar(self.adv_buf)
        self.adv_buf[:] = (self.adv_buf - mean) / (std or 1.0)
        return {key: torch.as_tensor(getattr(self, f"{key}_buf")) for key in ("obs", "act", "ret", "adv", "logp")}


VPGBuffer = PPOBuffer


def ppo(
    env_fn: Callable[[], Any], actor_critic: Any = MLPActorCritic, ac_kwargs: Any = None, seed: int = 0,
    steps_per_epoch: int = 4000, epochs: int = 50, gamma: float = 0.99, clip_ratio: float = 0.2, pi_lr: float = 3e-4,
    vf_lr: float = 1e-3, train_pi_iters: int = 80, train_v_iters: int = 80, lam: float = 0.97, max_ep_len: int = 1000,
    target_kl: float = 0.01, logger_kwargs: Any = None, save_freq: int = 10,
) -> None:  # fmt: skip
    """Collective: PPO with clipped ratios, which stops an epoch's policy steps at a mean KL of 1.5 `target_kl`."""
    run = _Run(locals())
    optimizer = Adam(run.ac.pi.parameters(), lr=pi_lr)

    def gain(logp: torch.Tensor, data: Data) -> tuple[torch.Tensor, dict[str, float]]:
        ratio = torch.exp(logp - data["logp"])
        clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
        clip_frac = (ratio != clipped).float().mean().item()
        return torch.min(ratio * data["adv"], clipped * data["adv"]), {"ClipFrac": clip_frac}

    def improve(data: Data, loss: Loss) -> Loss:
        i = 0
        for i in range(train_pi_iters):
            loss = run.policy_loss(data)
            if mpi_avg(loss[1]["KL"]) > 1.5 * target_kl:
                run.logger.log(f"Early stopping at step {i} due to reaching max kl.")
                break
            _descend(optimizer, loss[0], run.ac.pi)
        run.logger.store(StopIter=i)
        return loss

    run.train(gain, improve, "ClipFrac", "StopIter")


def vpg(
    env_fn: Callable[[], Any], actor_critic: Any = MLPActorCritic, ac_kwargs: Any = None, seed: int = 0,
    steps_per_epoch: int = 4000, epochs: int = 50, gamma: float = 0.99, pi_lr: float = 3e-4, vf_lr: float = 1e-3,
    train_v_iters: int = 80, lam: float = 0.97, max_ep_len: int = 1000, logger_kwargs: Any = None, save_freq: int = 10,
) -> None:  # fmt: skip
    """Collective: one step of the policy gradient per epoch."""
    run = _Run(locals())
    optimizer = Adam(run.ac.pi.parameters(), lr=pi_lr)

    def improve(data: Data, loss: Loss) -> Loss:
        _descend(optimizer, loss[0], run.ac.pi)
        return loss  # from before the step, as in Spinning Up

    run.train(lambda logp, data: (logp * data["adv"], {}), improve)


def trpo(
    env_fn: Callable[[], Any], actor_critic: Any = MLPActorCritic, ac_kwargs: Any = None, seed: int = 0,
    steps_per_epoch: int = 4000, epochs: int = 50, gamma: float = 0.99, delta: float = 0.01, vf_lr: float = 1e-3,
    train_v_iters: int = 80, damping_coeff: float = 0.1, cg_iters: int = 10, backtrack_iters: int = 10,
    backtrack_coeff: float = 0.8, lam: float = 0.97, max_ep_len: int = 1000, logger_kwargs: Any = None,
    save_freq: int = 10, algo: str = "trpo",
) -> None:  # fmt: skip
    """Collective: a natural gradient step per epoch, to a mean KL of `delta`. Args: algo: "npg": no line search."""
    run = _Run(locals())
    weights = list(run.ac.pi.parameters())

    def improve(data: Data, loss: Loss) -> Loss:
        with torch.no_grad():
            old, _ = run.ac.pi(data["obs"])
            start = flat(weights).clone()

        def divergence() -> torch.Tensor:
            kl = torch.distributions.kl_divergence(old, run.ac.pi(data["obs"])[0])
            return kl.reshape(len(data["obs"]), -1).sum(-1).mean()  # over the parts of an action

        slope = flat(torch.autograd.grad(divergence(), weights, create_graph=True))

        def hessian(v: torch.Tensor) -> Any:
            return mpi_avg(flat(torch.autograd.grad(slope @ v, weights, retain_graph=True))) + damping_coeff * v

        x = _conjugate_gradient(hessian, mpi_avg(flat(torch.autograd.grad(loss[0], weights))), cg_iters)
        step = torch.sqrt(2 * delta / (x @ hessian(x) + 1e-8)) * x
        before, i = mpi_avg(loss[0].item()), 0
        for i in range(1 if algo == "npg" else backtrack_iters):
            torch.nn.utils.vector_to_parameters(start - backtrack_coeff**i * step, weights)
            with torch.no_grad():
                found = run.policy_loss(data)
                kl, after = mpi_avg(divergence().item()), mpi_avg(found[0].item())
            if algo == "npg" or (kl <= delta and after <= before):
                run.logger.log(f"Accepting new params at step {i} of line search.")
                break
        else:
            run.logger.log("Line search failed! Keeping old params.")
            torch.nn.utils.vector_to_parameters(start, weights)
            found = loss
        run.logger.store(BacktrackIters=i)
        return found

    def flat(tensors: Any) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    run.train(lambda logp, data: (torch.exp(logp - data["logp"]) * data["adv"], {}), improve, "BacktrackIters")


def _conjugate_gradient(product: Callable[[torch.Tensor], torch.Tensor], b: torch.Tensor, iters: int) -> torch.Tensor:
    """x where product(x) = b, after some iterations (Hestenes and Stiefel 1952)."""
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), r @ r
    for _ in range(iters):
        z = product(p)
        alpha = rr / (p @ z + 1e-8)
        x, r = x + alpha * p, r - alpha * z
        new = r @ r
        p, rr = r + (new / (rr + 1e-8)) * p, new
    return x


def _descend(optimizer: Adam, loss: torch.Tensor, module: torch.nn.Module) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    mpi_avg_grads(module)
    optimizer.step()


class _Run:
    """What the algorithms share: environment, networks, buffer, logger, and the loop. Args: given: all arguments."""

    def __init__(self, given: dict[str, Any]):
        least = {"seed": 0, "epochs": 1, "steps_per_epoch": num_procs(), "save_freq": 1}
        for name in given.keys() - _NO_NUMBERS:
            if name in least or name.endswith("_iters"):  # with 0 iterations a network stays as it is
                whole_number(name, given[name], least.get(name, 0))
            elif not isinstance(given[name], numbers.Real):
                raise UsageError(f"{name} is a number; got {given[name]!r}")
        setup_pytorch_for_mpi()
        self.given = given
        self.logger = EpochLogger(**(given["logger_kwargs"] or {}))
        self.logger.save_config(given)
        seed = given["seed"] + 10000 * proc_id()
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.env = given["env_fn"]()
        self.obs = self.env.reset(seed=seed)[0]
        spaces = self.env.observation_space, self.env.action_space
        self.ac = given["actor_critic"](*spaces, **(given["ac_kwargs"] or {}))
        sync_params(self.ac)
        pi, v = (sum(p.numel() for p in module.parameters()) for module in (self.ac.pi, self.ac.v))
        self.logger.log(f"\nNumber of parameters: \t pi: {pi}, \t v: {v}\n")
        steps = len(range(proc_id(), given["steps_per_epoch"], num_procs()))
        self.buf = PPOBuffer(spaces[0].shape, spaces[1].shape, steps, given["gamma"], given["lam"])
        self.vf_optimizer = Adam(self.ac.v.parameters(), lr=given["vf_lr"])
        self.logger.setup_pytorch_saver(self.ac)

    def train(self, gain: Any, improve: Callable[[Data, Loss], Loss], *columns: str) -> None:
        """Collective: the epochs. Args: columns: those that `gain` and `improve` add to the table.

        `gain` takes the actions' log-probabilities and the data, and returns what the policy is to increase, shape
        (steps,), and its columns. `improve` takes the data and the policy's loss, and returns the last loss.
        """
        self.gain = gain
        given, logger, start = self.given, self.logger, time.time()
        for epoch in range(given["epochs"]):
            self._collect()
            if epoch % given["save_freq"] == 0 or epoch == given["epochs"] - 1:
                logger.save_state({"env": self.env}, None)
            self._update(improve)
            logger.log_tabular("Epoch", epoch)
            logger.log_tabular("EpRet", with_min_and_max=True)
            logger.log_tabular("EpLen", average_only=True)
            logger.log_tabular("VVals", with_min_and_max=True)
            logger.log_tabular("TotalEnvInteracts", (epoch + 1) * given["steps_per_epoch"])
            for key in ("LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL", *columns):
                logger.log_tabular(key, average_only=True)
            logger.log_tabular("Time", time.time() - start)
            logger.dump_tabular()

    def _collect(self) -> None:
        ep_ret, ep_len = 0.0, 0
        for t in range(self.buf.max_size):
            a, v, logp = self.ac.step(torch.as_tensor(self.obs, dtype=torch.float32))
            following, r, terminated, truncated, _ = self.env.step(a)
            ep_ret, ep_len = ep_ret + float(r), ep_len + 1
            self.buf.store(self.obs, a, r, v, logp)
            self.logger.store(VVals=v)
            self.obs = following
            stopped = ep_len == self.given["max_ep_len"] or t == self.buf.max_size - 1
            if terminated or truncated or stopped:
                known = terminated and not stopped  # as in Spinning Up, which asks v wherever an epoch ends
                self.buf.finish_path(0 if known else self.ac.step(torch.as_tensor(self.obs, dtype=torch.float32))[1])
                if terminated or truncated or ep_len == self.given["max_ep_len"]:
                    self.logger.store(EpRet=ep_ret, EpLen=ep_len)
                self.obs, ep_ret, ep_len = self.env.reset()[0], 0.0, 0

    def _update(self, improve: Callable[[Data, Loss], Loss]) -> None:
        data = self.buf.get()
        before, before_v = self.policy_loss(data), self._value_loss(data).item()
        loss, info = improve(data, before)
        loss_v = torch.tensor(before_v)
        for _ in range(self.given["train_v_iters"]):
            loss_v = self._value_loss(data)
            _descend(self.vf_optimizer, loss_v, self.ac.v)
        pi = before[0].item()
        changes = {"DeltaLossPi": loss.item() - pi, "DeltaLossV": loss_v.item() - before_v}
        self.logger.store(LossPi=pi, LossV=before_v, **changes, **info | {"Entropy": before[1]["Entropy"]})

    def policy_loss(self, data: Data) -> Loss:
        """The loss of the policy, and the columns KL, Entropy and those of `gain`."""
        pi, logp = self.ac.pi(data["obs"], data["act"])
        gain, info = self.gain(logp, data)
        info |= {"KL": (data["logp"] - logp).mean().item(), "Entropy": pi.entropy().mean().item()}
        return -gain.mean(), info

    def _value_loss(self, data: Data) -> torch.Tensor:
        loss: torch.Tensor = ((self.ac.v(data["obs"]) - data["ret"]) ** 2).mean()
        return loss
