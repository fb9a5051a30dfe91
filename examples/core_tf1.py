"""Actor and critic as tf.compat.v1 graphs, for the TensorFlow programs of this folder."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from gymnasium import Env
from gymnasium.spaces import Discrete, Space

import mpi_util
from mpi_util.logx import EpochLogger
from mpi_util.mpi_tf import sync_all_params


@dataclass
class ActorCritic:
    """Tensors of a graph; b is the number of observations.

    Attributes:
        pi: sampled actions, shape (b, *act).
        logp, logp_pi: log-probabilities of the given and of the sampled actions, shape (b,).
        v: values, shape (b,).
        entropy, d_kl: scalars: the policy's mean entropy, its mean distance KL(old || new) from the one in `old`.
        params: what describes the distributions, each of shape (b, n), for d_kl.
        old: placeholders for the params of an earlier policy.
    """

    pi: Any
    logp: Any
    logp_pi: Any
    v: Any
    entropy: Any
    d_kl: Any
    params: list
    old: list


def placeholders(observation_space: Space, action_space: Space) -> list:
    """For observations, actions, advantages, returns and old log-probabilities, in the order of Buffer.get."""
    act_dtype = tf.int32 if isinstance(action_space, Discrete) else tf.float32
    return [
        tf.placeholder(tf.float32, (None, *observation_space.shape), name="obs"),
        tf.placeholder(act_dtype, (None, *action_space.shape), name="act"),
        *(tf.placeholder(tf.float32, (None,), name=name) for name in ("adv", "ret", "logp_old")),
    ]


def mlp(x, sizes):
    """Dense layers with tanh between them."""
    for i, size in enumerate(sizes):
        with tf.variable_scope(f"dense{i}"):
            kernel = tf.get_variable("kernel", (int(x.shape[-1]), size))
            bias = tf.get_variable("bias", (size,), initializer=tf.zeros_initializer())
        x = x @ kernel + bias
        if i < len(sizes) - 1:
            x = tf.tanh(x)
    return x


def categorical_policy(obs, act, n_actions, hidden_sizes):
    """Of Discrete actions. Returns pi, logp, logp_pi, entropy, d_kl, params, old."""
    logp_all = tf.nn.log_softmax(mlp(obs, [*hidden_sizes, n_actions]))
    old = tf.placeholder(tf.float32, (None, n_actions))

    def logp_of(actions):
        return tf.reduce_sum(tf.one_hot(actions, n_actions) * logp_all, axis=1)

    pi = tf.squeeze(tf.random.categorical(logp_all, 1), axis=1)
    entropy = -tf.reduce_mean(tf.reduce_sum(tf.exp(logp_all) * logp_all, axis=1))
    d_kl = tf.reduce_mean(tf.reduce_sum(tf.exp(old) * (old - logp_all), axis=1))
    return pi, logp_of(act), logp_of(pi), entropy, d_kl, [logp_all], [old]


def gaussian_policy(obs, act, act_dim, hidden_sizes):
    """Of Box actions, with deviations that do not depend on the state. Returns as categorical_policy."""
    mu = mlp(obs, [*hidden_sizes, act_dim])
    log_std = tf.get_variable("log_std", initializer=np.full(act_dim, -0.5, np.float32)) + tf.zeros_like(mu)
    old_mu, old_log_std = (tf.placeholder(tf.float32, (None, act_dim)) for _ in range(2))

    def logp_of(actions):
        z = (actions - mu) * tf.exp(-log_std)
        return -tf.reduce_sum(z**2 / 2 + log_std + np.log(2 * np.pi) / 2, axis=1)

    pi = mu + tf.random_normal(tf.shape(mu)) * tf.exp(log_std)
    entropy = tf.reduce_mean(tf.reduce_sum(log_std + np.log(2 * np.pi * np.e) / 2, axis=1))
    squares = (tf.exp(2 * old_log_std) + (old_mu - mu) ** 2) / tf.exp(2 * log_std)
    d_kl = tf.reduce_mean(tf.reduce_sum(log_std - old_log_std + (squares - 1) / 2, axis=1))
    return pi, logp_of(act), logp_of(pi), entropy, d_kl, [mu, log_std], [old_mu, old_log_std]


def policy(obs, act, action_space, hidden_sizes):
    """The policy for the kind of actions."""
    if isinstance(action_space, Discrete):
        return categorical_policy(obs, act, int(action_space.n), hidden_sizes)
    return gaussian_policy(obs, act, action_space.shape[0], hidden_sizes)


def actor_critic(obs, act, action_space: Space, hidden_sizes) -> ActorCritic:
    """Two networks, whose variables are in the scopes pi and v."""
    with tf.variable_scope("pi"):
        pi, logp, logp_pi, entropy, d_kl, params, old = policy(obs, act, action_space, hidden_sizes)
    with tf.variable_scope("v"):
        v = tf.squeeze(mlp(obs, [*hidden_sizes, 1]), axis=1)
    return ActorCritic(pi, logp, logp_pi, v, entropy, d_kl, params, old)


def networks(env: Env, logger: EpochLogger, hidden_sizes) -> tuple[list, ActorCritic]:
    """(placeholders, networks) for an environment."""
    phs = placeholders(env.observation_space, env.action_space)
    ac = actor_critic(phs[0], phs[1], env.action_space, hidden_sizes)
    logger.log(f"Number of parameters: pi {count_vars('pi')}, v {count_vars('v')}")
    return phs, ac


def session(obs, ac: ActorCritic, logger: EpochLogger) -> tf.Session:
    """Collective: a session in which all ranks have the same values; `logger` saves them."""
    sess = tf.Session(config=mpi_util.tf_config)
    sess.run(tf.global_variables_initializer())
    sess.run(sync_all_params())
    logger.setup_tf_saver(sess, inputs={"x": obs}, outputs={"pi": ac.pi, "v": ac.v})
    return sess


def stepper(sess, obs, ac: ActorCritic):
    """A function of one observation that returns a sampled action, the state's value, the action's log-probability."""

    def step(o):
        return tuple(out[0] for out in sess.run((ac.pi, ac.v, ac.logp_pi), {obs: o[None]}))

    return step


def count_vars(scope: str) -> int:
    """Number of parameters."""
    return sum(variable.shape.num_elements() for variable in tf.trainable_variables(scope))
