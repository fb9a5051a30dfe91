"""Actor and critic as tf.compat.v1 graphs, for the TensorFlow programs of this folder."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from core import Step
from gymnasium import Env
from gymnasium.spaces import Discrete, Space

import mpi_util
from mpi_util_spinup.logx import EpochLogger
from mpi_util_spinup.mpi_tf import sync_all_params

Policy = tuple[Any, Any, Any, Any, Any, list[Any], list[Any]]  # pi, logp, logp_pi, entropy, d_kl, params, old


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
    params: list[Any]
    old: list[Any]


def placeholders(observation_space: Space[Any], action_space: Space[Any]) -> list[Any]:
    """For observations, actions, advantages, returns and old log-probabilities, in the order of Buffer.get."""
    act_dtype = tf.int32 if isinstance(action_space, Discrete) else tf.float32
    return [
        tf.placeholder(tf.float32, (None, *(observation_space.shape or ())), name="obs"),
        tf.placeholder(act_dtype, (None, *(action_space.shape or ())), name="act"),
        *(tf.placeholder(tf.float32, (None,), name=name) for name in ("adv", "ret", "logp_old")),
    ]


def mlp(x: Any, sizes: list[int]) -> Any:
    """Dense layers with tanh between them."""
    for i, size in enumerate(sizes):
        with tf.variable_scope(f"dense{i}"):
            kernel = tf.get_variable("kernel", (int(x.shape[-1]), size))
            bias = tf.get_variable("bias", (size,), initializer=tf.zeros_initializer())
        x = x @ kernel + bias
        if i < len(sizes) - 1:
            x = tf.tanh(x)
    return x


def categorical_policy(obs: Any, act: Any, n_actions: int, hidden_sizes: list[int]) -> Policy:
    """Of Discrete actions."""
    logp_all = tf.nn.log_softmax(mlp(obs, [*hidden_sizes, n_actions]))
    old = tf.placeholder(tf.float32, (None, n_actions))

    def logp_of(actions: Any) -> Any:
        return tf.reduce_sum(tf.one_hot(actions, n_actions) * logp_all, axis=1)

    pi = tf.squeeze(tf.random.categorical(logp_all, 1), axis=1)
    entropy = -tf.reduce_mean(tf.reduce_sum(tf.exp(logp_all) * logp_all, axis=1))
    d_kl = tf.reduce_mean(tf.reduce_sum(tf.exp(old) * (old - logp_all), axis=1))
    return pi, logp_of(act), logp_of(pi), entropy, d_kl, [logp_all], [old]


def gaussian_policy(obs: Any, act: Any, act_dim: int, hidden_sizes: list[int]) -> Policy:
    """Of Box actions, with deviations that do not depend on the state."""
    mu = mlp(obs, [*hidden_sizes, act_dim])
    log_std = tf.get_variable("log_std", initializer=np.full(act_dim, -0.5, np.float32)) + tf.zeros_like(mu)
    old_mu, old_log_std = (tf.placeholder(tf.float32, (None, act_dim)) for _ in range(2))

    def logp_of(actions: Any) -> Any:
        z = (actions - mu) * tf.exp(-log_std)
        return -tf.reduce_sum(z**2 / 2 + log_std + np.log(2 * np.pi) / 2, axis=1)

    pi = mu + tf.random_normal(tf.shape(mu)) * tf.exp(log_std)
    entropy = tf.reduce_mean(tf.reduce_sum(log_std + np.log(2 * np.pi * np.e) / 2, axis=1))
    squares = (tf.exp(2 * old_log_std) + (old_mu - mu) ** 2) / tf.exp(2 * log_std)
    d_kl = tf.reduce_mean(tf.reduce_sum(log_std - old_log_std + (squares - 1) / 2, axis=1))
    return pi, logp_of(act), logp_of(pi), entropy, d_kl, [mu, log_std], [old_mu, old_log_std]


def policy(obs: Any, act: Any, action_space: Space[Any], hidden_sizes: list[int]) -> Policy:
    """The policy for the kind of actions."""
    if isinstance(action_space, Discrete):
        return categorical_policy(obs, act, int(action_space.n), hidden_sizes)
    return gaussian_policy(obs, act, math.prod(action_space.shape or ()), hidden_sizes)


def actor_critic(obs: Any, act: Any, action_space: Space[Any], hidden_sizes: list[int]) -> ActorCritic:
    """Two networks, whose variables are in the scopes pi and v."""
    with tf.variable_scope("pi"):
        pi, logp, logp_pi, entropy, d_kl, params, old = policy(obs, act, action_space, hidden_sizes)
    with tf.variable_scope("v"):
        v = tf.squeeze(mlp(obs, [*hidden_sizes, 1]), axis=1)
    return ActorCritic(pi, logp, logp_pi, v, entropy, d_kl, params, old)


def networks(env: Env, logger: EpochLogger, hidden_sizes: list[int]) -> tuple[list[Any], ActorCritic]:
    """(placeholders, networks) for an environment."""
    phs = placeholders(env.observation_space, env.action_space)
    ac = actor_critic(phs[0], phs[1], env.action_space, hidden_sizes)
    logger.log(f"Number of parameters: pi {count_vars('pi')}, v {count_vars('v')}")
    return phs, ac


def session(obs: Any, ac: ActorCritic, logger: EpochLogger) -> tf.Session:
    """Collective: a session in which all ranks have the same values; `logger` saves them."""
    sess = tf.Session(config=mpi_util.tf_config)
    sess.run(tf.global_variables_initializer())
    sess.run(sync_all_params())
    logger.setup_tf_saver(sess, inputs={"x": obs}, outputs={"pi": ac.pi, "v": ac.v})
    return sess


def stepper(sess: tf.Session, obs: Any, ac: ActorCritic) -> Step:
    """A function of one observation that returns a sampled action, the state's value, the action's log-probability."""

    def step(o: np.ndarray) -> tuple[Any, Any, Any]:
        pi, v, logp_pi = sess.run((ac.pi, ac.v, ac.logp_pi), {obs: o[None]})
        return pi[0], v[0], logp_pi[0]

    return step


def count_vars(scope: str) -> int:
    """Number of parameters."""
    return sum(variable.shape.num_elements() for variable in tf.trainable_variables(scope))
