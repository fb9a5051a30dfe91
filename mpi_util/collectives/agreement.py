"""How the ranks of a communicator agree on a call before they make it; in the process of each rank."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import RankMismatchError, rank_mismatch
from ..ranks import failure
from ..ranks.identity import nworkers
from ..ranks.state import state
from ..ranks.threads import Threads
from .messages import CALL, ERROR, LEAVE, REPLY, Message, Messages, Peers, opened, packed, portable

SECOND = " (second part)"  # in the name of a call that agrees twice: who was interrupted in the first is not in it
Contribution = TypeVar("Contribution")
Answer = TypeVar("Answer")


class Before(list[Callable[[], object]]):
    """What this process does before its next collective call, or its end: it has left a loop, and tells the others."""

    def run(self) -> None:
        while self:
            self.pop()()


class Agreement:
    """The part of a channel that agrees: a star around rank 0.

    Attributes:
        rank, size: in the communicator. alone: True for a rank of several that is by itself in it.
        above: the rank to which this one sends what it contributes: rank 0.
        below: the ranks that send theirs to this one: for rank 0 all others.
    """

    def __init__(self, rank: int, size: int, comm: Any, peers: Peers | None):
        self.rank, self.size, self.messages = rank, size, Messages(rank, size, comm, peers)
        self.above, self.below = 0, [*range(1, size)] if rank == 0 else list[int]()
        n_ranks = nworkers()
        self.alone, self._part = size == 1 < n_ranks, (min(size, n_ranks), n_ranks)
        self._pid = os.getpid() if size > 1 else 0
        self._failure, self._before, self._threads = state(failure.FailureState), state(Before), state(Threads)

    def enter(self, op: str) -> None:
        """This rank begins a collective call, or a part of one."""
        if self._before:
            self._before.run()
        if self.messages.waiting:
            self.messages.check_thread(op)
        if os.getpid() == self._pid:
            self._failure.call = op
        else:
            failure.enter(op)  # raises an error in a process that a rank has started
        self.messages.calls += 1
        if self._threads.all_cores and not self.alone:
            self._threads.switch(False)

    def begin_update(self) -> None:
        """Rank 0 has gathered: until its next collective call it has the cores of the ranks here, which sleep."""
        if self.rank == 0 and not self.alone:
            self._threads.switch(True, part=self._part)

    def agree(
        self, op: str, contribute: Callable[[], Contribution], decide: Callable[[list[Contribution]], Sequence[Answer]]
    ) -> Answer:
        """Collective: rank 0 looks at what all ranks contribute and answers each of them.

        Args:
            op: name of the collective call.
            contribute: called on every rank: gives something small that can be pickled. What it raises is raised on
                every rank, so that a rank that fails while it prepares leaves no rank waiting and none a call ahead.
            decide: called on rank 0: contributions in rank order -> answers in rank order; rank 0's own is not pickled.
                What it raises is raised on every rank.

        Returns: this rank's answer.

        Raises RankMismatchError: ranks are in different calls; RankLeftError: one ended while others are in this call.
        """
        self.enter(op)
        own_error: Exception | None = None
        try:
            mine = packed(CALL, (*self.call_id(op), contribute()))
        except Exception as error:
            own_error, mine = error, packed(ERROR, portable(op, self.rank, error, name_rank=True))
        awaited = set(self.below)  # those whose message has not been read
        try:
            if self.rank:
                answer: Answer = self._ask(op, mine)
                return answer
            return self._decide(self._receive_calls(op, mine, awaited), decide)
        except Exception as error:
            self.messages.failed = dict.fromkeys(awaited, self.messages.calls)  # what they still send is dropped
            if self.rank == 0:
                self.messages.post_all(dict.fromkeys(range(1, self.size), packed(ERROR, portable(op, 0, error))))
            raise own_error or error from None

    def _receive_calls(self, op: str, mine: Message, awaited: set[int]) -> dict[int, Message]:
        """A rank with others below it (rank 0): their messages; removes from `awaited` the ranks that have sent one.

        Raises: RankLeftError at once; the error of a rank that fails when all have sent theirs.
        """
        messages, found = self.messages, {self.rank: mine}
        for k in messages.ended:
            raise messages.left_error(op, k)
        while awaited:
            source, message = messages.next(awaited, range(self.size))
            kind = message[0]
            if kind == LEAVE:
                messages.ended[source] = opened(message)[1]
                raise messages.left_error(op, source)
            if source not in awaited:
                if kind == ERROR:
                    raise opened(message)[1]
            elif kind == ERROR or (kind == CALL and not messages.is_late(source, message)):
                found[source] = message
                awaited.remove(source)
        return found

    def _decide(self, found: Mapping[int, Message], decide: Callable[[list[Contribution]], Sequence[Answer]]) -> Answer:
        read = {message: opened(message) for message in set(found.values())}
        each = {k: read[found[k]] for k in sorted(found)}
        for kind, error in each.values():
            if kind == ERROR:
                raise error
        calls = [call for _, call in each.values()]
        if len({call[:2] for call in calls}) > 1:
            what = "ranks are in different collective calls; all must make the same calls in the same order"
            raise rank_mismatch(what, [f"{op} at {site}" for op, _, site, _ in calls])
        try:
            answers = decide([call[3] for call in calls])
        except RankMismatchError as error:
            if len({call[2] for call in calls}) == 1:
                raise
            raise rank_mismatch(f"{error}\ncalled at", [call[2] for call in calls]) from None
        # an answer that several get, as the same object, is pickled once
        made = {id(answer): answer for answer in answers[1:]}
        replies = {key: packed(REPLY, (self.messages.calls, answer)) for key, answer in made.items()}
        self._send_replies({k: replies[id(answers[k])] for k in range(1, self.size)})
        self.messages.answered = self.messages.calls
        return answers[0]

    def _send_replies(self, replies: Mapping[int, Message]) -> None:
        self.messages.post_all(replies)

    def _ask(self, op: str, mine: Message) -> Any:
        """Another rank sends its message to rank 0. Returns: the answer."""
        messages = self.messages
        messages.post_all({self.above: mine})
        if messages.ended:
            raise messages.left_error(op, 0)
        while True:  # what a call that failed or was interrupted has left is dropped
            _, message = messages.next([self.above], [0])
            kind, payload = opened(message)
            if kind == REPLY and payload[0] == messages.calls:
                return payload[1]
            if kind == ERROR:
                raise payload
            if kind == LEAVE:
                messages.ended[0] = payload
                if payload[2] < messages.calls:  # else the answer is on its way
                    raise messages.left_error(op, 0)

    def call_id(self, op: str) -> tuple[str, int, str]:
        """Where this rank is: the call, its number, `file:line` of the program."""
        return op, self.messages.calls, failure.call_site()
