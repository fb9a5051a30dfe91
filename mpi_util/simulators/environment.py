"""`simulator`: an environment that runs on several ranks, as one environment for its worker; in each rank's process."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.adapters import framework
from ..errors import UsageError
from ..ranks.identity import Role
from ..ranks.state import state
from .process import Path_, Process
from .team import Request, Team

_numbers = itertools.count()  # of this worker's environments
_LONGEST_S = 1e6  # poll(2) takes not much more


def simulator(
    make_env: Callable[..., Any] | None = None, *, command: str | Sequence[str] | None = None,
    timeout: float | None = None, pause: bool = True, cwd: Path_ = None, log_dir: Path_ = None,
) -> Any:  # fmt: skip
    """An environment that runs on several ranks: on a team of this job's, or on those of a program that is started.

        mpi_util.mpi_fork(12, ranks_per_env=4)
        env = mpi_util.simulator(make_env)  # make_env(comm)
        env = mpi_util.simulator(command="mpiexec -n 4 python -m mpi_util.serve my_env:make")

    With `make_env` all ranks of a team call it. The first, the worker, gets the environment; on the others it does not
    return: they make each of the worker's calls on theirs, with the same arguments, and end when the worker ends.

    Args:
        make_env: makes this rank's part, given the team's communicator if it has a parameter. For another environment
            of the worker: the same object, or one that pickle takes.
        command: starts `python -m mpi_util.serve`, on this machine; words, or one string. cwd: its folder.
        timeout: seconds for its start, or a call. Then a command is ended, and this raises; a team's job ends.
        pause: stop the command's processes (SIGSTOP) while they are not called. False: they are on other hosts.
        log_dir: folder for a file of each member, or command, with what it prints. None: that is dropped.

    Returns: the first rank's environment; a Gymnasium environment if that is one.

    Raises:
        UsageError: wrong arguments; a command that cannot be started; what `make_env` makes is no environment.
        SimulatorError: in later calls too: a member, or a command, has failed, has ended, or was not done in time. An
            error on the worker's own rank is raised as it is.
    """
    if (make_env is None) == (command is None):
        raise UsageError("simulator takes make_env, for ranks of this job, or command=, which starts a program")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"simulator: timeout is a number of seconds above 0; got {timeout!r}")
    timeout = timeout and min(timeout, _LONGEST_S)
    if command is None:
        calls: Any = state(Team)
        if calls.rank:
            name = "worker-{}-member-{}.txt".format(*divmod(state(Role).rank, state(Role).ranks_per_env))
            calls.serve(make_env, os.path.join(log_dir, name) if log_dir else os.devnull)
    else:
        calls = Process(command, timeout, pause, cwd, log_dir)
    calls.make_env, number = calls.make_env or make_env, next(_numbers)
    given = None if make_env is calls.make_env else make_env
    facts = calls.call(Request(number, "making its environment", "make", args=[given]), timeout)
    kinds = (Simulator, framework("gymnasium").Env) if facts.pop("is_gymnasium") else (Simulator,)
    shown: Any = type("Simulator", kinds, {})()
    vars(shown).update(facts, _calls=calls, _number=number, _limit=timeout, _steps=0, _open=True)
    return shown


class Simulator:
    """What the worker gets. Attributes that begin with _, and the spaces and the like, are this object's own."""

    def _call(self, what: str, name: str, *args: Any, **kwargs: Any) -> Any:
        mine = vars(self)
        doing = f"step {mine['_steps']}" if name == "step" else name
        return mine["_calls"].call(Request(mine["_number"], doing, what, name, args, kwargs), mine["_limit"])

    def reset(self, **given: Any) -> Any:
        """As the environment's. Args: seed, options; None: not passed on."""
        vars(self)["_steps"] = 0
        return self._call("call", "reset", **{name: value for name, value in given.items() if value is not None})

    def step(self, action: Any) -> Any:
        vars(self)["_steps"] += 1
        return self._call("call", "step", action)

    def render(self) -> Any:
        return self._call("call", "render")

    def close(self) -> None:
        """Closes the environment, once, and ends a command."""
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
            self._call("call", "__setattr__", name, value)
