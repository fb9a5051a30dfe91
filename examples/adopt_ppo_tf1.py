"""PPO with tf.compat.v1 in the manner of Spinning Up: every rank collects and updates, with gradients averaged.

    python examples/adopt_ppo_tf1.py --env CartPole-v1 --cpu 4

The loss is that of arXiv 1707.06347, eq. 7; an epoch's policy steps end when the new policy is too far from the old.
"""

import time

import core
import core_tf1
import numpy as np
import tensorflow.compat.v1 as tf

import mpi_util
from mpi_util.logx import EpochLogger
from mpi_util.mpi_tf import MpiAdamOptimizer, sync_all_params
from mpi_util.mpi_tools import mpi_avg, mpi_fork, proc_id

tf.disable_v2_behavior()


def ppo(
    env_fn,
    ac_kwargs=None,
    seed=0,
    steps_per_epoch=2000,
    epochs=20,
    gamma=0.99,
    lam=0.97,
    clip_ratio=0.2,
    pi_lr=3e-4,
    vf_lr=1e-3,
    train_pi_iters=80,
    train_v_iters=80,
    target_kl=0.01,
    save_freq=10,
    check=False,
    logger_kwargs=None,
):
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

    seed += 10000 * proc_id()
    tf.set_random_seed(seed)
    np.random.seed(seed)
    env = env_fn()
    env.reset(seed=seed)

    phs = core_tf1.placeholders(env.observation_space, env.action_space)
    obs_ph, act_ph, adv_ph, ret_ph, logp_old_ph = phs
    ac = core_tf1.actor_critic(obs_ph, act_ph, env.action_space, **(ac_kwargs or {}))
    logger.log(f"Number of parameters: pi {core_tf1.count_vars('pi')}, v {core_tf1.count_vars('v')}")

    ratio = tf.exp(ac.logp - logp_old_ph)
    clipped = tf.clip_by_value(ratio, 1 - clip_ratio, 1 + clip_ratio)
    pi_loss = -tf.reduce_mean(tf.minimum(ratio * adv_ph, clipped * adv_ph))
    v_loss = tf.reduce_mean((ret_ph - ac.v) ** 2)
    approx_kl = tf.reduce_mean(logp_old_ph - ac.logp)
    clipfrac = tf.reduce_mean(tf.cast(tf.not_equal(ratio, clipped), tf.float32))
    train_pi = MpiAdamOptimizer(learning_rate=pi_lr).minimize(pi_loss)
    train_v = MpiAdamOptimizer(learning_rate=vf_lr).minimize(v_loss)

    sess = tf.Session(config=mpi_util.tf_config)
    sess.run(tf.global_variables_initializer())
    sess.run(sync_all_params())
    logger.setup_tf_saver(sess, inputs={"x": obs_ph}, outputs={"pi": ac.pi, "v": ac.v})
    buf = core.Buffer(env, core.share_of_steps(steps_per_epoch), gamma, lam)

    def update():
        inputs = dict(zip(phs, buf.get().values()))
        pi_l_old, v_l_old, ent = sess.run([pi_loss, v_loss, ac.entropy], feed_dict=inputs)
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
        for key in ("LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL", "ClipFrac", "StopIter"):
            logger.log_tabular(key, average_only=True)
        logger.log_tabular("Time", time.time() - start_time)
        logger.dump_tabular()
    if check:
        mpi_util.chksum(sess, "weights")


if __name__ == "__main__":
    args = core.command_line(__doc__, "ppo_tf1").parse_args()
    mpi_fork(args.cpu)

    from mpi_util.run_utils import setup_logger_kwargs

    ppo(
        lambda: core.make_env(args.env),
        ac_kwargs={"hidden_sizes": [args.hid] * args.l},
        seed=args.seed,
        steps_per_epoch=args.steps,
        epochs=args.epochs,
        gamma=args.gamma,
        check=args.check,
        logger_kwargs=setup_logger_kwargs(args.exp_name, args.seed, args.data_dir),
    )
