"""A team: k ranks of the job with one environment; in the worker, which calls, and in its members, which serve.

The worker sends each call to its members, makes it itself, and takes their answers; members sleep in between. An error
is the worker's, who may catch it, if all ranks come to the end of the call. One that leaves a rank waiting within the
environment ends the job.
"""

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ..collectives.channel import Kept
from ..collectives.messages import DATA, LEAVE, Message, opened, packed
from ..errors import SimulatorError, UsageError
from ..host.waiting import wait_until
from ..ranks import failure
from ..ranks.identity import Role, in_child_of_rank, rank
from ..ranks.signals import StopRequest
from ..ranks.state import state
from ..ranks.watchdog import watchdog
from .calls import Doing, Environments, Request, last_lines

_ANSWER_S = 0.5  # for the members' answers, where the worker has an error of its own
_GIVE_UP_S = 3.0  # for the worker, to come to a member's error; and for members that are late, at the next call
_LOOK_S = 0.25


class Team:
    """This rank's view of its team; one for all environments of a worker."""

    def __init__(self) -> None:
        if in_child_of_rank():
            raise UsageError("simulator(make_env) is for a rank itself, not for a process that it has started")
        if not state(Role).ranks_per_env:
            fix = "mpi_fork(n, ranks_per_env=k) says how many ranks make_env's communicator has"
            raise UsageError(f"simulator(make_env) without ranks_per_env: {fix}")
        self._channel = state(Kept).team  # None: of one rank
        self.rank = self._channel.rank if self._channel else 0
        self._members = range(1, self._channel.size) if self._channel else range(0)
        self.environments = Environments()
        self._numbers = itertools.count()
        self._pending: list[int] = []  # members whose answer to the last call has not come
        self._doing, self._due, self._limit = Doing(), math.inf, math.inf

    def make(self, make_env: Callable[..., Any]) -> tuple[int, Any]:
        """On the worker: (number, facts) of a new environment."""
        self.environments.make = self.environments.make or make_env
        number, is_first = next(self._numbers), make_env is self.environments.make
        return number, self.call(Request(number, "make", "", [None if is_first else make_env]))

    def call(self, request: Request) -> Any:
        """On the worker: makes a call on all ranks. Returns: its own result."""
        self._answers(_GIVE_UP_S)
        if self._pending:
            late = f"members {', '.join(map(str, self._pending))} are still in {self._doing.now}, which failed on the worker"
            failure.fail(f"mpi_util: the environment of worker {rank()}: {late}")
        where = state(failure.FailureState).where
        self._doing.begin(request)
        self._post(self._members, (self._doing.now, where, request))
        self._pending = [*self._members]
        self._due = time.monotonic() + (self._limit if request.name in ("reset", "step") else math.inf)
        try:
            result = self.environments.perform(request)
            failed = self._answers(math.inf)
        except (Exception, SystemExit) as error:
            if not isinstance(error, SimulatorError):
                self._answers(_ANSWER_S)
            with failure.during(where.get("phase", "simulator"), simulator=self._doing.now):
                raise
        finally:
            self._due = math.inf
        for k, text in failed.items():
            raise SimulatorError(f"member {k} of worker {rank()} failed in {self._doing.now}:\n{text}")
        return result

    def watch(self, limit: float) -> None:
        """On the worker: the job ends when a step or reset takes longer."""
        if limit < math.inf and self._limit == math.inf:
            threading.Thread(target=self._look, daemon=True).start()
        self._limit = limit

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            if time.monotonic() > self._due:
                how_long = f"is not done with {self._doing.now} after {self._limit:g} s: it, or a member, hangs"
                failure.fail(f"mpi_util: the environment of worker {rank()} {how_long}")

    def serve(self, make_env: Callable[..., Any] | None, output: str = "") -> NoReturn:
        """On a member: makes the worker's calls, and ends when the worker does. Args: output: file for what it prints."""
        StopRequest()
        watchdog(0)  # a worker may take any time
        self.environments.make = make_env
        if output:
            os.dup2(fd := os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
            os.close(fd)
            failure.show_only_errors(keeps_stdout=True)
        message = self._next(0)
        while message:
            kind, payload = opened(message)
            if kind == LEAVE:
                self._channel.messages.ended[0] = payload
                sys.exit()
            if payload:  # else it has come to an error of this member
                message = self._serve(*payload)
            else:
                message = self._next(0)
        raise AssertionError("unreachable")

    def _serve(self, doing: str, where: dict[str, Any], request: Request) -> Message:
        """Makes a call, and answers. Returns: the worker's next message."""
        state(failure.FailureState).where = where | {"simulator": doing}
        try:
            self.environments.perform(request)
            self._post([0], "")
            return self._next(0)
        except (Exception, SystemExit) as error:
            self._post([0], last_lines(error))
            if message := self._next(0, time.perf_counter() + _GIVE_UP_S):
                return message
            if isinstance(error, SystemExit):
                raise RuntimeError("the environment calls sys.exit") from error
            raise

    def _post(self, ranks: Iterable[int], payload: Any) -> None:
        if self._channel:
            self._channel.messages.post_all(dict.fromkeys(ranks, packed(DATA, payload)))

    def _answers(self, at_most_s: float) -> dict[int, str]:
        """Takes the answers that are pending. Returns: the errors, by member."""
        failed, end = dict[int, str](), time.perf_counter() + at_most_s
        while self._pending and (message := self._next(self._pending[0], end)):
            kind, payload = opened(message)
            k = self._pending.pop(0)
            if kind == LEAVE:
                self._channel.messages.ended[k] = payload
                raise SimulatorError(f"member {k} of worker {rank()} has ended, in {self._doing.now}")
            if payload:
                failed[k] = payload
        self._post(failed, "")
        return failed

    def _next(self, k: int, end: float = math.inf) -> Message:
        """The next message of a rank of the team; b"" at time `end`. The watchdog does not count this as waiting."""
        messages = self._channel.messages

        def arrived() -> bool:
            messages.poll()
            return k in messages.inbox or time.perf_counter() > end

        wait_until(arrived, messages.peers.pipe.sleep, by_mpi=k not in messages.peers.wake_fds)
        return messages.next([k])[1] if k in messages.inbox else b""
