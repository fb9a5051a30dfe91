"""Plays episodes with a policy that another program of this folder has saved, as Spinning Up's test_policy does.

    python examples/adopt_test_policy.py data/trpo_tf1/trpo_tf1_s0 --episodes 20 --trust

A folder with tf1_save needs TensorFlow, one with pyt_save torch. The environment, and with torch the policy, are
pickles, which can run any code: --trust says that the folder is your own.
"""

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpi_util_spinup.logx import EpochLogger, restore_tf_graph


def load_tf_policy(folder: Path) -> Callable[[np.ndarray], Any]:
    """A function of an observation that returns an action."""
    import tensorflow.compat.v1 as tf

    sess = tf.Session(graph=tf.Graph())
    model = restore_tf_graph(sess, folder / "tf1_save")
    return lambda obs: sess.run(model["pi"], {model["x"]: obs[None]})[0]


def load_torch_policy(folder: Path) -> Callable[[np.ndarray], Any]:
    """A function of an observation that returns an action."""
    import torch

    ac = torch.load(folder / "pyt_save" / "model.pt", weights_only=False)  # --trust
    return lambda obs: ac.step(obs)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("--episodes", type=int, default=20, help="(default: 20)")
    parser.add_argument("--trust", action="store_true", help="the folder is your own: unpickle what is in it")
    args = parser.parse_args()
    if not args.trust:
        parser.error(f"{args.folder} holds pickles, which can run any code; if the folder is your own, add --trust")
    env = pickle.loads((args.folder / "vars.pkl").read_bytes())["env"]  # noqa: S301
    policy = (load_tf_policy if (args.folder / "tf1_save").exists() else load_torch_policy)(args.folder)
    logger = EpochLogger()
    for _ in range(args.episodes):
        obs, ep_ret, ep_len, done = env.reset()[0], 0.0, 0, False
        while not done:
            obs, rew, terminated, truncated, _ = env.step(policy(obs))
            ep_ret, ep_len, done = ep_ret + rew, ep_len + 1, terminated or truncated
        logger.store(EpRet=ep_ret, EpLen=ep_len)
    logger.log_tabular("EpRet", with_min_and_max=True)
    logger.log_tabular("EpLen", average_only=True)
    logger.dump_tabular()


if __name__ == "__main__":
    main()
