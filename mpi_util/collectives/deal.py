"""Divides numbered work among the ranks: dealt to the rank that is free, or in equal shares; in each rank's process."""

import collections
import contextlib
import fcntl
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import RankMismatchError, UsageError, whole_number
from ..host.segments import Segment, Ticket, attach
from ..host.waiting import wait_until
from ..ranks import failure
from ..ranks.identity import Comm, nworkers, rank
from ..ranks.state import state
from ..ranks.threads import Threads
from ..ranks.watchdog import Watchdog
from .agreement import Before
from .channel import Channel, channel_of

# Of a slot: number of the round, how many it deals, the next to deal, the end of these, how many episodes have ended
# and their rows; the round if it was closed, which is written without the lock.
_FIELDS, _CLOSED = 7, 6
_ROUNDS = 64  # rounds that may be under way at once: after as many a slot is used again

ALL_DEALT = range(-1, -1)


class Round(NamedTuple):
    """What is dealt."""

    number: int  # of the round
    n: int  # how many numbers
    by_rows: bool = False  # instead, numbers of episodes until those that have ended have `n` rows
    mean: float = 0.0  # rows of an episode in an earlier round, for a first guess; 0: there was none
    what: str = "deal: n"  # the call, and what it says how many of


def share(n: int) -> range:
    """This rank's part of 0 .. n-1, one block of it; the first ranks get the remainder. Not collective.

    As in a collective call, rank 0 goes back to one thread.

        for step in range(len(share(4000))): ...      # of 4000 steps
        envs = [make_env(i) for i in share(num_envs)]

    Args: n: how many; 0 gives every rank an empty range. Raises: UsageError: n is not a count.
    """
    return share_of(whole_number("share: n", n), rank(), nworkers())


def share_of(n: int, k: int, n_ranks: int) -> range:
    """The part of 0 .. n-1 of rank `k` of `n_ranks`, such as those of a communicator."""
    state(Threads).switch(False)
    each, remainder = divmod(n, n_ranks)
    first = k * each + min(k, remainder)
    return range(first, first + each + (k < remainder))


def deal(n: int, *, comm: Comm = None) -> "Deal":
    """Collective: an iterator over this rank's part of 0 .. n-1; together the ranks get each number once.

    A rank takes the next number when it asks for one, so none waits for a slow one. Every rank makes every call: one
    that skips a call gets no numbers from then on. Another machine requests several numbers at once; rank 0 answers
    before each of its own, in collective calls and in `Deal.serve`. What it has left if all its ranks leave is lost.

    Args:
        n: how many; the same on every rank.
        comm: communicator; None: all ranks.

    Raises:
        UsageError: `n` is not a count. Or, raised when this rank asks for the next number: the loop's body has dealt
            too, which each rank runs a different number of times, so numbers of that inner deal were lost.
        RankMismatchError: another rank deals another number. Raised when this rank asks for one.
    """
    return deal_on(channel_of(comm), whole_number("deal: n", n))


def deal_on(channel: Channel, n: int, **more: Any) -> "Deal":
    """`deal` on a channel. Args: more: as of `Round`; with by_rows the caller reports each episode to `Deal.end`."""
    state(Before).run()
    if not channel.alone:  # else a rank deals to itself
        state(_Made)[threading.get_ident()] += 1
    channel.counter = channel.counter or (channel.counter_kind or Counter)(channel)
    return Deal(channel.counter, Round(next(channel.counter.rounds), n, **more))


class _Made(collections.Counter[int]):
    """How many deals of several ranks each thread of this process has made."""


class Deal:
    """One round of dealing. Iterate over it; `close` ends the round for all ranks.

    Attributes:
        taken: the numbers that this rank has got so far: the `index` of what it made of them.
    """

    def __init__(self, counter: "Counter", dealt: Round):
        self._counter, self._dealt = counter, dealt
        self.taken: list[int] = []

    def __iter__(self) -> Iterator[int]:
        made, n_made = state(_Made), None
        while True:
            here = threading.get_ident()
            if n_made and n_made != (here, made[here]) and n_made[0] == here:
                why = "each rank runs it a different number of times, so numbers were lost"
                if (call := self._dealt.what.split(":")[0]) != "deal":
                    raise UsageError(f"{call}: a rollout has collected or dealt too; {why}. Do that after {call}")
                fix = "Deal pairs as one range: for i, j in (divmod(k, m) for k in deal(n * m))"
                raise UsageError(f"deal: the body of a loop over dealt numbers has dealt too; {why}. {fix}")
            state(Threads).switch(False)  # each time, as there may have been a gather
            if (number := self._counter.take(self._dealt)) is None:
                return
            self.taken.append(number)
            n_made = here, made[here]
            yield number

    def end(self, rows: int) -> None:
        """An episode of a round by rows has ended, with this number of rows."""
        self._counter.end(self._dealt, rows)

    def close(self) -> None:
        """Deals nothing more in this round, on any rank. Rank 0 calls it; a signal handler may: it takes no lock."""
        self._counter.close_round(self._dealt.number)

    @property
    def closed(self) -> bool:
        """True once the round was closed: at once on rank 0's machine, elsewhere at the next number or `serve`."""
        return self._counter.is_closed(self._dealt.number)

    def serve(self) -> None:
        """Call it now and then within an episode: rank 0 then answers other machines, and those learn of `close`."""
        self._counter.serve()


