"""TRPO with tf.compat.v1 in the manner of Spinning Up: natural gradient steps within a trust region, over all ranks.

    python examples/adopt_trpo_tf1.py --env CartPole-v1 --cpu 4

Source: arXiv 1502.05477, section 6 and appendix C. Gradient, Hessian-vector products, KL and loss are means over the
ranks, so that all ranks take the same step.
"""

from collections.abc import Callable
from typing import Any

import core
import core_tf1
import gymnasium as gym
import numpy as np
import tensorflow.compat.v1 as tf

import mpi_util
from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_tf import MpiAdamOptimizer, assign_params_from_flat, flat_concat
from mpi_util_spinup.mpi_tools import mpi_avg

EPS = 1e-8

tf.disable_v2_behavior()


def conjugate_gradient(product: Callable[[np.ndarray], np.ndarray], b: np.ndarray, iterations: int) -> np.ndarray:
    """Solves product(x) = b for x, where `product` multiplies by a symmetric positive matrix."""
    x, r, p = np.zeros_like(b), b.copy(), b.copy()
    rr = r @ r
    for _ in range(iterations):
        z = product(p)
        alpha = rr / (p @ z + EPS)
        x += alpha * p
        r -= alpha * z
        rr_before, rr = rr, r @ r
        p = r + rr / (rr_before + EPS) * p
    return x


def trpo(
    env_fn: Callable[[], gym.Env],
    ac_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    steps_per_epoch: int = 2000,
    epochs: int = 20,
    gamma: float = 0.99,
    lam: float = 0.97,
    delta: float = 0.01,
    vf_lr: float = 1e-3,
    train_v_iters: int = 80,
    damping_coeff: float = 0.1,
    cg_iters: int = 10,
    backtrack_iters: int = 10,
    backtrack_coeff: float = 0.8,
    save_freq: int = 10,
    check: bool = False,
    logger_kwargs: dict[str, Any] | None = None,
) -> None:
    """Trains, and leaves table, configuration and model in the logger's folder.

    Args:
        env_fn: makes an environment.
        ac_kwargs: of core_tf1.actor_critic.
        steps_per_epoch: of all ranks together.
        delta: the trust region: the largest mean KL of a step.
        damping_coeff: this times a vector is added to its product with the Hessian.
        check: print each rank's checksum at the end.
    """
    logger = EpochLogger(**(logger_kwargs or {}))
    logger.save_config(locals())
    env = core.seeded_env(env_fn, seed, tf.set_random_seed)
    phs, ac = core_tf1.networks(env, logger, **(ac_kwargs or {}))
    obs_ph, act_ph, adv_ph, ret_ph, logp_old_ph = phs

    pi_loss = -tf.reduce_mean(tf.exp(ac.logp - logp_old_ph) * adv_ph)
    v_loss = tf.reduce_mean((ret_ph - ac.v) ** 2)
    train_v = MpiAdamOptimizer(learning_rate=vf_lr).minimize(v_loss)

    pi_params = tf.trainable_variables("pi")
    gradient = flat_concat(tf.gradients(pi_loss, pi_params))
    vector_ph = tf.placeholder(tf.float32, gradient.shape)
    kl_gradient = flat_concat(tf.gradients(ac.d_kl, pi_params))
    hvp = flat_concat(tf.gradients(tf.reduce_sum(kl_gradient * vector_ph), pi_params)) + damping_coeff * vector_ph
    get_pi_params = flat_concat(pi_params)
    set_pi_params = assign_params_from_flat(vector_ph, pi_params)

    sess = core_tf1.session(obs_ph, ac, logger)
    buf = core.Buffer(env, core.share_of_steps(steps_per_epoch), gamma, lam)

    def update() -> None:
        inputs = dict(zip(phs, buf.get().values()))
        inputs.update(zip(ac.old, sess.run(ac.params, feed_dict=inputs)))
        g, pi_l_old, v_l_old, ent = sess.run([gradient, pi_loss, v_loss, ac.entropy], feed_dict=inputs)
        g, pi_l_old = mpi_avg(g), mpi_avg(pi_l_old)

        def hessian_times(x: np.ndarray) -> np.ndarray:
            product: np.ndarray = mpi_avg(sess.run(hvp, feed_dict={**inputs, vector_ph: x}))
            return product

        x = conjugate_gradient(hessian_times, g, cg_iters)
        step = np.sqrt(2 * delta / (x @ hessian_times(x) + EPS)) * x
        old_params = sess.run(get_pi_params)

        def try_step(scale: float) -> tuple[float, float]:
            sess.run(set_pi_params, feed_dict={vector_ph: old_params - scale * step})
            d_kl, loss = mpi_avg(sess.run([ac.d_kl, pi_loss], feed_dict=inputs))
            return d_kl, loss

        i = 0
        for i in range(backtrack_iters):
            kl, pi_l_new = try_step(backtrack_coeff**i)
            if kl <= delta and pi_l_new <= pi_l_old:
                logger.log(f"Line search takes step {i}")
                break
        else:
            logger.log("Line search finds nothing better: the policy stays as it is")
            kl, pi_l_new = try_step(0.0)

        for _ in range(train_v_iters):
            sess.run(train_v, feed_dict=inputs)
        v_l_new = sess.run(v_loss, feed_dict=inputs)
        logger.store(LossPi=pi_l_old, LossV=v_l_old, KL=kl, Entropy=ent, BacktrackIters=i)
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
        columns=("BacktrackIters",),
    )
    if check:
        mpi_util.chksum(sess, "weights")


if __name__ == "__main__":
    core.main(__doc__, "trpo_tf1", trpo)
