"""Gymnasium environments as the policies need them: flat observations, and actions from -1 to 1."""

import contextlib
import copy
import functools
import inspect
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np

import mpi_util
from policies.actor import CNN, LEAST_IMAGE, channels_last
from policies.hyper import users_function
from trainer.config import ATARI, Config
from trainer.control import BadData

CANNOT_BE_MADE = (ImportError, TypeError, AttributeError, ValueError, OSError, RuntimeError, mpi_util.SimulatorError)
MOST_ACTIONS = 1024  # combinations of the parts of an action, each of which is one for the policy


def make_env(config: Config, quiet: bool, **more: Any) -> gym.Env:
    """A Gymnasium environment with flat observations; `module:Env-v0` imports the module first.

    Args: quiet: suppress its warnings, which are the same on every rank. more: keywords, besides those of `config`.
    Raises: ValueError: the environment is unknown, cannot be built, or its action space is not supported.
    """
    env_id = config.env
    with warnings.catch_warnings(), contextlib.ExitStack() as afterwards:
        warnings.filterwarnings("ignore", ".*is out of date")  # the version was chosen, for comparison with others
        if ":" in env_id + config.env_wrappers and "" not in sys.path:
            sys.path.append("")  # a module of the user's folder
        arguments = _for_atari(config) | config.env_arguments | more
        if quiet:
            warnings.simplefilter("ignore")
            gym.logger.min_level = gym.logger.ERROR
            with contextlib.suppress(Exception):  # imports MuJoCo, if it is needed; `make` raises what fails here
                gym.envs.registration.load_env_creator(str(gym.spec(env_id).entry_point))
            if mujoco := sys.modules.get("mujoco"):  # its compiler would print them, in C
                afterwards.callback(mujoco.set_mju_user_warning, mujoco.get_mju_user_warning())
                mujoco.set_mju_user_warning(lambda _: None)
        try:
            env = _on_ranks(config, arguments) or gym.make(env_id, disable_env_checker=True, **arguments)
        except (gym.error.Error, *CANNOT_BE_MADE) as error:
            is_own = isinstance(error, RuntimeError) and "MUJOCO_GL" not in str(error)  # not MuJoCo's, when imported
            if is_own or mpi_util.rank >= mpi_util.nworkers:  # a reason to make it again; or a team's member has served
                raise
            own = f" One of your own: MODULE:{env_id}" if ":" not in env_id else " A function needs --ranks_per_env"
            own *= type(error) is gym.error.NameNotFound
            raise ValueError(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}{own}") from None
        renderer = getattr(env.unwrapped, "mujoco_renderer", None)
        if renderer and "trackbodyid" not in (renderer.default_cam_config or {}):
            with contextlib.suppress(KeyError):  # there is no such camera; Gymnasium 1.4 takes one that stays
                renderer.camera_id = renderer.model.camera("track").id
        for name in config.wrappers:
            env = _wrapped(env, name)
    parts = _parts(env.action_space)
    if not parts or not (all(map(_is_continuous, parts)) or 0 < len(_values(env.action_space)) <= MOST_ACTIONS):
        fits = f"Box (floating point); Discrete, MultiDiscrete or MultiBinary of {MOST_ACTIONS} combinations at most"
        raise ValueError(f"{env_id}: actions are {env.action_space}, not {fits}; or Tuple or Dict of one kind")
    space = env.observation_space
    flattens = space.is_np_flattenable and bool(_parts(space))
    if flattens and not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
        env = Flat(env)
        if _is_image(space) and not (quiet or config.network):
            n = env.observation_space.shape[0]
            print(f"train.py: observations of shape {space.shape} are flattened to {n} numbers; --network cnn is for")
            print("train.py: images, with --env_wrappers atari for Atari's games")
    if not (flattens and env.observation_space.shape[0]):
        raise ValueError(f"{env_id}: observations are {space!s:.200}; a policy needs a fixed number of numbers")
    return env


def _on_ranks(config: Config, arguments: dict[str, Any]) -> Any:
    """An environment that has several ranks; None: it has one."""
    if config.env_command:
        return mpi_util.simulator(command=config.env_command, timeout=config.env_timeout, log_dir=config.log_dir)
    if not config.ranks_per_env:
        return None
    return mpi_util.simulator(_Part(config.env, arguments), timeout=config.env_timeout, log_dir=config.log_dir)


