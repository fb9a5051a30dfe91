"""The vanilla policy gradient with torch in the manner of Spinning Up: one policy step an epoch, gradients averaged.

python examples/adopt_vpg_torch.py --env CartPole-v1 --cpu 4
"""

from collections.abc import Callable
from typing import Any

import core
import gymnasium as gym
import torch
from core_torch import ActorCritic, count_vars

from mpi_util import chksum
from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_pytorch import mpi_avg_grads, setup_pytorch_for_mpi, sync_params


def vpg(
    env_fn: Callable[[], gym.Env],
    ac_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    steps_per_epoch: int = 2000,
    epochs: int = 20,
    gamma: float = 0.99,
    lam: float = 0.97,
    pi_lr: float = 3e-3,
    vf_lr: float = 1e-3,
    train_v_iters: int = 80,
    save_freq: int = 10,
    check: bool = False,
    logger_kwargs: dict[str, Any] | None = None,
) -> None:
    """Trains, and leaves table, configuration and model in the logger's folder.

    Args:
        env_fn: makes an environment.
        ac_kwargs: of ActorCritic.
        steps_per_epoch: of all ranks together.
        check: print each rank's checksum at the end.
    """
    setup_pytorch_for_mpi()
    logger = EpochLogger(**(logger_kwargs or {}))
    logger.save_config(locals())
    env = core.seeded_env(env_fn, seed, torch.manual_seed)
    ac = ActorCritic(env.observation_space, env.action_space, **(ac_kwargs or {}))
    sync_params(ac)
    logger.log(f"Number of parameters: pi {count_vars(ac.pi)}, v {count_vars(ac.v)}")
    pi_optimizer = torch.optim.Adam(ac.pi.parameters(), lr=pi_lr)
    vf_optimizer = torch.optim.Adam(ac.v.parameters(), lr=vf_lr)
    logger.setup_pytorch_saver(ac)
    buf = core.Buffer(env, core.share_of_steps(steps_per_epoch), gamma, lam)

    def take_step(
        module: torch.nn.Module, optimizer: torch.optim.Optimizer, compute_loss: Callable[[], torch.Tensor]
    ) -> None:
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        mpi_avg_grads(module)
        optimizer.step()

    def update() -> None:
        data = {key: torch.as_tensor(value) for key, value in buf.get().items()}

        def compute_loss_pi() -> torch.Tensor:
            return -torch.mean(ac.pi(data["obs"]).log_prob(data["act"]) * data["adv"])

        def compute_loss_v() -> torch.Tensor:
            return torch.mean((ac.v(data["obs"]) - data["ret"]) ** 2)

        with torch.no_grad():
            before = compute_loss_pi().item(), compute_loss_v().item()
        take_step(ac.pi, pi_optimizer, compute_loss_pi)
        for _ in range(train_v_iters):
            take_step(ac.v, vf_optimizer, compute_loss_v)
        with torch.no_grad():
            after = compute_loss_pi().item(), compute_loss_v().item()
            pi = ac.pi(data["obs"])
            kl = (data["logp"] - pi.log_prob(data["act"])).mean()
        logger.store(LossPi=before[0], LossV=before[1], KL=kl, Entropy=pi.entropy().mean())
        logger.store(DeltaLossPi=after[0] - before[0], DeltaLossV=after[1] - before[1])

    core.train(env, ac.step, buf, update, logger, epochs, steps_per_epoch, save_freq)
    if check:
        chksum(ac, "weights")


if __name__ == "__main__":
    core.main(__doc__, "vpg_torch", vpg)
