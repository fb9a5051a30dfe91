"""A call of a worker's simulator, and how one rank makes it on its part of the environment; in every rank of one."""

import functools
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays.adapters import framework
from ..errors import MpiUtilError, UsageError
from ..ranks.identity import Role, world
from ..ranks.state import state

FACTS = ("observation_space", "action_space", "metadata", "spec", "render_mode")
_LAST_LINES = 12


class Request(NamedTuple):
    """What the worker asks every rank of a simulator to do."""

    number: int  # of the environment
    what: str  # "make", "get", "set" or "call"
    name: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


class Doing:
    """What a worker's simulator does, for messages; it counts the steps since each environment's reset."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self.now = ""

    def begin(self, request: Request) -> None:
        number, what, name = request[:3]
        if name in ("reset", "step"):
            self._steps[number] = n = self._steps.get(number, 0) + 1 if name == "step" else 0
            name += f" {n}" * (n > 0)
        self.now = "making its environment" if what == "make" else name


class Environments:
    """This process's part of a worker's environments, by number.

    Attributes: make: of an environment of which the request does not say it; a function, or its name.
    """

    def __init__(self) -> None:
        self.make: Callable[..., Any] | str | None = None
        self._made: dict[int, Any] = {}

    def perform(self, request: Request) -> Any:
        """Returns: of "make" the FACTS, of "get" (is it a method?, else the value), of "call" the result."""
        number, what, name, args, kwargs = request
        if what == "make":
            env = self._made[number] = _made(args[0] or self.make)
            gymnasium = sys.modules.get("gymnasium")
            is_gymnasium = gymnasium is not None and isinstance(env, gymnasium.Env)
            return {fact: getattr(env, fact, None) for fact in FACTS} | {"is_gymnasium": is_gymnasium}
        env = self._made[number]
        if what == "get":
            return (True, None) if callable(value := getattr(env, name)) else (False, value)
        if what == "set":
            return setattr(env, name, *args)
        return getattr(env, name, _closed if name == "close" else None)(*args, **kwargs)


def _closed() -> None:
    """Of an environment without `close`."""


def _made(make: Any) -> Any:
    if isinstance(make, str):
        make = _named(make)
    try:
        parameters = [*inspect.signature(make).parameters.values()]
    except (TypeError, ValueError):  # of a class in C
        parameters = []
    takes = any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    env = make(_communicator()) if takes else make()
    if not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        raise UsageError(f"make_env returned {env!r:.99}, which is no environment: it has no reset and step")
    return env


def _named(target: str) -> Any:
    """What makes the environment of a name: a function of a module, or of a Gymnasium id."""
    module, _, function = target.partition(":")
    try:
        if function.isidentifier():
            return getattr(importlib.import_module(module), function)
        return functools.partial(framework("gymnasium").make, target)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target} makes no environment: {error}; give module:function or a Gymnasium id") from None


def _communicator() -> Any:
    """What an environment is given: that of the team; alone, COMM_SELF."""
    if team := state(Role).team:
        return team
    world()  # starts MPI, under a launcher
    from mpi4py import MPI

    return MPI.COMM_SELF


def last_lines(error: BaseException) -> str:
    """Of the traceback; an error of this package is its text alone."""
    if isinstance(error, MpiUtilError):
        return str(error)
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "\n".join(lines[-_LAST_LINES:])


def seconds(timeout: float | None) -> float:
    """`timeout`, or inf for None. UsageError: it is no number above 0."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise UsageError(f"simulator: timeout is a number of seconds above 0; got {timeout!r}")
    return timeout
