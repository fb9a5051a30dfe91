"""Deals numbered work over several machines; it runs in the process of each rank.

The ranks of a machine share a counter. Rank 0's machine begins with all numbers; the others request theirs from rank 0
when they have none left: each time half of their remaining share, down to one (guided scheduling).
"""

from typing import TYPE_CHECKING, Any

from ..collectives.deal import ALL_DEALT, Counter, Round
from ..collectives.messages import Background
from ..errors import RankMismatchError
from ..ranks.state import state

if TYPE_CHECKING:
    from ..collectives.channel import Channel

_QUESTION_TAG = 2  # of a rank that requests numbers from rank 0
_CLOSED_TAG = 3  # of rank 0, which notifies other machines that it has closed a round
_WATCHED = 4  # rounds of which they may still have numbers


class ClusterCounter(Counter):
    """Collective: the counter of a machine, which rank 0 supplies with numbers."""

    def __init__(self, channel: "Channel"):
        super().__init__(channel)
        self._has_all = 0 in self.here
        self._others = [k for k in range(channel.size) if k not in self.here]
        self._watched: list[int] = []
        self._notices: list[Any] = []
        if channel.rank == 0:
            state(Background).append(self.serve)

    def _first(self, n: int) -> range:
        return range(n if self._has_all else 0)

    def _more(self, dealt: Round) -> range:
        return ALL_DEALT if self._has_all else self._request(dealt)

    def _request(self, dealt: Round) -> range:
        messages = self.channel.messages
        question = (self.channel.rank, dealt, len(self.here))
        messages.wait(messages.comm.isend(question, 0, _QUESTION_TAG).Test)
        found: range | str = messages.receive(0, "deal", serves=True)
        if isinstance(found, str):
            raise RankMismatchError(found)
        return found or ALL_DEALT

    def serve(self) -> None:
        """Rank 0 answers other machines, and notifies them of rounds that are closed; these note that."""
        comm = self.channel.comm
        if self.channel.rank == 0:
            while message := comm.improbe(tag=_QUESTION_TAG):
                self._answer(*message.recv())
            for round_number in filter(self.is_closed, [*self._watched]):
                self._watched.remove(round_number)
                self._notices += [comm.isend(round_number, k, _CLOSED_TAG) for k in self._others]
            self._notices = [request for request in self._notices if not request.Test()]
        elif not self._has_all:
            while message := comm.improbe(0, _CLOSED_TAG):
                self.close_round(message.recv())

    def _answer(self, asking: int, dealt: Round, n_ranks: int) -> None:
        """Rank 0 sends numbers to a rank of another machine, on which several ranks share them."""
        found: range | str
        try:
            with self.lock_threads:
                found = self.take_some(dealt, lambda left: max(1, left * n_ranks // (2 * self.channel.size)))
        except RankMismatchError as error:
            found = str(error)
        self.channel.messages.send(asking, found)
        if dealt[0] not in self._watched:
            self._watched = [*self._watched[1 - _WATCHED :], dealt[0]]

    def close(self) -> None:
        background = state(Background)
        if self.serve in background:
            background.remove(self.serve)
        super().close()
