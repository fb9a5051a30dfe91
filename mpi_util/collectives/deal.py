"""Divides numbered work among the ranks: dealt to whichever is free, or in equal shares."""

import collections
import operator
import threading
from collections.abc import Iterator

from ..errors import UsageError
from ..ranks import threads
from ..ranks.identity import Comm, nworkers, rank
from ..ranks.state import process
from .channel import channel_of
from .counter import Counter


def share(n: int) -> range:
    """This rank's part of 0 .. n-1, one block of it; the first ranks get the remainder. Not collective.

    As `deal` does, it ends the time in which rank 0 computes with all cores: what is shared is computed beside others.

        for step in range(len(share(4000))): ...      # of 4000 steps
        envs = [make_env(i) for i in share(num_envs)]

    Args:
        n: how many; 0 gives every rank an empty range.

    Raises:
        UsageError: n is not a count.
    """
    each, remainder = divmod(_count("share", n), nworkers())
    threads.beside()
    first = rank() * each + min(rank(), remainder)
    return range(first, first + each + (rank() < remainder))


def _count(call: str, n: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or n < 0:
        raise UsageError(f"{call}: n is a number of things to be shared, 0 or more; got {n!r}")
    return operator.index(n)


def deal(n: int, *, comm: Comm = None) -> "Deal":
    """Collective: an iterator over this rank's part of 0 .. n-1; together the ranks get each number once.

    A rank takes the next number when it asks for one, so a rank that is done never waits for one that is slow. Ranks of
    one machine count in shared memory under a lock. Another machine than rank 0's gets its numbers from rank 0, at
    first half of its ranks' part at once, then half of what is theirs of the rest, down to one by one. Rank 0 answers
    before each number of its own, while it waits in a collective call, and in `Deal.serve`. A rank that does not call
    it gets none. If all ranks of such a machine leave the loop early, no rank gets the numbers that are left there.

    Args:
        n: how many; the same on every rank.
        comm: communicator; None: all ranks.

    Raises:
        UsageError: `n` is not a count. Or, raised when this rank asks for the next number: the loop's body has dealt
            too, which each rank runs a different number of times, so numbers of that inner deal were lost.
        RankMismatchError: another rank deals another number. Raised when this rank asks for one.
    """
    n, channel = _count("deal", n), channel_of(comm)
    if comm is None or channel.size > 1:  # else a rank deals to itself
        process.of(_Made)[threading.get_ident()] += 1
    return Deal(channel.counter(), n)


class _Made(collections.Counter[int]):
    """How many deals of several ranks each thread of this process has made."""


class Deal:
    """One round of dealing. Iterate over it; `close` ends the round for all ranks.

    Attributes:
        taken: the numbers that this rank has got so far: the `index` of what it made of them.
    """

    def __init__(self, counter: Counter, n: int):
        self._counter, self._n = counter, n
        self._round = next(counter.rounds)
        self.taken: list[int] = []

    def __iter__(self) -> Iterator[int]:
        made, n_made = process.of(_Made), None
        while True:
            here = threading.get_ident()
            if n_made and n_made != (here, made[here]) and n_made[0] == here:
                raise UsageError(
                    "deal: the body of a loop over dealt numbers has dealt too; each rank runs it a different number "
                    "of times, so numbers were lost. Deal pairs as one range: "
                    "for i, j in (divmod(k, m) for k in deal(n * m))"
                )
            threads.beside()  # each time, as there may have been a gather
            self.serve()
            if (number := self._counter.take((self._round, self._n))) is None:
                return
            self.taken.append(number)
            n_made = here, made[here]
            yield number

    def close(self) -> None:
        """Deals nothing more in this round, on any rank. Rank 0 calls it; a signal handler may: it takes no lock."""
        self._counter.close_round(self._round)

    @property
    def closed(self) -> bool:
        """True once the round was closed: at once on rank 0's machine, elsewhere at the next number or `serve`."""
        return self._counter.is_closed(self._round)

    def serve(self) -> None:
        """Call it amid an episode: on rank 0, so that other machines need not wait for its end; there, for `closed`."""
        self._counter.serve()
