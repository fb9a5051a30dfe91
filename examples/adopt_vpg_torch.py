"""The vanilla policy gradient with torch in the manner of Spinning Up: one policy step an epoch, gradients averaged.

python examples/adopt_vpg_torch.py --env CartPole-v1 --cpu 4
"""

import core
import torch
from core_torch import ActorCritic, count_vars

from mpi_util import chksum
from mpi_util.logx import EpochLogger
from mpi_util.mpi_pytorch import mpi_avg_grads, setup_pytorch_for_mpi, sync_params


def vpg(
    env_fn,
    ac_kwargs=None,
    seed=0,
    steps_per_epoch=2000,
    epochs=20,
    gamma=0.99,
    lam=0.97,
    pi_lr=3e-3,
    vf_lr=1e-3,
    train_v_iters=80,
    save_freq=10,
    check=False,
    logger_kwargs=None,
):
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

    def take_step(module, optimizer, compute_loss):
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        mpi_avg_grads(module)
        optimizer.step()

    def update():
        data = {key: torch.as_tensor(value) for key, value in buf.get().items()}

        def compute_loss_pi():
            return -(ac.pi(data["obs"]).log_prob(data["act"]) * data["adv"]).mean()

        def compute_loss_v():
            return ((ac.v(data["obs"]) - data["ret"]) ** 2).mean()

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