class Counter:
    """Collective: what has been dealt on one communicator: a slot for each of the last rounds.

    It lies in memory that the ranks of a machine share, under a file lock, which the kernel gives back when its holder
    is killed. On several machines each has a counter, of a subclass (`Channel.counter_kind`), which overrides `_more`
    and `end`: machines other than rank 0's get their numbers from rank 0.
    """

    # It begins with all numbers, and in a round by rows says how many more to begin. False on machines but rank 0's.
    guesses = True

    def __init__(self, channel: Channel):
        self.channel = channel
        self.rounds = itertools.count(1)  # the number of this rank's next round; 0: no round has used a slot yet
        # the ranks that share this counter
        self.here = [k for k, lowest in enumerate(channel.machine) if lowest == channel.machine[channel.rank]]
        memory: Any = bytearray(nbytes := _ROUNDS * _FIELDS * np.int64().itemsize)
        self._threads = threading.RLock()  # a file lock does not keep away this rank's other threads
        self._file: int | None = None  # which is locked
        self._segment: Segment | None = None
        owns = channel.rank == self.here[0]

        def make() -> Ticket | None:
            if not owns or len(self.here) == 1:
                return None
            self._segment = Segment(nbytes)  # zeros
            return self._segment.ticket

        ticket = channel.agree("deal", make, lambda tickets: [tickets[lowest] for lowest in channel.machine])
        if self._segment:
            memory, self._file = self._segment.lend(nbytes), self._segment.ticket.fd
        elif ticket:
            self._file, memory = attach(ticket)  # opened by this process: a lock belongs to an open file
        self._slots = np.ndarray((_ROUNDS, _FIELDS), np.int64, memory)

    def take(self, dealt: Round) -> int | None:
        """The next number of a round; None: all are dealt. RankMismatchError: another rank deals another number."""
        failure.enter("deal")

        def take_one() -> tuple[range] | None:
            self.serve()
            return None if (found := self.take_some(dealt)) is None else (found,)

        (found,) = wait_until(take_one, None, state(Watchdog))
        return found.start if found else None

    def take_some(self, dealt: Round, how_many: Callable[[int], int] = lambda left: 1) -> range | None:
        """The next `how_many(left here)` numbers of a round; None: none yet, as episodes under way may be enough."""
        with self._locked(dealt.number) as slot:
            found, n, number, end, ended, rows = slot[:_CLOSED].tolist()
            if found > dealt.number or self.is_closed(dealt.number):
                return ALL_DEALT
            if found < dealt.number:
                here = 0 if dealt.by_rows or not self.guesses else dealt.n
                n, number, end, ended, rows = dealt.n, 0, here, 0, 0
            if n != dealt.n:
                differ = f"{dealt.what} is {dealt.n} on one rank and {n} on another"
                raise RankMismatchError(f"{differ}; give the same on every rank")
            if number == end != ALL_DEALT.stop:
                more = self._more(dealt, number, ended, rows)
                if more is None:
                    return None
                number, end = more.start, more.stop
            taken = range(number, min(end, number + how_many(end - number)))
            end = taken.stop if self.guesses and dealt.by_rows else end  # it is guessed again
            slot[:_CLOSED] = dealt.number, n, taken.stop, end, ended, rows
            return taken

    def end(self, dealt: Round, rows: int) -> None:
        """An episode has ended, with this number of rows."""
        with self._locked(dealt.number) as slot:
            if slot[0] == dealt.number:
                slot[_CLOSED - 2 : _CLOSED] += 1, rows

    def _more(self, dealt: Round, number: int, ended: int, rows: int) -> range | None:
        """More numbers, from `number` on, once none is left here; None: none yet. Called with the lock held."""
        if not dealt.by_rows or rows >= dealt.n:
            return ALL_DEALT
        # the number still needed if those under way get as many rows as those that have ended
        mean = (rows + dealt.mean) / max(1, ended + (dealt.mean > 0))
        needed = math.ceil((dealt.n - rows) / mean) - (number - ended) if mean else 1
        return range(number, number + needed) if needed > 0 else None

    @contextlib.contextmanager
    def _locked(self, round_number: int) -> Iterator[np.ndarray]:
        """No other rank deals meanwhile. Gives the round's slot."""
        with self._threads:
            if self._file is not None:
                wait_until(self._try_lock, None, state(Watchdog))  # a holder may be stopped
            try:
                yield self._slots[round_number % _ROUNDS]
            finally:
                if self._file is not None:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._file or 0, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def close_round(self, round_number: int) -> None:
        """Deals nothing more in that round. A signal handler may call it: it takes no lock."""
        self._slots[round_number % _ROUNDS, _CLOSED] = round_number

    def is_closed(self, round_number: int) -> bool:
        return bool(self._slots[round_number % _ROUNDS, _CLOSED] == round_number)

    def serve(self) -> None:
        """Answers other machines, and hears of rounds that are closed, where there are several machines."""

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        elif self._file is not None:
            os.close(self._file)
