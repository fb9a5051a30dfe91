"""A second process evaluates the newest policy while training goes on.

    python examples/async_evaluator.py
    python examples/async_evaluator.py --env Pendulum-v1 --eval_episodes 50

Training is the random search of same_bits.py, in one process. After each iteration it sends its policy, and does not
wait (`sync=False`). The evaluator takes the newest version when it is ready for one, and leaves out those in between.
Inside `frozen()` the policy does not change, and the version says which one it is: each result comes back with it.
Lines marked `# +` need mpi_util.
"""

import argparse
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np

from mpi_util_weight_sync import MultiProcessWeightSyncScheme  # +

STEP, NOISE = 0.5, 0.5


class Player:
    """An environment, and a linear policy for it."""

    def __init__(self, env_id: str) -> None:
        env: Any = gym.wrappers.FlattenObservation(gym.make(env_id))
        self.env, self.space = env, env.action_space
        self.discrete = isinstance(self.space, gym.spaces.Discrete)
        n_act = int(self.space.n if self.discrete else self.space.shape[0])
        self.policy = {"weights": np.zeros((n_act, *env.observation_space.shape))}

    def play(self, seed: int, noise: Any = 0.0) -> float:
        """The return of an episode with the policy, plus noise."""
        obs, _ = self.env.reset(seed=seed)
        ret, over = 0.0, False
        while not over:
            scores, space = (self.policy["weights"] + noise) @ obs, self.space
            act = scores.argmax() if self.discrete else scores.clip(space.low, space.high)
            obs, rew, terminated, truncated, _ = self.env.step(act)
            ret, over = ret + float(rew), terminated or truncated
        return ret


def evaluate(scheme: MultiProcessWeightSyncScheme, results: Connection, env_id: str, n_episodes: int) -> None:
    """The second process: plays the newest version, again and again, until the trainer has shut down."""
    player, evaluated = Player(env_id), 0
    scheme.init_on_receiver(model_id="policy", worker_idx=0, model=player.policy)  # +
    scheme.connect()  # +  brings version 1; later ones arrive in a thread
    while not scheme.ended:  # +
        with scheme.frozen() as version:  # +
            if version > evaluated:
                results.send((version, float(np.mean([player.play(seed) for seed in range(n_episodes)]))))
        evaluated = version
        scheme.wait_ended(0.01)  # +


def main() -> None:
    """Trains, and prints the evaluations as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", help="id of Gymnasium, or module:id (default: CartPole-v1)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--episodes", type=int, default=40, help="an iteration (default: 40)")
    parser.add_argument("--iterations", type=int, default=10, help="(default: 10)")
    parser.add_argument("--eval_episodes", type=int, default=20, help="to evaluate one version (default: 20)")
    args = parser.parse_args()
    player, rng = Player(args.env), np.random.default_rng(args.seed)
    weights, version, evaluated = player.policy["weights"], 1, 0
    scheme = MultiProcessWeightSyncScheme(sync=False)  # +
    scheme.init_on_sender(model_id="policy", model=player.policy, num_workers=1)  # +
    results, theirs = multiprocessing.Pipe(duplex=False)
    given = scheme, theirs, args.env, args.eval_episodes
    evaluator = multiprocessing.get_context("spawn").Process(target=evaluate, args=given, daemon=True)
    evaluator.start()
    theirs.close()  # so that `recv` raises EOFError if the evaluator dies
    scheme.connect()  # +  does not wait either: the evaluator gets the newest version when it connects
    for iteration in range(args.iterations):
        noise = NOISE * rng.normal(size=(args.episodes, *weights.shape))
        returns = np.array([player.play(int(rng.integers(2**31)), one) for one in noise])
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        weights += STEP * (advantages[:, None, None] * noise).mean(axis=0) / NOISE
        version = scheme.send()  # +
        print(f"iteration {iteration}: return {returns.mean():.1f}; its policy is version {version}")
        while results.poll() or (iteration == args.iterations - 1 and evaluated < version):
            evaluated, ret = results.recv()
            print(f"evaluation of version {evaluated}: return {ret:.1f}; the newest is version {version}")
    scheme.shutdown()  # +
    evaluator.join()


if __name__ == "__main__":
    main()