class _Part:
    """Makes one rank's part of an environment. Pickle takes the function's name; `simulator` sees its signature."""

    def __init__(self, name: str, arguments: dict[str, Any]):
        self._name, self._arguments = name, arguments

    @property
    def __signature__(self) -> inspect.Signature:
        make = users_function("ENV", self._name)
        inspect.signature(make).bind_partial(**self._arguments)  # TypeError: it has no such argument
        return inspect.signature(functools.partial(make, **self._arguments))

    def __call__(self, *comm: Any) -> Any:
        return users_function("ENV", self._name)(*comm, **self._arguments)


def versioned(env_id: str) -> str:
    """With the newest version, which `make_env` has made, if none is named."""
    namespace, name, version = gym.envs.registration.parse_env_id(env_id.rpartition(":")[2])
    newest = gym.envs.registration.find_highest_version(namespace, name) if version is None else None
    return env_id if newest is None else f"{env_id}-v{newest}"


def check_env(config: Config) -> None:
    """On the last rank: one line on stderr if the episodes of the environment depend on where they are played."""
    if mpi_util.rank != mpi_util.nworkers - 1 or config.fresh_env:
        return
    try:
        mpi_util.check_replay(lambda: make_env(config, quiet=True), fix="--fresh_env makes a new one for each episode")
    except (mpi_util.SimulatorError, mpi_util.UsageError):
        return
    except mpi_util.MpiUtilError as error:
        print(f"train.py: {config.env} is not reproducible: {error}", file=sys.stderr)
    except (Exception, SystemExit):  # which the run reports, or survives
        return


class Flat(gym.wrappers.FlattenObservation):
    """Observations as one row of numbers; those of a Box are looked at first, as flattening would make them fit."""

    def observation(self, observation: Any) -> Any:
        """Raises BadData: the observation is not of the space."""
        space = self.env.observation_space
        if isinstance(space, gym.spaces.Box):
            found = np.asarray(observation)
            if found.shape != space.shape or not np.can_cast(found.dtype, space.dtype, "same_kind"):
                raise BadData(f"an observation is {found.dtype} of shape {found.shape}; its space is {space!s:.200}")
            return found.astype(space.dtype).reshape(-1)
        return super().observation(observation)


def image_shape(env: gym.Env, config: Config) -> tuple[int, ...]:
    """Of the observations that `make_env` has flattened, for --network cnn; (): that is not asked for.

    Raises: ValueError: one line: they are no images, or too small.
    """
    if config.network != CNN:
        return ()
    space = env.env.observation_space if isinstance(env, gym.wrappers.FlattenObservation) else env.observation_space
    if not _is_image(space) or min(space.shape[:2] if channels_last(space.shape) else space.shape[1:]) < LEAST_IMAGE:
        needs = f"--network cnn needs images of 3 dimensions and uint8, {LEAST_IMAGE} x {LEAST_IMAGE} at least"
        found = f"{space.dtype} of shape {space.shape}" if isinstance(space, gym.spaces.Box) else f"{space}"
        raise ValueError(f"{config.env}: observations are {found:.200}; {needs}")
    return tuple(space.shape)


def _is_image(space: Any) -> bool:
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def _for_atari(config: Config) -> dict[str, Any]:
    """Makes Atari's games known. Returns: keywords that the wrapper needs, which repeats each action itself."""
    if not config.env.rpartition(":")[2].startswith("ALE/"):
        return {}
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # its banner, on every rank
    gym.register_envs(ale_py)
    return {"frameskip": 1} if ATARI in config.wrappers else {}


def _atari(env: gym.Env) -> gym.Env:
    """The usual form of Atari's games (Machado et al. 2018, arXiv:1709.06009): the last 4 pictures, 84 x 84 pixels."""
    needs = "it needs one of Atari's games: pip install -c constraints.txt -e '.[atari]'"
    if not hasattr(env.unwrapped, "ale"):
        raise ValueError(needs)
    try:
        env = gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4), 4)
        env.reset(seed=0)  # some faults show here only
        return env
    except Exception as error:
        if not isinstance(error, gym.error.DependencyNotInstalled):
            needs = "it needs the game as it is, without --env_kwargs or wrappers that change pictures or actions"
        raise ValueError(f"{' '.join(str(error).split()) or type(error).__name__}; {needs}") from None


