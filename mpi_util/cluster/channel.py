"""The channel of a communicator whose ranks lie on several machines; it runs in the process of each rank.

What leaders are is in docs/architecture.md; rank 0 leads its own machine. Agreements and weights go through them. Rows
go straight to rank 0, in messages, and so do failures: a rank that exits or fails notifies rank 0, which notifies all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..collectives.channel import Channel, Transfer
from ..collectives.deal import ALL_DEALT, Counter, Round
from ..collectives.messages import CALL, REPLY, Background, Message, Peers, opened, packed
from ..errors import RankMismatchError
from ..ranks.state import state
from .loaded import LoadedCode, Parts

_QUESTION_TAG = 2  # of a rank that requests numbers from rank 0
_CLOSED_TAG = 3  # of rank 0, which notifies other machines that it has closed a round
_ENDED_TAG = 4  # of a rank whose episode has ended


class Joined(dict[int, Message]):
    """The messages of all ranks of a machine, to or from its leader; equal ones are one object, which is sent once."""

    code: Parts  # to rank 0: what the leader has loaded since its last call


class ClusterCounter(Counter):
    """Collective: the counter of a machine, which its ranks share, and which rank 0 supplies with numbers.

    Rank 0's machine begins with all numbers; the others request theirs from rank 0 when they have none left: each time
    half of their remaining share, down to one (guided scheduling).
    """

    def __init__(self, channel: Channel):
        super().__init__(channel)
        self.guesses = 0 in self.here
        self._questions: list[tuple[int, Round, int]] = []  # that rank 0 cannot answer yet
        self._others = [k for k in range(channel.size) if k not in self.here]
        self._watched: int | None = None  # the last round of which they have numbers, until they know that it is closed
        self._notices: list[Any] = []
        if channel.rank == 0:
            state(Background).append(self.serve)

    def _more(self, dealt: Round, number: int, ended: int, rows: int) -> range | None:
        if self.guesses:
            return super()._more(dealt, number, ended, rows)
        messages = self.channel.messages
        messages.wait(messages.comm.isend((self.channel.rank, dealt, len(self.here)), 0, _QUESTION_TAG).Test)
        found: range | str = messages.receive(0, "deal", serves=True)
        if isinstance(found, str):
            raise RankMismatchError(found)
        return found or ALL_DEALT

    def end(self, dealt: Round, rows: int) -> None:
        if self.guesses:
            return super().end(dealt, rows)
        messages = self.channel.messages
        messages.wait(messages.comm.isend((dealt, rows), 0, _ENDED_TAG).Test)

    def serve(self) -> None:
        """Rank 0 answers other machines, and notifies them of rounds that are closed; these note that."""
        comm = self.channel.comm
        if self.channel.rank == 0:
            while message := comm.improbe(tag=_ENDED_TAG):
                super().end(*message.recv())
            questions, self._questions = self._questions, []  # this thread's: others of rank 0 may be here at once
            while message := comm.improbe(tag=_QUESTION_TAG):
                questions.append(message.recv())
            for question in questions:
                if not self._answer(*question):
                    self._questions.append(question)
            if self._watched is not None and self.is_closed(self._watched):
                self._notices += [comm.isend(self._watched, k, _CLOSED_TAG) for k in self._others]
                self._watched = None
            self._notices = [request for request in self._notices if not request.Test()]
        elif not self.guesses:
            while message := comm.improbe(0, _CLOSED_TAG):
                self.close_round(message.recv())

    def _answer(self, asking: int, dealt: Round, n_ranks: int) -> bool:
        """Rank 0 sends numbers to a rank of another machine, on which several ranks share them. False: none yet."""
        found: range | str | None
        try:
            found = self.take_some(dealt, lambda left: max(1, left * n_ranks // (2 * self.channel.size)))
        except RankMismatchError as error:
            found = str(error)
        if found is not None:
            self.channel.messages.send([asking], found)
            self._watched = max(self._watched or 0, dealt.number)
        return found is not None

    def close(self) -> None:
        if self.channel.rank == 0:
            state(Background).remove(self.serve)
        super().close()


class ClusterChannel(Channel):
    """Collective: a channel between machines; made by `channel_of`."""

    counter_kind = ClusterCounter

    def __init__(self, comm: Any, peers: Peers):
        super().__init__(comm, peers)
        leader = self.machine[self.rank]
        self.leads = self.rank == leader
        self.above = 0 if self.leads else leader
        machines: dict[int, list[int]] = {}
        for k, its in enumerate(self.machine):
            machines.setdefault(its, []).append(k)
        self.below = machines[leader][1:] if self.leads else []
        self.others = {k: ranks for k, ranks in machines.items() if k}  # by leader, but for rank 0's machine
        self.code = LoadedCode()

    def _receive_calls(self, op: str, mine: Message, awaited: set[int]) -> dict[int, Message]:
        if self.rank == 0:
            awaited |= self.others.keys()
        found: dict[int, Message] = {}
        code = [self.code.take()]
        for k, message in super()._receive_calls(op, mine, awaited).items():
            payload = opened(message)[1] if message[0] == CALL else ()
            if payload and isinstance(payload[3], Joined):
                found |= payload[3]
                code.append(payload[3].code)
            else:
                found[k] = message
        self.code.compare(code)
        return found

    def _send_replies(self, replies: Mapping[int, Message]) -> None:
        down = {k: replies[k] for k in self.below}
        for leader, ranks in self.others.items():
            down[leader] = packed(REPLY, (self.messages.calls, Joined({k: replies[k] for k in ranks})))
        self.messages.post_all(down)

    def _ask(self, op: str, mine: Message) -> Any:
        if not self.leads:
            return super()._ask(op, mine)
        found, first = super()._receive_calls(op, mine, {*self.below}), dict[Message, Message]()
        joined = Joined({k: first.setdefault(message, message) for k, message in found.items()})
        joined.code = self.code.take()
        replies: Joined = super()._ask(op, packed(CALL, (*self.call_id(op), joined)))
        self.messages.post_all({k: replies[k] for k in self.below})
        return opened(replies[self.rank])[1][1]

    def spread_sources(self, nbytes: int, fill: Callable[[np.ndarray], object]) -> Sequence[Any]:
        own, *others = super().spread_sources(nbytes, fill)
        here = [source if lowest == 0 else Transfer(nbytes) for source, lowest in zip(others, self.machine[1:])]
        return [own._replace(others=[*own.others, *self.others]), *here]

    def spread(self, op: str, source: Any) -> np.ndarray:
        try:
            if self.leads and self.rank:
                block, address = self.lease(source.nbytes, self.below)
                np.copyto(block, super().spread(op, source))
                self.messages.send(self.below, address)
                source = Transfer(source.nbytes, None, block, () if address else self.below)
            elif self.above:
                source = source._replace(address=self.messages.receive(self.above, op))
            return super().spread(op, source)
        except Exception as error:
            if self.leads:  # the ranks that may wait for it raise the error too
                self.messages.fail(op, error, self.below)
            raise
