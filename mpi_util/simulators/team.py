"""A team: k ranks of the job with one environment; in the worker, which calls, and in its members, which serve.

The worker sends each call to its members, makes it itself, and takes their answers; members sleep in between. An error
that lets all ranks come to the end of the call is the worker's, which may catch it. Any other one ends the job.
"""

import contextlib
import faulthandler
import inspect
import math
import os
import pkgutil
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ..collectives.channel import Kept
from ..collectives.messages import DATA, packed
from ..errors import MpiUtilError, RankLeftError, SimulatorError, UsageError
from ..ranks import failure
from ..ranks.identity import Role, in_child_of_rank, rank, world
from ..ranks.signals import StopRequest
from ..ranks.state import state
from ..ranks.watchdog import watchdog

_FACTS = ("observation_space", "action_space", "metadata", "spec", "render_mode")
_GIVE_UP_S = 3.0  # with an error a rank waits so long for the others of its team to come to the end of the call
_LAST_LINES = 12


class Request(NamedTuple):
    """A call that each rank of a simulator makes on its part of the environment."""

    number: int  # of the environment
    doing: str  # for messages
    what: str  # "make", "get" or "call"
    name: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


class Team:
    """This rank's view of its team, and its parts of the worker's environments.

    Attributes: make_env: makes one whose request has no function; or its name, module:function.
    """

    make_env: Any = None

    def __init__(self) -> None:
        if in_child_of_rank() or not state(Role).ranks_per_env:
            fix = "mpi_fork(n, ranks_per_env=k) says how many ranks each environment has"
            raise UsageError(f"simulator(make_env) is for the ranks of a job with teams; {fix}")
        channel: Any = state(Kept).team  # None: of one rank
        self._messages: Any = channel and channel.messages
        self.rank: int = channel.rank if channel else 0
        self._members = range(1, channel.size if channel else 1)
        self._made: dict[int, Any] = {}

    def call(self, request: Request, limit: float | None = None) -> Any:
        """On the worker: makes a call on all ranks. Returns: its own result. Args: limit: seconds; then all ends."""
        late = f"is not done with {request.doing} after {limit or 0:g} s: a rank of it hangs"
        timer = threading.Timer(limit or 0, failure.fail, [f"mpi_util: the environment of worker {rank()} {late}"])
        timer.daemon = True
        if limit:
            timer.start()
            faulthandler.dump_traceback_later(limit + _GIVE_UP_S, exit=True, file=2)  # C that keeps the timer waiting
        where = {"phase": "simulator"} | state(failure.FailureState).where | {"simulator": request.doing}
        self._send(self._members, (where, request))
        try:
            result = self._perform(request)
            failed = self._failed(request)
        except Exception as error:
            with failure.during(**where):
                if self._failed(request, time.perf_counter() + _GIVE_UP_S) is None:  # they wait, in the environment
                    sys.excepthook(type(error), error, error.__traceback__)
                raise
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later() if limit else None
        for k, text in (failed or {}).items():
            raise SimulatorError(f"member {k} of worker {rank()} failed in {request.doing}:\n{text}")
        return result

    def _failed(self, request: Request, end: float = math.inf) -> dict[int, str] | None:
        """Takes the members' answers. Returns: the errors, by member; None: some have not come at time `end`."""
        answers = {k: self._messages.receive(k, request.doing, end=end) for k in self._members}
        if None in answers.values():
            return None
        failed = {k: text for k, text in answers.items() if text}
        self._send(failed, ())
        return failed

    def serve(self, make_env: Any, log: str = os.devnull) -> NoReturn:
        """On a member: makes the worker's calls, until that ends. Args: log: file for what it prints."""
        StopRequest()
        watchdog(0)  # a worker may take any time
        self.make_env = make_env
        failure.hide_stdout(log)
        if log != os.devnull:  # what libraries print to stderr too; Python's reports stay on the screen
            sys.stderr = os.fdopen(os.dup(2), "w", 1)
            os.dup2(1, 2)
        message: Any = ()
        with contextlib.suppress(RankLeftError):  # the worker has ended
            while True:
                state(failure.FailureState).where, request = message or self._messages.receive(0, "simulator")
                try:
                    self._perform(request)
                    self._send([0], "")
                    message = ()
                except Exception as error:
                    self._send([0], last_lines(error))
                    message = self._messages.receive(0, "simulator", end=time.perf_counter() + _GIVE_UP_S)
                    if message is None:  # else (), the error has come to the worker, or its next call
                        raise
        sys.exit()

    def _send(self, ranks: Collection[int], data: Any) -> None:
        if ranks:
            self._messages.post_all(dict.fromkeys(ranks, packed(DATA, (0, data))))

    def _perform(self, request: Request) -> Any:
        """Returns: of "make" the facts, of "get" (is it a method?, else the value), of "call" the result."""
        number, _, what, name, args, kwargs = request
        try:
            if what == "make":
                env = self._made[number] = _made(args[0] or self.make_env)
                facts = {fact: getattr(env, fact, None) for fact in _FACTS}
                return facts | {"is_gymnasium": any(each.__module__ == "gymnasium.core" for each in type(env).__mro__)}
            env = self._made.pop(number, None) if name == "close" else self._made.get(number)
            if env is None:
                raise SimulatorError(f"{name}: the environment was closed")
            if what == "get":
                return (True, None) if callable(value := getattr(env, name)) else (False, value)
            return None if name == "close" and not hasattr(env, name) else getattr(env, name)(*args, **kwargs)
        except SystemExit as error:
            raise RuntimeError("the environment has called sys.exit") from error


def _made(make: Any) -> Any:
    try:
        make = pkgutil.resolve_name(make) if isinstance(make, str) else make
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{make} makes no environment: {error}; give module:function") from None
    given: list[Any] = []
    if any(p.default is p.empty and p.kind < 2 for p in inspect.signature(make).parameters.values()):
        world()  # starts MPI, where a launcher has started this process
        from mpi4py import MPI

        given = [state(Role).team or MPI.COMM_SELF]
    env = make(*given)
    if not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        raise UsageError(f"make_env returned {env!r:.99}, which is no environment: it has no reset and step")
    return env


def last_lines(error: BaseException) -> str:
    """Of its traceback; an error of this package is its text alone."""
    lines = [str(error)] if isinstance(error, MpiUtilError) else traceback.format_exc().splitlines()
    return "\n".join(lines[-_LAST_LINES:])