def _wrapped(env: gym.Env, name: str) -> gym.Env:
    """The environment in one of --env_wrappers. Raises ValueError: one line: there is none, or it fails."""
    wrap = _atari if name == ATARI else users_function("--env_wrappers", name)
    try:
        wrapped = wrap(env)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {' '.join(str(error).split())} ({frame.filename}, line {frame.lineno})"
        raise ValueError(f"--env_wrappers {name}: {error if wrap is _atari else what}") from None
    if not isinstance(wrapped, gym.Env):
        raise ValueError(f"--env_wrappers {name}: it returned {type(wrapped).__name__}, not an environment")
    return wrapped


def make_shown_env(config: Config, quiet: bool = True) -> gym.Env:
    """As `make_env`, in a window. Raises: ValueError: none can be opened, or what draws in it is missing."""
    if not display_works():
        instead = "`train.py --watch RUN_DIR --video FILE.gif` records"
        raise ValueError(f"no window can be opened here: there is no display; {instead}")
    env = make_env(config, quiet, render_mode="human")
    try:
        env.reset(seed=0)
    except gym.error.Error as error:  # pygame is not installed
        raise ValueError(f"cannot show {config.env}: {' '.join(str(error).split())}") from None
    return env


def display_works() -> bool:
    """True if there is a display: without this question some libraries abort the process."""
    host, _, number = os.environ.get("DISPLAY", "").partition(":")  # host: of another machine, by ssh
    here = bool(number) and os.path.exists(f"/tmp/.X11-unix/X{number.split('.')[0]}")  # noqa: S108  # X's own place
    return bool(os.environ.get("WAYLAND_DISPLAY") or host) or here


def _parts(space: Any) -> list[Any]:
    """The spaces that make up a Tuple or Dict, in the order of Gymnasium's `flatten`; else the space itself."""
    if isinstance(space, (gym.spaces.Tuple, gym.spaces.Dict)):
        inner = space.values() if isinstance(space, gym.spaces.Dict) else space
        return [part for each in inner for part in _parts(each)]
    return [space]


def _is_continuous(space: Any) -> bool:
    return isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)


def _values(space: Any) -> list[Any]:
    """All values of a space, or some if there are more than MOST_ACTIONS; []: they cannot be counted."""
    found: Iterable[Any] = ()
    if isinstance(space, gym.spaces.Tuple):
        found = itertools.product(*map(_values, space))
    elif isinstance(space, gym.spaces.Dict):
        found = (dict(zip(space, values)) for values in itertools.product(*map(_values, space.values())))
    elif isinstance(space, gym.spaces.Discrete):
        found = range(int(space.start), int(space.start) + int(space.n))
    elif isinstance(space, (gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)):
        start, counts = getattr(space, "start", 0), np.ravel(getattr(space, "nvec", np.full(space.shape, 2)))
        places = itertools.product(*(range(min(int(n), MOST_ACTIONS + 1)) for n in counts))
        found = ((start + np.reshape(place, space.shape)).astype(space.dtype) for place in places)
    return list(itertools.islice(found, MOST_ACTIONS + 1))


def action_map(space: Any) -> tuple[int, bool, Callable[[Any], Any]]:
    """(components or number of actions, discrete?, function from an actor's action to the environment's).

    Components with two finite bounds are rescaled to -1 and 1; all are clipped to their bounds.
    """
    if not all(map(_is_continuous, _parts(space))):  # each combination is an action
        values = _values(space)
        return len(values), True, lambda action: copy.deepcopy(values[action])  # an environment may change what it gets
    flat: Any = gym.spaces.flatten_space(space)
    low, high = (np.asarray(bound, np.float64) for bound in (flat.low, flat.high))
    shape, bounded = low.shape, np.isfinite(low) & np.isfinite(high)
    least, most = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    is_plain = space.shape == shape and space.dtype == np.float32
    dtype = np.float32 if is_plain else np.float64  # in which all bounds are exact
    bounds = most / 2 + least / 2, most / 2 - least / 2, low, high
    middle, half, lowest, highest = (x.astype(dtype) for x in bounds)
    is_scaled = bool((middle != 0.0).any() or (half != 1.0).any())

    def to_env(action: np.ndarray) -> Any:
        scaled = action * half + middle if is_scaled else action
        scaled = scaled.clip(lowest, highest)  # np.maximum and np.minimum use AVX-512, which slows what follows it
        return scaled if is_plain else gym.spaces.unflatten(space, scaled)

    return low.size, False, to_env
