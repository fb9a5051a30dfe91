"""REINFORCE with Keras 3 on TensorFlow: whole trajectories go to rank 0 as Python objects.

    python examples/keras_reinforce.py --env CartPole-v1 --nprocs 4
    mpiexec -n 4 python examples/keras_reinforce.py

Every process acts with NumPy on the weights of a Keras model, in some ten microseconds where a call of the model takes
a millisecond. Rank 0 gets the trajectories as they are, a list of dicts of lists of different lengths, and fits the
model (Williams, 1992, with the mean return at each step as baseline). Results are bit-identical on any number of
processes. Lines marked `# +` need mpi_util.
"""

import argparse
import os
import sys
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--episodes", type=int, default=40, help="an iteration, all ranks together (default: 40)")
parser.add_argument("--iterations", type=int, default=15, help="(default: 15)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # +
    sys.exit()  # +

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

mpi_util.setup_tensorflow_for_mpi()  # + sets threads; on a GPU, no process takes all of its memory
GAMMA, LR, STD = 0.99, 0.05, 0.5
env: Any = gym.wrappers.FlattenObservation(gym.make(args.env))
discrete = isinstance(env.action_space, gym.spaces.Discrete)
env = env if discrete else gym.wrappers.ClipAction(env)
n_act = int(env.action_space.n) if discrete else env.action_space.shape[0]
keras.utils.set_random_seed(args.seed)
model = keras.Sequential(
    [keras.Input(env.observation_space.shape), keras.layers.Dense(32, "tanh"), keras.layers.Dense(n_act)]
)
optimizer = keras.optimizers.Adam(LR)


def act(weights: list[np.ndarray], obs: np.ndarray, rng: np.random.Generator) -> Any:
    """What the model would do: a category by its logits, or a normal deviate around its mean."""
    w1, b1, w2, b2 = weights
    out = np.tanh(obs @ w1 + b1) @ w2 + b2
    if discrete:
        return int((out + rng.gumbel(size=n_act)).argmax())  # a sample from softmax(out)
    return (out + STD * rng.normal(size=n_act)).astype(np.float32)


def play(seed: int, rng: np.random.Generator) -> list[dict[str, list[Any]]]:
    """One episode: a list with its trajectory, a dict of lists, each with an entry for each step."""
    trajectory: dict[str, list[Any]] = {"obs": [], "act": [], "rew": []}
    weights = model.get_weights()
    obs, _ = env.reset(seed=seed)
    over = False
    while not over:
        action = act(weights, obs, rng)
        next_obs, rew, terminated, truncated, _ = env.step(action)
        for key, x in zip(trajectory, (obs, action, float(rew))):
            trajectory[key].append(x)
        obs, over = next_obs, terminated or truncated
    return [trajectory]  # collect joins the lists of all episodes


def advantages(trajectories: list[dict[str, list[Any]]]) -> np.ndarray:
    """The return from each step, minus its mean over the episodes that got that far; float32, shape (n_steps,)."""
    to_go = np.full((len(trajectories), max(len(t["rew"]) for t in trajectories)), np.nan)
    for row, trajectory in zip(to_go, trajectories):
        total = 0.0
        for step in reversed(range(len(trajectory["rew"]))):
            row[step] = total = trajectory["rew"][step] + GAMMA * total
    adv = (to_go - np.nanmean(to_go, axis=0))[~np.isnan(to_go)]
    scaled: np.ndarray = adv / (adv.std() + 1e-8)
    return scaled.astype(np.float32)


def update(trajectories: list[dict[str, list[Any]]]) -> None:
    """One step along the gradient of the log-probabilities, weighted with the advantages."""
    obs, actions = (np.concatenate([t[key] for t in trajectories]).astype(np.float32) for key in ("obs", "act"))
    adv = advantages(trajectories)
    with tf.GradientTape() as tape:
        out = model(obs)
        if discrete:
            logp = -tf.nn.sparse_softmax_cross_entropy_with_logits(actions.astype(np.int32), out)
        else:
            logp = -0.5 * tf.reduce_sum(((actions - out) / STD) ** 2, axis=1)
        loss = -tf.reduce_mean(logp * adv)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


for iteration in range(args.iterations):
    trajectories = mpi_util.collect(play, episodes=args.episodes, weights=model, seed=args.seed)  # +
    if trajectories is None:  # +
        continue  # +
    update(trajectories)
    returns = [sum(trajectory["rew"]) for trajectory in trajectories]
    print(f"iteration {iteration}: return {np.mean(returns):.1f} of {len(returns)} episodes")

mpi_util.print0("checksum", mpi_util.chksum(model))  # +
