"""PPO with torch in the manner of Spinning Up: every rank collects and updates, with gradients averaged over the ranks.

    python examples/adopt_ppo_torch.py --env CartPole-v1 --cpu 4

The loss is that of arXiv 1707.06347, eq. 7; an epoch's policy steps end when the new policy is too far from the old.
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
from mpi_util_spinup.mpi_tools import mpi_avg


def ppo(
    env_fn: Callable[[], gym.Env],
    ac_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    steps_per_epoch: int = 2000,
    epochs: int = 20,
    gamma: float = 0.99,
    lam: float = 0.97,
    clip_ratio: float = 0.2,
    pi_lr: float = 3e-4,
    vf_lr: float = 1e-3,
    train_pi_iters: int = 80,
    train_v_iters: int = 80,
    target_kl: float = 0.01,
    save_freq: int = 10,
    check: bool = False,
    logger_kwargs: dict[str, Any] | None = None,
) -> None:
    """Trains, and leaves table, configuration and model in the logger's folder.

    Args:
        env_fn: makes an environment.
        ac_kwargs: of ActorCritic.
        steps_per_epoch: of all ranks together.
        target_kl: policy steps end at 1.5 times this distance, estimated from the samples of all ranks.
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

    def compute_loss_pi(data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        pi = ac.pi(data["obs"])
        logp = pi.log_prob(data["act"])
        ratio = torch.exp(logp - data["logp"])
        clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
        loss = -torch.min(ratio * data["adv"], clipped * data["adv"]).mean()
        with torch.no_grad():
            info = {
                "KL": (data["logp"] - logp).mean().item(),
                "Entropy": pi.entropy().mean().item(),
                "ClipFrac": (ratio != clipped).float().mean().item(),
            }
        return loss, info

    def compute_loss_v(data: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.mean((ac.v(data["obs"]) - data["ret"]) ** 2)

    def update() -> None:
        data = {key: torch.as_tensor(value) for key, value in buf.get().items()}
        pi_losses: list[float] = []
        v_losses: list[float] = []
        info: dict[str, float] = {}
        for i in range(train_pi_iters):
            pi_optimizer.zero_grad()
            loss_pi, info = compute_loss_pi(data)
            pi_losses.append(loss_pi.item())
            if mpi_avg(info["KL"]) > 1.5 * target_kl:
                logger.log(f"Early stopping at step {i}: the policy has moved far enough")
                break
            loss_pi.backward()
            mpi_avg_grads(ac.pi)
            pi_optimizer.step()
        for _ in range(train_v_iters):
            vf_optimizer.zero_grad()
            loss_v = compute_loss_v(data)
            v_losses.append(loss_v.item())
            loss_v.backward()
            mpi_avg_grads(ac.v)
            vf_optimizer.step()
        logger.store(LossPi=pi_losses[0], DeltaLossPi=pi_losses[-1] - pi_losses[0], StopIter=len(pi_losses) - 1)
        logger.store(LossV=v_losses[0], DeltaLossV=v_losses[-1] - v_losses[0], **info)

    core.train(env, ac.step, buf, update, logger, epochs, steps_per_epoch, save_freq, columns=("ClipFrac", "StopIter"))
    if check:
        chksum(ac, "weights")


if __name__ == "__main__":
    core.main(__doc__, "ppo_torch", ppo)
