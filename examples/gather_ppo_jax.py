"""PPO in one file with Flax's nnx and optax, in the style of CleanRL: every process collects, rank 0 updates.

    python examples/gather_ppo_jax.py --env CartPole-v1 --nprocs 4
    mpiexec -n 4 python examples/gather_ppo_jax.py

Lines marked `# +` are those that mpi_util added or changed in a program for one process. Results are bit-identical on
any number of processes. PPO: Schulman et al., arXiv 1707.06347.
"""

import argparse
import sys
from functools import partial
from typing import Any

import mpi_util  # +

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")  # +
parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
parser.add_argument("--episodes", type=int, default=20, help="an iteration, all ranks together (default: 20)")
parser.add_argument("--iterations", type=int, default=30, help="(default: 30)")
parser.add_argument("--epochs", type=int, default=10, help="passes over a batch (default: 10)")
parser.add_argument("--minibatch_size", type=int, default=64, help="rows (default: 64)")
parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
parser.add_argument("--gamma", type=float, default=0.99, help="discount, 0 to 1 (default: 0.99)")
parser.add_argument("--lam", type=float, default=0.95, help="of GAE, 0 to 1 (default: 0.95)")
parser.add_argument("--clip", type=float, default=0.2, help="of the probability ratio (default: 0.2)")
args = parser.parse_args()
if mpi_util.mpi_fork(args.nprocs) == "parent":  # +  above the heavy imports, which only the ranks need
    sys.exit()  # +

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.scipy.stats import norm

if mpi_util.rank:  # +  only rank 0 opens a GPU
    jax.config.update("jax_platforms", "cpu")  # +
Arrays = dict[str, np.ndarray]


def mlp(n_in: int, n_out: int, out_std: float, rngs: nnx.Rngs) -> nnx.Sequential:
    """Two hidden layers of 64 tanh units, with orthogonal weights and zero biases."""

    def linear(a: int, b: int, std: float) -> nnx.Linear:
        return nnx.Linear(a, b, kernel_init=nnx.initializers.orthogonal(std), rngs=rngs)

    return nnx.Sequential(
        linear(n_in, 64, 2**0.5), jnp.tanh, linear(64, 64, 2**0.5), jnp.tanh, linear(64, n_out, out_std)
    )


class Agent(nnx.Module):
    """Policy, value function, and the scale of observations, which is sent with the weights."""

    def __init__(self, env: Any, rngs: nnx.Rngs):
        n_obs, space = env.observation_space.shape[0], env.action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        n_act = int(space.n) if self.discrete else space.shape[0]
        self.actor, self.critic = mlp(n_obs, n_act, 0.01, rngs), mlp(n_obs, 1, 1.0, rngs)
        self.log_std = nnx.Param(jnp.zeros(n_act))
        self.count, self.mean = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros(n_obs))
        self.var = nnx.BatchStat(jnp.ones(n_obs))

    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the policy's distribution is made of, and the value."""
        obs = jnp.clip((obs - self.mean[...]) / jnp.sqrt(self.var[...] + 1e-8), -10, 10)
        return self.actor(obs), self.critic(obs)[..., 0]

    def log_prob(self, out: jax.Array, act: jax.Array) -> jax.Array:
        if self.discrete:
            return jnp.take_along_axis(jax.nn.log_softmax(out), act[..., None], -1)[..., 0]
        return norm.logpdf(act, out, jnp.exp(self.log_std[...])).sum(-1)

    def learn_scale(self, obs: np.ndarray) -> None:
        """Adds a batch to the running mean and variance (Chan, Golub and LeVeque, 1983)."""
        share = len(obs) / (self.count[...] + len(obs))
        delta = obs.mean(0) - self.mean[...]
        self.var[...] += share * (obs.var(0) - self.var[...] + (1 - share) * delta**2)
        self.mean[...] += share * delta
        self.count[...] += len(obs)


