"""Deals numbered work over several machines; it runs in the process of each rank.

The ranks of a machine share a counter. Rank 0's machine begins with all numbers; the others request theirs from rank 0
when they have none left: each time half of their remaining share, down to one (guided scheduling).
"""

from typing import Any

from ..collectives.channel import Channel
from ..collectives.deal import ALL_DEALT, Counter, Round
from ..collectives.messages import Background
from ..errors import RankMismatchError
from ..ranks.state import state

_QUESTION_TAG = 2  # of a rank that requests numbers from rank 0
_CLOSED_TAG = 3  # of rank 0, which notifies other machines that it has closed a round
_ENDED_TAG = 4  # of a rank whose episode has ended


class ClusterCounter(Counter):
    """Collective: the counter of a machine, which rank 0 supplies with numbers."""

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
            self.channel.messages.send(asking, found)
            self._watched = max(self._watched or 0, dealt.number)
        return found is not None

    def close(self) -> None:
        if self.channel.rank == 0:
            state(Background).remove(self.serve)
        super().close()
