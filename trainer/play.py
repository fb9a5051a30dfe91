"""Plays the policy of a run, in NumPy, whichever framework trained it: in a window, as a video, or for its returns.

    python train.py --watch runs/Hopper-v4/20260101-120000-s0
    python train.py --watch runs/Hopper-v4/20260101-120000-s0 --episodes 1 --video hopper.mp4

`load_policy` gives it to a program.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import mpi_util
from mpi_util_spinup.files import draft_folder, publish, read
from mpi_util_spinup.table import say
from policies.actor import OUT_GAINS, Spec
from policies.scaler import scaler_for
from trainer.config import OF_ENV, Config
from trainer.control import BadData, Control
from trainer.environment import Flat, action_map, display_works, make_env, make_shown_env
from trainer.rollout import Episode, Runner, networks
from trainer.run_folder import BEST, POLICY, from_start, load, require_fitting, require_trust

PROBE = """
import sys
sys.path[:] = filter(None, sys.path)  # not the current folder first
from pathlib import Path
from trainer.play import SavedPolicy
env = SavedPolicy(Path(sys.argv[1]), trust=True).make_env(render_mode="rgb_array")
env.reset(seed=0)
sys.exit(0 if env.render() is not None else "it makes no pictures")
"""
FPS = 30  # pictures of a second at most
SHOWN_S, ERASE = 0.2, "\r\x1b[K"  # between two lines of progress; what removes one from a terminal


class SavedPolicy:
    """A trained policy. It needs neither torch nor TensorFlow, unless --network made it.

    Attributes: path: its file. notes: what was saved with it; `test_ret`: the mean return of its evaluation.
    """

    def __init__(self, path: Path, trust: bool = False):
        """Raises ValueError: one line: the file is missing or damaged, or names modules in another's folder."""
        self.path, (arrays, self.notes) = path, load(path)
        self.spec = spec = Spec.from_dict(self.notes.get("spec", {}))
        if spec is None:
            raise ValueError(f"cannot load {path}: spec in it is missing or out of range")
        require_trust(self.config().check(), path, trust)
        self.scaler = scaler_for(spec)
        likes = {name: np.empty(shape, np.float32) for net in OUT_GAINS for name, shape in spec.shapes(net).items()}
        if spec.network:
            likes = networks(spec).init_params(spec, np.random.default_rng())
        require_fitting(path, arrays, self.scaler.arrays | likes)
        for name, array in self.scaler.arrays.items():
            array[:] = arrays.pop(name)
        self.actor = networks(self.spec).Actor(self.spec, arrays)
        self._rng = np.random.default_rng()

    def make_env(self, **more: Any) -> gym.Env:
        """The environment it was trained in, with flat observations. Args: more: keywords besides those of the run."""
        return make_env(self.config(), quiet=True, **more)

    def config(self, seed: int = 0) -> Config:
        """The settings of its environment. Args: seed: of episodes."""
        of_env = {name: self.notes[name] for name in OF_ENV if name in self.notes}
        return Config(**of_env, nprocs=of_env.get("ranks_per_env") or 1, network=self.spec.network, seed=seed)

    @functools.cached_property
    def runner(self) -> Runner:
        """Plays episodes in an environment without pictures, deterministically."""
        return self.player(self.make_env())

    def player(self, env: gym.Env, seed: int = 0, stochastic: bool = False) -> Runner:
        """Plays episodes in `env`. Args: seed: of the episodes. stochastic: actions are drawn."""
        of_env = env.observation_space.shape, *action_map(env.action_space)[:2]
        if of_env != ((self.spec.obs_dim,), self.spec.act_dim, self.spec.discrete):
            raise ValueError(f"{self.path}: its weights belong to other networks or another environment")
        return Runner(env, self.actor, self.scaler, self.config(seed), Control(), False, not stochastic)

    def act(self, obs: Any, stochastic: bool = False) -> Any:
        """The environment's action for one of its observations, or for one of `make_env`'s, which are flat.

        Args: stochastic: drawn, and not the most likely. Raises: ValueError: one line: it is neither.
        """
        env, flat = self.runner.env, obs
        is_row = isinstance(obs, np.ndarray) and obs.shape == (self.spec.obs_dim,)
        if isinstance(env, Flat) and not (is_row and not env.env.observation_space.contains(obs)):
            flat = env.observation(obs)
        if np.shape(flat) != (self.spec.obs_dim,):
            raise ValueError(f"an observation of shape {np.shape(flat)}; the policy's has ({self.spec.obs_dim},)")
        out = self.actor.output(self.scaler.scale(np.asarray(flat, self.spec.obs_dtype)))
        noise = next(iter(self.actor.noise(self._rng, 1)))
        return self.runner.to_env(self.actor.sample(out, noise) if stochastic else self.actor.mode(out))

    def to_torch(self) -> Any:
        """A torch.nn.Sequential of its mean action (Box, from -1 to 1 before the environment's range) or logits.

        Its input are flat observations, float32 (N, obs_dim), unscaled.
        """
        import torch

        from policies.torch import modules

        params = {name: array.copy() for name, array in self.actor.params.items()}
        return torch.nn.Sequential(modules.Scaling(self.scaler), modules.Actor(self.spec, params).modules["policy"])

    def to_onnx(self, path: str | Path) -> None:
        """Writes `to_torch`'s network as ONNX: "obs", float32 (N, obs_dim), to "act".

        Raises: ImportError: one line: onnx or onnxscript is not installed.
        """
        import torch

        if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
            raise ImportError(f"to_onnx needs {' and '.join(missing)}: pip install onnx onnxscript")
        example, any_rows = torch.zeros(2, self.spec.obs_dim), ({0: torch.export.Dim("n")},)
        torch.onnx.export(
            self.to_torch(), (example,), path, dynamic_shapes=any_rows,
            input_names=["obs"], output_names=["act"], verbose=False, external_data=False,
        )  # fmt: skip


