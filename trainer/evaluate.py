"""Evaluates the policy of a run deterministically, in NumPy, whichever framework trained it.

python -m trainer.evaluate runs/Hopper-v4/20260101-120000-s0 --episodes 20
python -m trainer.evaluate runs/Hopper-v4/20260101-120000-s0/best.safetensors --render
"""

import argparse
import json
from pathlib import Path

import numpy as np

from policies.actor import Spec
from policies.scaler import Scaler
from trainer.config import Config
from trainer.control import Control
from trainer.environment import make_env
from trainer.rollout import Episode, Runner, networks
from trainer.run_folder import load


def main() -> None:
    """Prints the return of each episode, their mean and standard deviation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="run folder (for its policy.safetensors), or such a file")
    parser.add_argument("--episodes", type=int, default=10, help="number of episodes (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the episodes (default: 0)")
    parser.add_argument("--render", action="store_true", help="show the episodes in a window")
    parser.error = lambda message: parser.exit(2, f"evaluate: {message} (see --help)\n")  # type: ignore[method-assign]
    args = parser.parse_args()
    if args.episodes < 1:
        parser.error(f"--episodes is {args.episodes}; it must be 1 or more")
    try:
        runner = open_policy(args.path / "policy.safetensors" if args.path.is_dir() else args.path, args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    returns = []
    for i in range(args.episodes):
        runner.start(Episode((0, i)))
        batch, _ = runner.run()
        returns.append(batch["ep_ret"][0])
        print(f"episode {i + 1}: return {returns[-1]:.1f}, {batch['ep_len'][0]} steps", flush=True)
    print(f"mean return {np.mean(returns):.1f}, standard deviation {np.std(returns):.1f}")


def open_policy(path: Path, args: argparse.Namespace) -> Runner:
    """A Runner with the policy of a file. Raises ValueError, one line: file or environment cannot be used."""
    arrays, notes = load(path)
    spec = Spec.from_dict(notes["spec"])
    scaler = Scaler(spec.obs_dim)
    for name, array in scaler.arrays.items():
        array[:] = arrays.pop(name)
    arguments = json.loads(notes["env_kwargs"]) | ({"render_mode": "human"} if args.render else {})
    env, actor = make_env(notes["env"], arguments, quiet=True), networks(spec).Actor(spec, arrays)
    return Runner(env, actor, scaler, Config(env=notes["env"], seed=args.seed), Control(1.0), greedy=True)


if __name__ == "__main__":
    main()
