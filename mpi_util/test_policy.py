"""Plays episodes with a policy that a logger has saved, as Spinning Up's test_policy does.

    python -m mpi_util.test_policy data/ppo/ppo_s0 --episodes 20 --norender --trust

A folder with pyt_save needs torch, one with tf1_save TensorFlow. The environment in vars.pkl, and torch's model, are
pickles, which can run any code: --trust says that the folder is your own.
"""

import argparse
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .arrays.frameworks import framework
from .errors import MpiUtilError, UsageError
from .logx import EpochLogger, restore_tf_graph

Act = Callable[[np.ndarray], Any]


def load_policy_and_env(
    fpath: str | Path, itr: int | str = "last", deterministic: bool = False, *, trust: bool = False
) -> tuple[Any, Act]:
    """(environment, function of an observation that returns an action) of a run's folder.

    Args:
        itr: which save; "last": the newest. deterministic: the most likely action; torch's drawn ones only.
        trust: True unpickles, and so runs whatever code is in the files.

    Raises UsageError: there is no such save, or it is not trusted.
    """
    folder = Path(fpath)
    if not trust:
        raise UsageError(
            f"{folder} holds pickles, which can run any code; if the folder is your own: trust=True, --trust"
        )
    number = "" if itr == "last" else str(itr)
    saved = {path.stem[4:]: path for path in folder.glob("vars*.pkl")}
    if itr == "last" and "" not in saved and saved:
        number = max(saved, key=int)
    if number not in saved:
        raise UsageError(f"{folder} has no vars{number}.pkl; it has: {', '.join(sorted(saved)) or 'none'}")
    env = pickle.loads(saved[number].read_bytes())["env"]  # noqa: S301  # the caller trusts it
    if (folder / f"tf1_save{number}").exists():
        return env, _tf_policy(folder / f"tf1_save{number}", deterministic)
    torch = framework("torch")
    path = folder / "pyt_save" / f"model{number}.pt"
    if not path.exists():
        raise UsageError(f"{folder} has neither tf1_save{number} nor pyt_save/model{number}.pt")
    model = torch.load(path, weights_only=False)

    def act(obs: np.ndarray) -> Any:
        with torch.no_grad():
            return model.act(torch.as_tensor(obs, dtype=torch.float32))

    return env, act


def _tf_policy(folder: Path, deterministic: bool) -> Act:
    v1 = framework("tensorflow").compat.v1
    session = v1.Session(graph=v1.Graph())
    model = restore_tf_graph(session, folder, trust=True)
    action = model["mu" if deterministic and "mu" in model else "pi"]
    return lambda obs: session.run(action, {model["x"]: obs[None]})[0]


def run_policy(
    env: Any, get_action: Act, max_ep_len: int | None = None, num_episodes: int = 100, render: bool = True
) -> None:
    """Plays episodes, prints their returns and statistics. Args: max_ep_len: steps at most; None: no limit."""
    logger = EpochLogger()
    for n in range(num_episodes):
        obs, ep_ret, ep_len, ended = env.reset()[0], 0.0, 0, False
        while not (ended or ep_len == max_ep_len):
            if render and getattr(env, "render_mode", None):
                env.render()
            obs, rew, terminated, truncated, _ = env.step(get_action(obs))
            ep_ret, ep_len, ended = ep_ret + float(rew), ep_len + 1, terminated or truncated
        logger.store(EpRet=ep_ret, EpLen=ep_len)
        print(f"Episode {n} \t EpRet {ep_ret:.3f} \t EpLen {ep_len}")
    logger.log_tabular("EpRet", with_min_and_max=True)
    logger.log_tabular("EpLen", average_only=True)
    logger.dump_tabular()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fpath", help="folder of the run")
    parser.add_argument("--len", "-l", type=int, default=0, help="steps of an episode at most (default: no limit)")
    parser.add_argument("--episodes", "-n", type=int, default=100, help="default: 100")
    parser.add_argument("--norender", "-nr", action="store_true", help="do not draw the environment")
    parser.add_argument("--itr", "-i", type=int, default=-1, help="which save (default: the newest)")
    parser.add_argument("--deterministic", "-d", action="store_true", help="the most likely actions, where saved")
    parser.add_argument("--trust", action="store_true", help="the folder is your own: unpickle what is in it")
    args = parser.parse_args(arguments)
    try:
        itr = "last" if args.itr < 0 else args.itr
        env, act = load_policy_and_env(args.fpath, itr, args.deterministic, trust=args.trust)
    except MpiUtilError as error:
        parser.exit(2, f"mpi_util.test_policy: {error}\n")
    run_policy(env, act, args.len or None, args.episodes, not args.norender)
    return 0


if __name__ == "__main__":
    sys.exit(main())