def load_policy(run: str | Path, which: str = "", *, trust: bool = False) -> SavedPolicy:
    """The policy of a run folder, or of a file in it.

    Args: which: "best": with the highest mean return of an evaluation; "last"; "": the best one, if there is one.
    Raises ValueError: one line: there is none, it is damaged, or names modules in another's folder, without `trust`.
    """
    path = Path(run)
    if path.is_dir():
        evaluated = (path / BEST).exists()
        if which == "best" and not evaluated:
            raise ValueError(f"{path} has no {BEST}: the run has not evaluated its policy (--eval_every)")
        path /= {"best": BEST, "last": POLICY, "": BEST if evaluated else POLICY}[which]
    return SavedPolicy(path, trust)


def listed(folder: Path) -> str:
    """Lines about the runs in a folder of several, with the command to watch each; "": it holds none, or is one."""
    lines = [("name", "environment", "steps", "return", "")]
    for path in sorted(folder.rglob(POLICY)) if not (folder / POLICY).exists() else ():
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):
            rows += map(json.loads, read(path.parent / "progress.jsonl").splitlines())
        with contextlib.suppress(ValueError, AttributeError):  # what is damaged is left out
            name, notes = str(path.parent.relative_to(folder)), load(path)[1]
            steps = f"{rows[-1].get('TotalEnvInteracts', 0):,}" if rows else ""
            rets = [f"{notes['test_ret']:,.1f}" if "test_ret" in notes else ""]  # where there are no rows
            rets += [f"{row['AverageEpRet']:,.1f}" for row in rows if row.get("AverageEpRet") is not None]
            command = shlex.join(["python", sys.argv[0], "--watch", str(path.parent)])
            lines.append((name, notes["env"], steps, rets[-1], command))
    a, b, c, d, _ = (max(map(len, column)) for column in zip(*lines))
    text = "\n".join(f"{v:<{a}}  {w:<{b}}  {x:>{c}}  {y:>{d}}  {z}".rstrip() for v, w, x, y, z in lines)
    return text * (len(lines) > 1)


