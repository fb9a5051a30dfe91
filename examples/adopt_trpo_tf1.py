"""TRPO with tf.compat.v1 in the manner of Spinning Up: natural gradient steps within a trust region, over all ranks.

    python examples/adopt_trpo_tf1.py --env CartPole-v1 --cpu 4

Source: arXiv 1502.05477, section 6 and appendix C. Gradient, Hessian-vector products, KL and loss are means over the
ranks, so that all ranks take the same step.
"""

import time

import core
import core_tf1
import numpy as np
import tensorflow.compat.v1 as tf

import mpi_util
from mpi_util.logx import EpochLogger
from mpi_util.mpi_tf import MpiAdamOptimizer, assign_params_from_flat, flat_concat, sync_all_params
from mpi_util.mpi_tools import mpi_avg, mpi_fork, proc_id

EPS = 1e-8

tf.disable_v2_behavior()


def conjugate_gradient(product, b, iterations):
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
    env_fn,
    ac_kwargs=None,
    seed=0,
    steps_per_epoch=2000,
    epochs=20,
    gamma=0.99,
    lam=0.97,
    delta=0.01,
    vf_lr=1e-3,
    train_v_iters=80,
    damping_coeff=0.1,
    cg_iters=10,
    backtrack_iters=10,
    backtrack_coeff=0.8,
    save_freq=10,
    check=False,
    logger_kwargs=None,
):
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

    seed += 10000 * proc_id()
    tf.set_random_seed(seed)
    np.random.seed(seed)
    env = env_fn()
    env.reset(seed=seed)

    phs = core_tf1.placeholders(env.observation_space, env.action_space)
    obs_ph, act_ph, adv_ph, ret_ph, logp_old_ph = phs
    ac = core_tf1.actor_critic(obs_ph, act_ph, env.action_space, **(ac_kwargs or {}))
    logger.log(f"Number of parameters: pi {core_tf1.count_vars('pi')}, v {core_tf1.count_vars('v')}")

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

    sess = tf.Session(config=mpi_util.tf_config)
    sess.run(tf.global_variables_initializer())
    sess.run(sync_all_params())
    logger.setup_tf_saver(sess, inputs={"x": obs_ph}, outputs={"pi": ac.pi, "v": ac.v})
    buf = core.Buffer(env, core.share_of_steps(steps_per_epoch), gamma, lam)

    def update():
        inputs = dict(zip(phs, buf.get().values()))
        inputs.update(zip(ac.old, sess.run(ac.params, feed_dict=inputs)))
        g, pi_l_old, v_l_old, ent = sess.run([gradient, pi_loss, v_loss, ac.entropy], feed_dict=inputs)
        g, pi_l_old = mpi_avg(g), mpi_avg(pi_l_old)

        def hessian_times(x):
            return mpi_avg(sess.run(hvp, feed_dict={**inputs, vector_ph: x}))

        x = conjugate_gradient(hessian_times, g, cg_iters)
        step = np.sqrt(2 * delta / (x @ hessian_times(x) + EPS)) * x
        old_params = sess.run(get_pi_params)

        def try_step(scale):
            sess.run(set_pi_params, feed_dict={vector_ph: old_params - scale * step})
            return mpi_avg(sess.run([ac.d_kl, pi_loss], feed_dict=inputs))

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

    start_time = time.time()
    for epoch in range(epochs):
        core.collect(env, core_tf1.stepper(sess, obs_ph, ac), buf, logger)
        if epoch % save_freq == 0 or epoch == epochs - 1:
            logger.save_state({"env": env}, None)
        update()
        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.log_tabular("EpLen", average_only=True)
        logger.log_tabular("VVals", with_min_and_max=True)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * steps_per_epoch)
        for key in ("LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL", "BacktrackIters"):
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("Time", time.time() - start_time)
        logger.dump_tabular()
    if check:
        mpi_util.chksum(sess, "weights")


if __name__ == "__main__":
    args = core.command_line(__doc__, "trpo_tf1").parse_args()
    mpi_fork(args.cpu)

    from mpi_util.run_utils import setup_logger_kwargs

    trpo(
        lambda: core.make_env(args.env),
        ac_kwargs={"hidden_sizes": [args.hid] * args.l},
        seed=args.seed,
        steps_per_epoch=args.steps,
        epochs=args.epochs,
        gamma=args.gamma,
        check=args.check,
        logger_kwargs=setup_logger_kwargs(args.exp_name, args.seed, args.data_dir),
    )
