"""A team: k ranks of the job with one environment; in the worker, which calls, and in its members, which serve.

The worker sends each call to its members, makes it itself, and takes their answers; members sleep in between. An error
is the worker's, which may catch it, if all ranks come to the end of the call. One that leaves a rank waiting within the
environment ends the job.
"""

import importlib
import inspect
import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ..collectives.channel import Kept
from ..collectives.messages import DATA, LEAVE, Message, opened, packed
from ..errors import MpiUtilError, SimulatorError, UsageError
from ..host.waiting import wait_until
from ..ranks import failure
from ..ranks.identity import Role, in_child_of_rank, rank, world
from ..ranks.signals import StopRequest
from ..ranks.state import state
from ..ranks.watchdog import watchdog

_FACTS = ("observation_space", "action_space", "metadata", "spec", "render_mode")
_GIVE_UP_S = 3.0  # with an error a rank waits so long for the others of its team to come to the end of the call
_PATIENCE = 4  # times as long as in a collective call sleeps a rank that will be woken
_LAST_LINES = 12


class Request(NamedTuple):
    """A call that each rank of a simulator makes on its part of the environment."""

    number: int  # of the environment
    doing: str  # for messages
    what: str  # "make", "get", "set" or "call"
    name: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


class Environments:
    """This process's parts of a worker's environments.

    Attributes: make: makes one whose request has no function; or its name, module:function.
    """

    make: Any = None

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def perform(self, request: Request) -> Any:
        """Returns: of "make" the facts, of "get" (is it a method?, else the value), of "call" the result."""
        number, _, what, name, args, kwargs = request
        if what == "make":
            env = self._made[number] = _made(args[0] or self.make)
            gymnasium = sys.modules.get("gymnasium")
            facts = {fact: getattr(env, fact, None) for fact in _FACTS}
            return facts | {"is_gymnasium": gymnasium is not None and isinstance(env, gymnasium.Env)}
        env = self._made[number]
        if what == "get":
            return (True, None) if callable(value := getattr(env, name)) else (False, value)
        if what == "set":
            return setattr(env, name, *args)
        return None if name == "close" and not hasattr(env, name) else getattr(env, name)(*args, **kwargs)


def _made(make: Any) -> Any:
    if isinstance(make, str):
        module, _, function = make.partition(":")
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(f"{make} makes no environment: {error}; give module:function") from None
    try:
        given = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty and p.kind < 2]
    except (TypeError, ValueError):  # of a class in C
        given = []
    env = make(_communicator()) if given else make()
    if not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        raise UsageError(f"make_env returned {env!r:.99}, which is no environment: it has no reset and step")
    return env


def _communicator() -> Any:
    """That of the team; alone, COMM_SELF."""
    world()  # starts MPI, where a launcher has started this process
    from mpi4py import MPI

    return state(Role).team or MPI.COMM_SELF


class Team:
    """This rank's view of its team; one for all environments of a worker."""

    def __init__(self) -> None:
        if in_child_of_rank() or not state(Role).ranks_per_env:
            fix = "mpi_fork(n, ranks_per_env=k) says how many ranks each environment has"
            raise UsageError(f"simulator(make_env) is for the ranks of a job with teams; {fix}")
        channel: Any = state(Kept).team  # None: of one rank
        self._messages: Any = channel and channel.messages
        self.rank: int = channel.rank if channel else 0
        self._members = range(1, channel.size if channel else 1)
        self.environments, self._numbers = Environments(), itertools.count()

    def make(self, make_env: Any) -> tuple[int, Any]:
        """On the worker: (number, facts) of a new environment."""
        mine, number = self.environments, next(self._numbers)
        mine.make = mine.make or make_env
        given = None if make_env is mine.make else make_env
        return number, self.call(Request(number, "making its environment", "make", args=[given]))

    def call(self, request: Request, limit: float = math.inf) -> Any:
        """On the worker: makes a call on all ranks. Returns: its own result. Args: limit: seconds; then all ends."""
        if limit == math.inf:
            return self._call(request)
        late = f"is not done with {request.doing} after {limit:g} s: a rank of it hangs"
        timer = threading.Timer(limit, failure.fail, [f"mpi_util: the environment of worker {rank()} {late}"])
        timer.daemon = True
        timer.start()
        try:
            return self._call(request)
        finally:
            timer.cancel()

    def _call(self, request: Request) -> Any:
        where = state(failure.FailureState).where
        self._post(self._members, (where, request))
        try:
            result = self.environments.perform(request)
        except (Exception, SystemExit) as error:
            with failure.during(where.get("phase", "simulator"), simulator=request.doing):
                if self._answers(request, _GIVE_UP_S) is None:  # the others wait, within the environment
                    sys.excepthook(type(error), error, error.__traceback__)
                raise
        for k, text in (self._answers(request) or {}).items():
            raise SimulatorError(f"member {k} of worker {rank()} failed in {request.doing}:\n{text}")
        return result

    def _answers(self, request: Request, at_most_s: float = math.inf) -> dict[int, str] | None:
        """Takes the members' answers. Returns: the errors, by member; None: some have not come in time."""
        failed, end = dict[int, str](), time.perf_counter() + at_most_s
        for k in self._members:
            if not (message := self._next(k, end)):
                return None
            kind, payload = opened(message)
            if kind == LEAVE:
                self._messages.ended[k] = payload
                raise SimulatorError(f"member {k} of worker {rank()} has ended, in {request.doing}")
            failed |= {k: payload} if payload else {}
        self._post(failed, ())
        return failed

    def serve(self, make: Any, log: str = "") -> NoReturn:
        """On a member: makes the worker's calls, until that ends. Args: log: file for what it prints."""
        StopRequest()
        watchdog(0)  # a worker may take any time
        self.environments.make = make
        if log:
            os.dup2(fd := os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
            os.close(fd)
            failure.show_only_errors(keeps_stdout=True)
        message = self._next(0)
        while True:
            kind, payload = opened(message)
            if kind == LEAVE:
                self._messages.ended[0] = payload
                sys.exit()
            message = self._serve(*payload) if payload else self._next(0)  # (): an error has come to the worker

    def _serve(self, where: dict[str, Any], request: Request) -> Message:
        """Makes a call, and answers. Returns: the worker's next message."""
        state(failure.FailureState).where = where | {"simulator": request.doing}
        try:
            self.environments.perform(request)
        except (Exception, SystemExit) as error:
            self._post([0], last_lines(error))
            if not (message := self._next(0, time.perf_counter() + _GIVE_UP_S)):
                if isinstance(error, SystemExit):
                    raise RuntimeError("the environment has called sys.exit") from error
                raise
            return message
        self._post([0], "")
        return self._next(0)

    def _post(self, ranks: Iterable[int], payload: Any) -> None:
        if self._messages:
            self._messages.post_all(dict.fromkeys(ranks, packed(DATA, payload)))

    def _next(self, k: int, end: float = math.inf) -> Message:
        """The next message of a rank of the team; b"" at time `end`. The watchdog does not count this as waiting."""
        messages = self._messages

        def arrived() -> bool:
            messages.poll()
            return k in messages.inbox or time.perf_counter() > end

        polls = k not in messages.peers.wake_fds
        wait_until(arrived, lambda s: messages.peers.pipe.sleep(s if polls else s * _PATIENCE), by_mpi=polls)
        return messages.next([k])[1] if k in messages.inbox else b""


def last_lines(error: BaseException) -> str:
    """Of its traceback; an error of this package is its text alone."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return str(error) if isinstance(error, MpiUtilError) else "\n".join(lines[-_LAST_LINES:])
