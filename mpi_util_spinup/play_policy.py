"""Plays episodes with a policy that a logger has saved, in a process of its own: `spinup.utils.test_policy`.

    python -m mpi_util_spinup.play_policy data/ppo/ppo_s0 --trust --episodes 20 --norender

A folder with pyt_save needs torch, one with tf1_save TensorFlow. The environment in vars.pkl, and torch's model, are
pickles, which can run any code, so --trust says that you trust the folder: it is a run of yours.
"""

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpi_util.arrays.adapters import framework
from mpi_util.errors import MpiUtilError, UsageError, first_line

from .logx import EpochLogger, restore_tf_graph

Act = Callable[[np.ndarray], Any]


def load_policy_and_env(
    fpath: str | Path, itr: int | str = "last", deterministic: bool = False, *, trust: bool = False
) -> tuple[Any, Act]:
    """(environment, function of an observation that returns an action) of a run's folder.

    The environment is None if it was not saved, or cannot be loaded here, about which a line is printed.

    Args:
        itr: which save; "last": that of the highest iteration, or the one without.
        deterministic: the most likely action, if a TensorFlow model has it as "mu"; torch's actions are drawn.
        trust: True unpickles, and so runs whatever code is in the files; say it of runs of your own.
    Raises UsageError: there is no such save, or it holds a pickle and is not trusted.
    """
    folder = Path(fpath)
    sessions = {path.name[8:]: path for path in folder.glob("tf1_save*")}
    saves = sessions or {path.stem[5:]: path for path in folder.glob("pyt_save/model*.pt")}
    number = max(saves, key=lambda n: int(n) if n.isdigit() else -len(n), default="") if itr == "last" else str(itr)
    if number not in saves:
        raise UsageError(f"{folder} has neither tf1_save{number} nor pyt_save/model{number}.pt")
    env_path, save = folder / f"vars{number}.pkl", saves[number]
    pickles = [path for path in (env_path, save) if path.exists() and not path.is_dir()]  # also one that a FIFO gives
    if pickles and not trust:
        what = "is a pickle, which can run any code; if you trust it, as a run of your own: --trust, trust=True"
        raise UsageError(f"{pickles[0]} {what}")
    if sessions:
        session = (v1 := framework("tensorflow").compat.v1).Session(graph=v1.Graph())
        tensors = restore_tf_graph(session, save, trust=trust)
        action = tensors["mu" if deterministic and "mu" in tensors else "pi"]
        act: Act = lambda obs: session.run(action, {tensors["x"]: obs[None]})[0]  # noqa: E731
    else:
        torch = framework("torch")
        try:
            model = torch.load(save, map_location="cpu", weights_only=False)
        except Exception as error:  # of whatever code
            raise UsageError(f"cannot load {save}: {type(error).__name__}: {first_line(error)}") from None
        act = torch.no_grad()(lambda obs: model.act(torch.as_tensor(obs, dtype=torch.float32)))
    env = None
    if env_path.exists():
        try:
            env = pickle.loads(env_path.read_bytes())["env"]  # noqa: S301  # trusted
        except Exception as error:  # of whatever environment
            print(f"the environment in {env_path} cannot be loaded: {type(error).__name__}: {error}")
    return env, act


def run_policy(
    env: Any, get_action: Act, max_ep_len: int | None = None, num_episodes: int = 100, render: bool = True
) -> None:
    """Plays episodes of at most `max_ep_len` steps (None, 0: no limit), and prints their returns and statistics.

    Args: render: in a window, if there is a display. Raises UsageError: `env` is None.
    """
    if env is None:
        raise UsageError("the environment was not saved with the policy; make it, and give it to run_policy(env, act)")
    env = _drawn(env) if render else env
    logger = EpochLogger()
    for n in range(num_episodes):
        obs, ep_ret, ep_len, ended = env.reset(), 0.0, 0, False
        obs = obs[0] if isinstance(obs, tuple) else obs  # of gym before 0.26 it is alone
        while not ended:
            if render and getattr(env, "render_mode", None):
                env.render()
            obs, rew, *done, _ = env.step(get_action(obs))
            ep_ret, ep_len = ep_ret + float(rew), ep_len + 1
            ended = any(done) or ep_len == max_ep_len
        logger.store(EpRet=ep_ret, EpLen=ep_len)
        print(f"Episode {n} \t EpRet {ep_ret:.3f} \t EpLen {ep_len}")
    logger.log_tabular("EpRet", with_min_and_max=num_episodes > 1, average_only=num_episodes < 2)
    logger.log_tabular("EpLen", average_only=True)
    logger.dump_tabular()


def _drawn(env: Any) -> Any:
    """`env`, or where it draws nothing another one of its kind with a window: Gymnasium makes it with or without."""
    spec = getattr(env, "spec", None)
    if getattr(env, "render_mode", None) or spec is None:
        return env
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        print("no display here, so the episodes are not drawn")
        return env
    return framework("gymnasium").make(spec, render_mode="human")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fpath", help="folder of the run")
    parser.add_argument("--len", "-l", type=int, default=0, help="steps of an episode at most (default: no limit)")
    parser.add_argument("--episodes", "-n", type=int, default=100, help="default: 100")
    parser.add_argument("--norender", "-nr", action="store_true", help="do not draw the environment")
    parser.add_argument("--itr", "-i", type=int, default=-1, help="which save (default: the highest)")
    parser.add_argument("--deterministic", "-d", action="store_true", help="the most likely actions, where saved")
    parser.add_argument("--trust", action="store_true", help="unpickle what is in the folder: a run of yours")
    args = parser.parse_args(arguments)
    try:
        itr = args.itr if args.itr >= 0 else "last"
        env, act = load_policy_and_env(args.fpath, itr, args.deterministic, trust=args.trust)
        run_policy(env, act, args.len, args.episodes, not args.norender)
    except MpiUtilError as error:
        parser.exit(2, f"mpi_util_spinup.play_policy: {error}\n")


if __name__ == "__main__":
    main()