@partial(jax.jit, static_argnums=1)
def choose(weights: list[jax.Array], structure: Any, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
    """An action, its log-probability, the value, and the next key. Args: weights, structure: the agent's."""
    agent: Agent = jax.tree.unflatten(structure, weights)
    (out, value), (key, own) = agent(obs), jax.random.split(key)
    noise = jax.random.normal(own, out.shape)
    act = jax.random.categorical(own, out) if agent.discrete else out + jnp.exp(agent.log_std[...]) * noise
    return act, agent.log_prob(out, act), value, key


def play(seed: int) -> Arrays:  # +  of the episode: it is then the same on any rank
    """Plays one episode. Returns its rows, arrays whose first axis is steps, and the sum of its rewards."""
    key, obs, terminated, truncated = jax.random.key(seed), env.reset(seed=seed)[0], False, False  # +
    rows: dict[str, list[Any]] = {"obs": [], "act": [], "logp": [], "value": [], "rew": []}
    weights, structure = jax.tree.flatten(agent)  # once an episode: to take the module apart takes longer than to act
    # a step takes less time on the CPU than on a GPU, and every rank gets the same bits
    weights, key = jax.device_put((weights, key), jax.devices("cpu")[0])  # +
    while not (terminated or truncated):
        # one row per call: in a batch, a row's last bits depend on the number of rows
        *chosen, key = choose(weights, structure, obs := np.asarray(obs, np.float32), key)
        act, logp, value = map(np.asarray, chosen)
        next_obs, rew, terminated, truncated, _ = env.step(act)
        for name, x in zip(rows, (obs, act, logp, value, np.float32(rew))):
            rows[name].append(x)
        obs = next_obs
    episode = {name: np.stack(arrays) for name, arrays in rows.items()}
    # a truncated episode has a future
    last_value = 0.0 if terminated else float(choose(weights, structure, np.asarray(obs, np.float32), key)[2])
    episode["adv"] = gae(episode["rew"], episode["value"], last_value)
    return episode | {"returns": episode["rew"].sum()}


def gae(rew: np.ndarray, value: np.ndarray, last_value: float) -> np.ndarray:
    """Generalised advantage estimates, shape (n_steps,), of one episode (Schulman et al., arXiv 1506.02438)."""
    delta = rew + args.gamma * np.append(value[1:], np.float32(last_value)) - value
    adv, running = np.zeros_like(delta), 0.0
    for t in reversed(range(len(delta))):
        adv[t] = running = delta[t] + args.gamma * args.lam * running
    return adv


@nnx.jit
def learn(agent: Agent, optimizer: nnx.Optimizer, rows: dict[str, Any]) -> None:
    """One step with the clipped objective."""

    def loss(agent: Agent) -> jax.Array:
        out, value = agent(rows["obs"])
        adv = (rows["adv"] - rows["adv"].mean()) / (rows["adv"].std() + 1e-8)
        ratio = jnp.exp(agent.log_prob(out, rows["act"]) - rows["logp"])
        policy_loss = -jnp.minimum(ratio * adv, jnp.clip(ratio, 1 - args.clip, 1 + args.clip) * adv).mean()
        return policy_loss + 0.25 * ((value - rows["adv"] - rows["value"]) ** 2).mean()

    optimizer.update(agent, nnx.grad(loss)(agent))


def update(agent: Agent, optimizer: nnx.Optimizer, batch: Arrays) -> None:
    """Epochs of minibatches, all of one size, or each would be compiled; so a shuffled epoch leaves out a remainder."""
    size = min(args.minibatch_size, len(batch["obs"]))
    for _ in range(args.epochs):
        order = shuffle.permutation(len(batch["obs"]))
        for start in range(0, len(order) - size + 1, size):
            learn(agent, optimizer, {name: batch[name][order[start : start + size]] for name in NAMES})


NAMES = ("obs", "act", "logp", "value", "adv")
shuffle = np.random.default_rng(args.seed)
env: Any = gym.wrappers.FlattenObservation(gym.make(args.env))
if isinstance(env.action_space, gym.spaces.Box):
    env = gym.wrappers.ClipAction(env)
agent = Agent(env, nnx.Rngs(args.seed))
adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(args.lr, eps=1e-5))
optimizer = nnx.Optimizer(agent, adam, wrt=nnx.Param)
for iteration in range(args.iterations):
    batch = mpi_util.collect(play, episodes=args.episodes, weights=agent, seed=args.seed)  # +
    if batch is None:  # +  this is not rank 0
        continue  # +
    update(agent, optimizer, batch)
    agent.learn_scale(batch["obs"])  # from all ranks' rows; normalizers updated on each rank would drift apart
    print(f"iteration {iteration}: return {batch['returns'].mean():.1f}, {len(batch['obs'])} steps")

mpi_util.print0("checksum", mpi_util.chksum(agent))  # +
