"""`simulator`: an environment that runs on several ranks, as one environment for its worker; in each rank's process."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..arrays.adapters import framework
from ..errors import UsageError
from ..ranks.identity import Role
from ..ranks.state import state
from .calls import Request, seconds
from .process import Process
from .team import Team


def simulator(
    make_env: Callable[..., Any] | None = None, *, command: str | Sequence[str] | None = None,
    timeout: float | None = None, pause: bool = True, log_dir: str | os.PathLike[str] | None = None,
    cwd: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """An environment that runs on several ranks: a team of this job's, or those of a program that a command starts.

        mpi_util.mpi_fork(12, ranks_per_env=4)
        env = mpi_util.simulator(make_env)  # make_env(comm)
        env = mpi_util.simulator(command="mpiexec -n 4 python -m mpi_util.serve my_env:make")

    With `make_env` all ranks of a team call it. The first, the worker, gets the environment; on the others it does not
    return: they make each of the worker's calls on theirs, with the same arguments, and end when the worker ends. With
    `command` the worker calls it alone.

    Args:
        make_env: makes this rank's part, given the communicator of the team (unless it has no parameter). For another
            environment of the worker: the same object, or one that pickle takes.
        command: starts `python -m mpi_util.serve` on this machine; words, or one string.
        timeout: seconds for a step or a reset. Then a command is ended, and the call raises; a team's job is ended.
        pause: stop the command's processes (SIGSTOP) while they are not called. False: where they are on other hosts.
        log_dir: folder for a file of each member, or command, with what it prints. None: that is dropped.
        cwd, env: the command's folder; environment variables, besides this process's without those of mpi_fork and MPI.

    Returns:
        On a worker, an object that has the environment's attributes and methods, with the results of its first rank; a
        Gymnasium environment if that is one.

    Raises:
        UsageError: wrong arguments; a command that cannot be started; `make_env` makes no environment.
        SimulatorError: here and in each call: a member or a served environment failed, or the command has ended, or it
            was not done in time. What the environment raises on the worker's own rank is raised as it is.
    """
    if (make_env is None) == (command is None):
        raise UsageError("simulator takes either make_env, for ranks of this job, or command=, which starts a program")
    limit = seconds(timeout)
    if command is not None:
        return _shown(Process(command, limit, pause, log_dir, cwd, env), None)
    team = state(Team)
    if team.rank:
        team.serve(make_env, _log_of_member(log_dir))
    team.watch(limit)
    return _shown(team, make_env)


def _log_of_member(log_dir: str | os.PathLike[str] | None) -> str:
    if log_dir is None:
        return os.devnull
    os.makedirs(log_dir, exist_ok=True)
    number, member = divmod(state(Role).rank, state(Role).ranks_per_env)
    return str(Path(log_dir, f"worker-{number}-member-{member}.txt"))


def _shown(calls: Team | Process, make_env: Any) -> Any:
    number, facts = calls.make(make_env)
    kinds = (Simulator, framework("gymnasium").Env) if facts.pop("is_gymnasium") else (Simulator,)
    kind: Any = type("Simulator", kinds, {})
    return kind(calls, number, facts)


class Simulator:
    """What the worker gets. Attributes that begin with _, and the spaces and the like, are this object's own."""

    def __init__(self, calls: Team | Process, number: int, facts: dict[str, Any]):
        vars(self).update(facts, _calls=calls, _number=number, _open=True)

    def _call(self, what: str, name: str, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_calls"].call(Request(vars(self)["_number"], what, name, args, kwargs))

    def reset(self, **given: Any) -> Any:
        """As the environment's. Args: seed, options; None: not passed on."""
        return self._call("call", "reset", **{name: value for name, value in given.items() if value is not None})

    def step(self, action: Any) -> Any:
        return self._call("call", "step", action)

    def render(self) -> Any:
        return self._call("call", "render")

    def close(self) -> None:
        """Closes the environment, once; a command is ended."""
        if vars(self)["_open"]:
            vars(self)["_open"] = False
            self._call("call", "close")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        is_method, value = self._call("get", name)
        return functools.partial(self._call, "call", name) if is_method else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in vars(self):
            vars(self)[name] = value
        else:
            self._call("set", name, value)
