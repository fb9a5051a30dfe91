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
_ENDED_TAG = 4  # of a rank whose episode has ended
_WATCHED = 4  # rounds of which they may still have numbers


class ClusterCounter(Counter):
    """Collective: the counter of a machine, which rank 0 supplies with numbers."""

    def __init__(self, channel: "Channel"):
        super().__init__(channel)
        self.guesses = 0 in self.here  # this machine begins with all numbers
        self._questions: list[tuple[int, Round, int]] = []  # that rank 0 cannot answer yet
        self._others = [k for k in range(channel.size) if k not in self.here]
        self._watched: list[int] = []
        self._notices: list[Any] = []
        if channel.rank == 0:
            state(Background).append(self.serve)

    def _first(self, dealt: Round) -> range:
        return super()._first(dealt) if self.guesses else range(0)

    def _more(self, dealt: Round, number: int, ended: int, rows: int) -> range | None:
        return super()._more(dealt, number, ended, rows) if self.guesses else self._request(dealt)

    def end(self, dealt: Round, rows: int) -> None:
        if self.guesses:
            return super().end(dealt, rows)
        messages = self.channel.messages
        messages.wait(messages.comm.isend((dealt, rows), 0, _ENDED_TAG).Test)

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
            while message := comm.improbe(tag=_ENDED_TAG):
                super().end(*message.recv())
            questions, self._questions = self._questions, []
            while message := comm.improbe(tag=_QUESTION_TAG):
                questions.append(message.recv())
            for question in questions:
                self._answer(*question)
            for round_number in filter(self.is_closed, [*self._watched]):
                self._watched.remove(round_number)
                self._notices += [comm.isend(round_number, k, _CLOSED_TAG) for k in self._others]
            self._notices = [request for request in self._notices if not request.Test()]
        elif not self.guesses:
            while message := comm.improbe(0, _CLOSED_TAG):
                self.close_round(message.recv())

    def _answer(self, asking: int, dealt: Round, n_ranks: int) -> None:
        """Rank 0 sends numbers to a rank of another machine, on which several ranks share them."""
        found: range | str | None
        try:
            found = self.take_some(dealt, lambda left: max(1, left * n_ranks // (2 * self.channel.size)))
        except RankMismatchError as error:
            found = str(error)
        if found is None:
            self._questions.append((asking, dealt, n_ranks))
            return
        self.channel.messages.send(asking, found)
        if dealt[0] not in self._watched:
            self._watched = [*self._watched[1 - _WATCHED :], dealt[0]]

    def close(self) -> None:
        background = state(Background)
        if self.serve in background:
            background.remove(self.serve)
        super().close()
