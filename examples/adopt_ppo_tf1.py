"""PPO with tf.compat.v1 in the manner of Spinning Up: every rank collects and updates, with gradients averaged.

    python examples/adopt_ppo_tf1.py --env CartPole-v1 --cpu 4

The loss is that of arXiv 1707.06347, eq. 7; an epoch's policy steps end when the new policy is too far from the old.
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
from mpi_util_spinup.mpi_tools import mpi_avg

tf.disable_v2_behavior()


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
        ac_kwargs: of core_tf1.actor_critic.
        steps_per_epoch: of all ranks together.
        target_kl: policy steps end at 1.5 times this distance, the mean over all ranks.
        check: print each rank's checksum at the end.
    """
    logger = EpochLogger(**(logger_kwargs or {}))
    logger.save_config(locals())
    env = core.seeded_env(env_fn, seed, tf.set_random_seed)
    phs, ac = core_tf1.networks(env, logger, **(ac_kwargs or {}))
    obs_ph, act_ph, adv_ph, ret_ph, logp_old_ph = phs

    ratio = tf.exp(ac.logp - logp_old_ph)
    clipped = tf.clip_by_value(ratio, 1 - clip_ratio, 1 + clip_ratio)
    pi_loss = -tf.reduce_mean(tf.minimum(ratio * adv_ph, clipped * adv_ph))
    v_loss = tf.reduce_mean((ret_ph - ac.v) ** 2)
    approx_kl = tf.reduce_mean(logp_old_ph - ac.logp)
    clipfrac = tf.reduce_mean(tf.cast(tf.not_equal(ratio, clipped), tf.float32))
    train_pi = MpiAdamOptimizer(learning_rate=pi_lr).minimize(pi_loss)
    train_v = MpiAdamOptimizer(learning_rate=vf_lr).minimize(v_loss)

    sess = core_tf1.session(obs_ph, ac, logger)
    buf = core.Buffer(env, core.share_of_steps(steps_per_epoch), gamma, lam)

    def update() -> None:
        inputs = dict(zip(phs, buf.get().values()))
        pi_l_old, v_l_old, ent = sess.run([pi_loss, v_loss, ac.entropy], feed_dict=inputs)
        i = 0
        for i in range(train_pi_iters):
            _, kl = sess.run([train_pi, approx_kl], feed_dict=inputs)
            if mpi_avg(kl) > 1.5 * target_kl:
                logger.log(f"Early stopping at step {i}: the policy has moved far enough")
                break
        for _ in range(train_v_iters):
            sess.run(train_v, feed_dict=inputs)
        pi_l_new, v_l_new, kl, cf = sess.run([pi_loss, v_loss, approx_kl, clipfrac], feed_dict=inputs)
        logger.store(LossPi=pi_l_old, LossV=v_l_old, KL=kl, Entropy=ent, ClipFrac=cf, StopIter=i)
        logger.store(DeltaLossPi=pi_l_new - pi_l_old, DeltaLossV=v_l_new - v_l_old)

    core.train(
        env,
        core_tf1.stepper(sess, obs_ph, ac),
        buf,
        update,
        logger,
        epochs,
        steps_per_epoch,
        save_freq,
        columns=("ClipFrac", "StopIter"),
    )
    if check:
        mpi_util.chksum(sess, "weights")


if __name__ == "__main__":
    core.main(__doc__, "ppo_tf1", ppo)