def choose_drawing(policy: SavedPolicy) -> None:
    """Sets MUJOCO_GL and the like to what draws here. Raises ValueError: nothing does; one line with the reason."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame's
    ways = [os.environ["MUJOCO_GL"]] if "MUJOCO_GL" in os.environ else ["glfw"] * display_works() + ["egl", "osmesa"]
    why = ""
    for way in ways:
        command = [sys.executable, "-c", PROBE, str(policy.path)]
        env = os.environ | {"MUJOCO_GL": way, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # in a process of its own: a library may abort it
        tried = subprocess.run(command, env=env, capture_output=True, text=True)  # noqa: S603  # our own program
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = way
            return
        why = why or [f"status {tried.returncode}", *tried.stderr.strip().splitlines()][-1]
    needs = "MuJoCo needs libEGL or OSMesa (apt-get install libegl1 libosmesa6), other environments pip install "
    needs += "'gymnasium[classic-control,box2d]'"
    raise ValueError(f"cannot draw {policy.notes['env']} here: {why.strip()[:200]}; {needs}")


def main(arguments: list[str] | None = None) -> int:
    """Prints the return of each episode, and of several their mean and standard deviation. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="train.py --watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--watch", type=Path, metavar="RUN", required=True, help="folder of runs or of one, or weights")
    parser.add_argument("--episodes", type=int, help="number of episodes (default: 10; 1 with --video)")
    parser.add_argument("--video", type=Path, metavar="FILE", help="record them: .mp4 (needs imageio-ffmpeg) or .gif")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the weights with the best evaluation (default, if any)")
    which.add_argument("--last", action="store_true", help="the newest weights")
    parser.add_argument("--stochastic", action="store_true", help="draw the actions, as in training")
    parser.add_argument("--seed", type=int, default=0, help="of the episodes (default: 0)")
    parser.add_argument("--no_window", action="store_true", help="only play, and print the returns")
    parser.add_argument("--trust", action="store_true", help="import modules that another's RUN names")
    parser.error = lambda message: parser.exit(2, f"train.py: {message}\n")  # type: ignore[method-assign]
    args = parser.parse_args(arguments)
    args.video = args.video and from_start(args.video)  # an environment may go to another folder
    args.episodes = (1 if args.video else 10) if args.episodes is None else args.episodes
    if args.episodes < 1 or args.seed < 0:
        parser.error(f"--episodes is {args.episodes}, --seed {args.seed}; they must be at least 1 and 0")
    if runs := listed(args.watch):
        say(f"{runs}\n")
        return 0
    try:
        policy = load_policy(args.watch, "best" * args.best or "last" * args.last, trust=args.trust)
        if (k := policy.config().ranks_per_env) and mpi_util.mpi_fork(k, ranks_per_env=k) == "parent":
            return 0
        say(f"{policy.notes['env']}, weights of {policy.path}\n" * (mpi_util.rank == 0))
        with draft_folder(args.video) if args.video else contextlib.nullcontext() as drafts:
            returns = _play(policy, args, drafts and drafts / args.video.name)
    except (ValueError, OSError, MemoryError, BadData) as error:
        parser.error(str(error))
    if len(returns) > 1:
        say(f"mean return {np.mean(returns):,.1f}, standard deviation {np.std(returns):.1f}\n")
    return 0


def _play(policy: SavedPolicy, args: argparse.Namespace, draft: Path | None) -> list[float]:
    every = film = None  # steps from one picture to the next; where they go
    if args.video:
        env, every, film = _filmed(policy, args.video, draft)
    elif args.no_window or not display_works():
        env = policy.make_env()
        say("" if args.no_window else "no display here, so only the returns; --video FILE.gif records\n")
    else:
        env = make_shown_env(policy.config())
    player, returns, shown_at = policy.player(env, args.seed, args.stochastic), [], time.monotonic()
    live = bool(film and sys.stdout and sys.stdout.isatty())
    most = f" of {env.spec.max_episode_steps:,}" if env.spec and env.spec.max_episode_steps else ""
    try:
        for i in range(args.episodes):
            player.start(Episode((0, i)))
            ended = False
            while not ended:
                if film:
                    film.append_data(env.render())
                    if live and time.monotonic() > shown_at + SHOWN_S:
                        say(f"{ERASE}video: step {player.episode.length:,}{most}")
                        shown_at = time.monotonic()
                batch, ended = player.run(every)
            returns.append(float(batch["ep_ret"][0]))
            say(f"{ERASE * live}episode {i + 1}: return {returns[-1]:,.1f}, {batch['ep_len'][0]} steps\n")
    finally:
        env.close()
        if film:
            film.close()
    if draft:
        publish(draft, args.video)
        say(f"video: {args.video}\n")
    return returns


def _filmed(policy: SavedPolicy, path: Path, draft: Path | None) -> tuple[gym.Env, int, Any]:
    """(environment, steps from one picture to the next, their file). ValueError: it cannot be drawn, or written."""
    import imageio.v2 as imageio

    if path.suffix not in (".mp4", ".gif"):
        raise ValueError(f"--video {path}: a video ends in .mp4 or .gif")
    if "rgb_array" not in policy.runner.env.metadata.get("render_modes", ()):
        raise ValueError(f"--video {path}: {policy.notes['env']} draws no pictures: it has no render_mode rgb_array")
    choose_drawing(policy)
    env = policy.make_env(render_mode="rgb_array")
    own = env.metadata.get("render_fps", FPS)
    every = -(-own // FPS)
    fps = own / every
    how = {"fps": fps, "macro_block_size": 2} if path.suffix == ".mp4" else {"duration": 1000 / fps, "loop": 0}
    try:
        return env, every, imageio.get_writer(draft, **how)
    except (ImportError, ValueError):
        raise ValueError(f"--video {path}: pip install imageio-ffmpeg, or give a name that ends in .gif") from None


if __name__ == "__main__":
    sys.exit(main())
