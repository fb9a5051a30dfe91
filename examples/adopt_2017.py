"""A program in the manner of the 2017 mpi_util: rank 0 alone updates, on the batch of all ranks, and sends the weights.

    python examples/adopt_2017.py CartPole-v1 --nprocs 4

Policy and value function each have a tf.compat.v1 graph and a session. The policy's update is PPO with a KL penalty
(arXiv 1707.06347, section 4). The numbered comments are the eight steps of the 2017 README.
"""

import argparse
import sys

import core
import core_tf1
import gymnasium as gym
import numpy as np
import tensorflow.compat.v1 as tf

import mpi_util  # 2


class Policy:
    """Actions for observations, and an update that keeps the mean KL of a step near `kl_targ`."""

    def __init__(self, env: gym.Env, hidden_sizes: list[int], seed: int, kl_targ: float = 0.01, epochs: int = 20):
        self.kl_targ, self.epochs, self.beta = kl_targ, epochs, 1.0
        self.g = tf.Graph()
        with self.g.as_default():
            tf.set_random_seed(seed)  # set_global_seeds does not reach a graph that is made later
            self.obs, self.act, self.adv, _, self.logp_old = core_tf1.placeholders(
                env.observation_space, env.action_space
            )
            self.beta_ph = tf.placeholder(tf.float32, ())
            self.pi, self.logp, _, self.entropy, self.kl, self.params, self.old = core_tf1.policy(
                self.obs, self.act, env.action_space, hidden_sizes
            )
            ratio = tf.exp(self.logp - self.logp_old)
            loss = -tf.reduce_mean(self.adv * ratio) + self.beta_ph * self.kl
            self.train = tf.train.AdamOptimizer(1e-3).minimize(loss)
            self.init = tf.global_variables_initializer()
        self.sess = tf.Session(graph=self.g, config=mpi_util.tf_config)  # 1
        self.sess.run(self.init)

    def sample(self, obs: np.ndarray) -> np.ndarray:
        action: np.ndarray = self.sess.run(self.pi, {self.obs: obs[None]})[0]
        return action

    def update(self, observes: np.ndarray, actions: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
        feed = {self.obs: observes, self.act: actions, self.adv: advantages}
        logp, *params = self.sess.run([self.logp, *self.params], feed)
        feed.update({self.logp_old: logp, self.beta_ph: self.beta, **dict(zip(self.old, params))})
        kl = entropy = 0.0
        for _ in range(self.epochs):
            self.sess.run(self.train, feed)
            kl, entropy = self.sess.run([self.kl, self.entropy], feed)
            if kl > 4 * self.kl_targ:
                break
        if kl > 2 * self.kl_targ:
            self.beta = min(35.0, 1.5 * self.beta)
        elif kl < self.kl_targ / 2:
            self.beta = max(1 / 35, self.beta / 1.5)
        return {"kl": kl, "entropy": entropy, "beta": self.beta}


class ValueFunction:
    """Discounted sums of rewards, from observations."""

    def __init__(self, env: gym.Env, hidden_sizes: list[int], seed: int, epochs: int = 40):
        self.epochs = epochs
        self.g = tf.Graph()
        with self.g.as_default():
            tf.set_random_seed(seed)
            self.obs = tf.placeholder(tf.float32, (None, *(env.observation_space.shape or ())))
            self.ret = tf.placeholder(tf.float32, (None,))
            self.v = tf.squeeze(core_tf1.mlp(self.obs, [*hidden_sizes, 1]), axis=1)
            self.loss = tf.reduce_mean((self.v - self.ret) ** 2)
            self.train = tf.train.AdamOptimizer(3e-3).minimize(self.loss)
            self.init = tf.global_variables_initializer()
        self.sess = tf.Session(graph=self.g, config=mpi_util.tf_config)
        self.sess.run(self.init)

    def predict(self, observes: np.ndarray) -> np.ndarray:
        values: np.ndarray = self.sess.run(self.v, {self.obs: observes})
        return values

    def fit(self, observes: np.ndarray, disc_sum_rew: np.ndarray) -> dict[str, float]:
        feed = {self.obs: observes, self.ret: disc_sum_rew}
        loss = 0.0
        for _ in range(self.epochs):
            _, loss = self.sess.run([self.train, self.loss], feed)
        return {"val_loss": loss}


Episode = tuple[np.ndarray, np.ndarray, np.ndarray, bool]


def run_episode(env: gym.Env, policy: Policy) -> Episode:
    """Plays one episode.

    Returns:
        Observations (one more than steps: the last is where it ended), actions, rewards, and whether it terminated.
        Where it was truncated, the value of its last observation takes the place of the rewards to come.
    """
    observes, actions, rewards, terminated, truncated = [env.reset()[0]], [], [], False, False
    while not (terminated or truncated):
        actions.append(policy.sample(observes[-1]))
        obs, rew, terminated, truncated, _ = env.step(actions[-1])
        observes.append(obs)
        rewards.append(rew)
    return np.array(observes, np.float32), np.array(actions), np.array(rewards, np.float32), terminated


def build_batch(episodes: list[Episode], val_func: ValueFunction, gamma: float, lam: float) -> dict[str, np.ndarray]:
    """What this rank's episodes bring to the update."""
    parts: dict[str, list[np.ndarray]] = {"observes": [], "actions": [], "advantages": [], "disc_sum_rew": []}
    for observes, actions, rewards, terminated in episodes:
        values = val_func.predict(observes)
        if terminated:
            values[-1] = 0
        parts["observes"].append(observes[:-1])
        parts["actions"].append(actions)
        parts["advantages"].append(core.discount(rewards + gamma * values[1:] - values[:-1], gamma * lam))
        parts["disc_sum_rew"].append(core.discount(np.append(rewards, values[-1]), gamma)[:-1])
    batch = {key: np.concatenate(arrays) for key, arrays in parts.items()}
    return batch | {"returns": np.array([rewards.sum() for _, _, rewards, _ in episodes])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_name", nargs="?", default="CartPole-v1", help="of Gymnasium (default: CartPole-v1)")
    parser.add_argument("--nprocs", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("-n", "--num_episodes", type=int, default=600, help="in all (default: 600)")
    parser.add_argument("-b", "--batch_size", type=int, default=20, help="episodes an update (default: 20)")
    parser.add_argument("-g", "--gamma", type=float, default=0.99, help="discount, 0 to 1 (default: 0.99)")
    parser.add_argument("-l", "--lam", type=float, default=0.97, help="of GAE, 0 to 1 (default: 0.97)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--check", action="store_true", help="at the end each rank prints a checksum of its weights")
    args = parser.parse_args()
    if mpi_util.mpi_fork(args.nprocs) == "parent":  # 3
        sys.exit()
    seed = args.seed + mpi_util.rank
    mpi_util.set_global_seeds(seed)  # 4
    env = core.make_env(args.env_name)
    env.reset(seed=seed)
    policy = Policy(env, [64, 64], seed)
    val_func = ValueFunction(env, [64, 64], seed)

    def send_weights() -> None:
        mpi_util.rank0_bcast_wts(val_func.sess, val_func.g, "val")  # 8
        mpi_util.rank0_bcast_wts(policy.sess, policy.g, "policy")

    send_weights()  # each rank has its own random weights so far
    n_own = max(1, len(range(mpi_util.rank, args.batch_size, mpi_util.nworkers)))
    episode = 0
    while episode < args.num_episodes:
        episodes = [run_episode(env, policy) for _ in range(n_own)]
        d = mpi_util.rank0_accum_batches(build_batch(episodes, val_func, args.gamma, args.lam))  # 6
        if mpi_util.rank == 0:  # 7
            advantages = (d["advantages"] - d["advantages"].mean()) / (d["advantages"].std() + 1e-6)
            log = policy.update(d["observes"], d["actions"], advantages)
            log |= val_func.fit(d["observes"], d["disc_sum_rew"])
            log = {"return": d["returns"].mean(), "steps": len(advantages), **log}
            print(f"episode {episode + len(d['returns'])}", *(f"{k} {v:.4g}" for k, v in log.items()), sep="\t")  # 5
        send_weights()
        episode += max(args.batch_size, mpi_util.nworkers)
    if args.check:
        mpi_util.chksum(policy.sess, policy.g, "policy")
        mpi_util.chksum(val_func.sess, val_func.g, "value")


if __name__ == "__main__":
    main()
