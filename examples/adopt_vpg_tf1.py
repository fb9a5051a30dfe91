"""The vanilla policy gradient with tf.compat.v1 in the manner of Spinning Up: one policy step an epoch.

python examples/adopt_vpg_tf1.py --env CartPole-v1 --cpu 4
"""

from collections.abc import Callable
from typing import Any

import core
import core_tf1
import gymnasium as gym
import tensorflow.compat.v1 as tf

import mpi_util
from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_tf import MpiAdamOptimizer

tf.disable_v2_behavior()


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
        ac_kwargs: of core_tf1.actor_critic.
        steps_per_epoch: of all ranks together.
        check: print each rank's checksum at the end.
    """
    logger = EpochLogger(**(logger_kwargs or {}))
    logger.save_config(locals())
    env = core.seeded_env(env_fn, seed, tf.set_random_seed)
    phs, ac = core_tf1.networks(env, logger, **(ac_kwargs or {}))
    obs_ph, act_ph, adv_ph, ret_ph, logp_old_ph = phs

    pi_loss = -tf.reduce_mean(ac.logp * adv_ph)
    v_loss = tf.reduce_mean((ret_ph - ac.v) ** 2)
    approx_kl = tf.reduce_mean(logp_old_ph - ac.logp)
    train_pi = MpiAdamOptimizer(learning_rate=pi_lr).minimize(pi_loss)
    train_v = MpiAdamOptimizer(learning_rate=vf_lr).minimize(v_loss)

    sess = core_tf1.session(obs_ph, ac, logger)
    buf = core.Buffer(env, core.share_of_steps(steps_per_epoch), gamma, lam)

    def update() -> None:
        inputs = dict(zip(phs, buf.get().values()))
        pi_l_old, v_l_old, ent = sess.run([pi_loss, v_loss, ac.entropy], feed_dict=inputs)
        sess.run(train_pi, feed_dict=inputs)
        for _ in range(train_v_iters):
            sess.run(train_v, feed_dict=inputs)
        pi_l_new, v_l_new, kl = sess.run([pi_loss, v_loss, approx_kl], feed_dict=inputs)
        logger.store(LossPi=pi_l_old, LossV=v_l_old, KL=kl, Entropy=ent)
        logger.store(DeltaLossPi=pi_l_new - pi_l_old, DeltaLossV=v_l_new - v_l_old)

    core.train(env, core_tf1.stepper(sess, obs_ph, ac), buf, update, logger, epochs, steps_per_epoch, save_freq)
    if check:
        mpi_util.chksum(sess, "weights")


if __name__ == "__main__":
    core.main(__doc__, "vpg_tf1", vpg)
