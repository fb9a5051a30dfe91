"""`collect` and `rollouts`: an iteration's rollouts, divided among the ranks and gathered; in each rank's process.

Both make an `_Iteration`, after which rank 0 continues exactly as a single process would, whichever ranks played.
"""

import bisect
import collections
import functools
import inspect
import itertools
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import tree
from ..arrays.adapters import copied, is_array
from ..errors import BatchError, UsageError, rank_mismatch, whole_number
from ..ranks import failure
from ..ranks.console import print0_once, print_once
from ..ranks.identity import Comm
from ..ranks.seeding import keep_random_states, seed_of, set_global_seeds, stream
from ..ranks.state import state
from .agreement import Before
from .bcast import Models, samples, send
from .channel import channel_of
from .deal import deal_on, share_of
from .gather import to_rank0

PHASE = "rollout"
_GIVEN = ("rng", "seed", "number", "iteration")  # arguments of `play`
_CHECKED = 3  # iterations


class Collected(NamedTuple):
    """What `collect` and `rollouts` have brought to rank 0 since the program began, the same on every rank.

    Attributes:
        rollouts: episodes, or segments of environments that continue. steps: their rows.
        unused_rollouts, unused_steps: of episodes that were played, but with `steps=` were not needed.
    """

    rollouts: int = 0
    steps: int = 0
    unused_rollouts: int = 0
    unused_steps: int = 0


class _Process:
    collected = Collected()
    # what the rank is doing (`failure.during`) around a rollout, and in the last one
    outside: dict[str, Any] = {}
    inside: dict[str, Any] = {}


def collected() -> Collected:
    """The totals of this process; of calls with `phase="rollout"`, the default. Not collective."""
    return state(_Process).collected


class Rollout:
    """An episode, or a segment of a numbered environment that continues, as `rollouts` gives it to a loop's body.

    Attributes:
        number: each of 0, 1, ... is played once in an iteration, on one of the ranks.
        iteration: from the iterable that `rollouts` was given.
        seed: 0 to 2**31 - 1, by (seed, iteration, number), such as for env.reset(seed=...). rng: one generator, too.
        kept: for the body to keep something in: of a numbered environment it is there again in the next iteration.
    """

    number: int
    iteration: int
    seed: int
    rng: np.random.Generator
    kept: Any = None
    is_open = False

    def start(self, of: "_Iteration", number: int) -> None:
        """It is played from now on."""
        self._of, self.number, self.iteration, self.is_open = of, number, of.number, True
        key = (*of.loop.stream_key, of.number, number)
        self.seed, self.rng = seed_of(*key), np.random.default_rng(stream(*key))

    def gather(self, rows: Any, *, in_place: bool = False) -> Any:
        """Takes the rows of this rollout; to be called once in the loop's body, where the rollout ends.

        Collective with the last rollout of each rank: waits until all ranks have gathered theirs.

        Args:
            rows: as `collect` takes them from `play`.
            in_place: the lists in `rows`, such as a program's buffers, are emptied for the next rollout. On rank 0 the
                last call fills them with what all rollouts have brought.

        Returns: as `collect`; None also on rank 0, until its last one.
        """
        if not self.is_open:
            raise UsageError("Rollout.gather: called a second time for the same rollout")
        self.is_open = False
        batch = self._of.add(self.number, rows)
        if in_place:
            _refill(rows, batch)
        return batch


def collect(
    play: Callable[..., Any], *, episodes: int | None = None, steps: int | None = None, envs: int | None = None,
    weights: Any = None, seed: int, iteration: int | None = None, phase: str = PHASE, comm: Comm = None,
) -> Any:  # fmt: skip
    """Collective: plays rollouts on all ranks, and joins their rows on rank 0; every rank waits for the others there.

        batch = mpi_util.collect(play, episodes=40, weights=agent, seed=1)
        if batch is None:
            continue  # the other ranks

    Before each rollout it seeds `random`, `numpy.random`, torch and TensorFlow by (seed, iteration, number), and
    afterwards puts the random states back. (TensorFlow's cannot be read: it is seeded by (seed, iteration).)

    Args:
        play: plays one rollout; gets those of `seed` (0 to 2**31 - 1), `rng` (a numpy.random.Generator), `number` and
            `iteration` that are its parameters. Returns the rows: a nested dict or tuple of arrays and tensors, whose
            first axis is rows, numbers (a row each), and lists, which are joined; other objects are listed, one for
            each rollout. What is in a list must not change afterwards. Gradients do not travel.
        episodes: how many. A rank that is free takes the next number.
        steps: instead, episodes 0, 1, ... until they have this number of rows (the longest array of each counts).
            Surplus episodes are dropped, and counted in `collected.unused_rollouts`.
        envs: instead, a segment of each environment 0 .. envs - 1, which stays on one rank. `play` is a generator
            function: started once for each number, it yields a segment in each iteration.
        weights: what `rank0_bcast_wts` sends first: the model itself, no copy. None: nothing. False: `play` needs none.
        seed: of the run, 0 or more.
        iteration: None: the one after that of the last call with this phase and seed; the first is 0.
        phase: names the work in reports of errors, and with `seed` the random numbers.
        comm: communicator; None: all ranks.

    Returns: rank 0: the rows in the order of the rollouts' numbers, as `rank0_accum_batches` joins them. Others: None.

    Raises: UsageError: wrong arguments, on the rank that has them; else as `rank0_accum_batches`, `rank0_bcast_wts`.
    """
    loop = _kept_loop("collect", comm, phase)
    loop.set(weights, seed, play, episodes=episodes, steps=steps, envs=envs)
    asks, batch = _names_asked(play), None
    for rollout in _Iteration(loop, iteration):
        if (rows := _rows_of(loop, play, asks, rollout)) is None:
            raise UsageError("collect: play has returned None; it returns the rows of its rollout, such as a dict")
        batch = rollout.gather(rows)
    return batch


def rollouts(
    iterations: Iterable[int] | int | None = None, *, episodes: int | None = None, steps: int | None = None,
    envs: int | None = None, weights: Any = None, seed: int, total_steps: int | None = None, phase: str = PHASE,
    comm: Comm = None,
) -> Iterator[Rollout]:  # fmt: skip
    """Collective: `collect` for a program whose rollout is the body of a loop. Every rank makes the same loop.

        for rollout in mpi_util.rollouts(range(100), episodes=40, weights=agent, seed=1):
            ...  # play, from env.reset(seed=rollout.seed) on
            batch = rollout.gather({"obs": observes, "act": actions})
            if batch is None:
                continue  # this iteration is not over, or this is another rank
            ...  # update; `break` here ends the loop on all ranks

    The body runs for each rollout of each iteration that this rank has; rank 0 has one at least. Do not keep the
    iterator in a variable: `break` must delete it, which tells the other ranks.

    `episodes`, `steps`, `weights`, `seed`, `phase`, `comm` as for `collect`.

    Args:
        iterations: numbers of the iterations, such as range(100) or itertools.count(). One number, or None: one
            iteration, numbered as by `collect`, for a loop within the program's own: after it, `if mpi_util.rank:
            continue`.
        total_steps: ends the loop once the iterations have this number of rows; alone, iterations are 0, 1, ...
        envs: how many; what the body keeps of an environment goes into `Rollout.kept`.

    Raises: as `collect`; UsageError also if the body ends without `Rollout.gather`.
    """
    if total_steps is not None:
        whole_number("rollouts: total_steps", total_steps, 1)
        iterations = itertools.count() if iterations is None else iterations
    loop = _Loop("rollouts", comm, phase) if isinstance(iterations, Iterable) else _kept_loop("rollouts", comm, phase)
    loop.set(weights, seed, None, episodes=episodes, steps=steps, envs=envs)
    if isinstance(iterations, Iterable):
        return _run(loop, iterations, total_steps)
    if total_steps is not None:
        raise UsageError(f"rollouts: iterations are numbers, such as range(100); got {iterations!r}")
    return iter(_Iteration(loop, iterations))


def _run(loop: "_Loop", iterations: Iterable[int], total_steps: int | None) -> Iterator[Rollout]:
    steps = 0
    for i in iterations:
        if total_steps is not None and steps >= total_steps:
            break
        if not loop.goes_on():
            return
        of = _Iteration(loop, i)
        try:
            yield from of
        except GeneratorExit:  # the body has left the loop, by `break` or by an error, which may end the job
            if of.over:
                state(Before).append(lambda: loop.goes_on(False))  # what the other ranks ask next
            raise
        steps += of.collected.steps
    loop.goes_on()  # rank 0 may have left the last iteration


class _Loop:
    """What lasts from one iteration to the next."""

    mean = 0.0  # rows of an episode in the iteration before; 0: there was none
    version = -1  # of the weights with which the iteration before began; -1: there was none
    # on rank 1, early: `samples` before anything was sent, which a copy brings back; those after the last iteration
    begun: Mapping[str, str] = {}
    left: Mapping[str, str] = {}
    sent: Any = None  # the weights of that iteration
    n_ended = 0  # iterations; after `_CHECKED` weights are looked at no more
    _kept_for: Any = None  # seed, number of environments, play
    _play: Any = None

    def __init__(self, call: str, comm: Comm, phase: str):
        self.call, self.channel, self.phase = call, channel_of(comm), phase
        self.kept: dict[int, Rollout] = {}  # of numbered environments, as long as `_kept_for` is the same
        self.next = collections.Counter[int]()  # for each seed the number of the next iteration, if none is given

    def set(self, weights: Any, seed: int, play: Any, **n: int | None) -> None:
        """For the iterations that follow. UsageError: not one kind of work, not a count, or not a seed."""
        self.weights, self.needs_none, self.seed = None if weights is False else weights, weights is False, seed
        self.stream_key = seed, zlib.crc32(f"{self.phase}".encode())
        stream(*self.stream_key)
        given = [name for name, value in n.items() if value is not None]
        if len(given) != 1:
            raise UsageError(f"{self.call}: give one of {', '.join(n)}; got {' and '.join(given) or 'none'}")
        self.kind, self.n = given[0], whole_number(f"{self.call}: {given[0]}", n[given[0]], 1)
        if self.kind == "envs":
            wanted = seed, self.n, _code_of(play)
            self.kept = self.kept if wanted == self._kept_for else {}
            self._kept_for, self._play = wanted, play  # the last kept alive: `_code_of` has ids

    def goes_on(self, wish: bool = True) -> bool:
        """Collective: rank 0's wish, on every rank."""
        asked = f"{self.call} (next iteration)"  # with a name of its own: a rank may have left the iteration before
        return bool(self.channel.agree(asked, lambda: None, lambda _: [wish] * self.channel.size))

    def enter(self, number: int) -> None:
        """Names the rollout in reports of errors until its rows are gathered, or if they never are the next one's."""
        mine, own = state(failure.FailureState), state(_Process)
        if mine.where is not own.inside:  # else the body has left a rollout, by an error that the program has caught
            own.outside = mine.where
        own.inside = {**own.outside, "phase": self.phase, "episode": number}
        mine.at(own.inside)


def _kept_loop(call: str, comm: Comm, phase: str) -> _Loop:
    loop: _Loop = channel_of(comm).loops.setdefault(phase, _Loop(call, comm, phase))
    loop.call = call  # `collect` and `rollouts` may take turns in a phase
    return loop


class _Iteration:
    """Collective: one iteration; iterate over it for this rank's rollouts."""

    # all ranks have gathered; then, what they have brought; then, on rank 0, the rows
    over, collected, batch = False, Collected(), None

    def __init__(self, loop: _Loop, number: int | None):
        """Args: number: None: the next one."""
        self.loop = loop
        self.number = whole_number(f"{loop.call}: iteration", loop.next[loop.seed] if number is None else number)
        loop.next[loop.seed] = self.number + 1
        channel, is_root = loop.channel, loop.channel.rank == 0
        self._deal: Any = None  # where each rank has its environments
        if loop.kind != "envs":
            what = f"{loop.call}: {loop.kind}"
            self._deal = deal_on(channel, loop.n, by_rows=loop.kind == "steps", mean=loop.mean, what=what)
        self._numbers = iter(self._deal or share_of(loop.n, channel.rank, channel.size))
        self._found: list[tuple[int, Any, int]] = []  # number, rows, how many
        # rank 0 takes its first number before the others can: it plays at least one, and then has the update to make
        self._following = next(self._numbers, None) if is_root else None
        self._sent: dict[str, str] = {}  # of the weights of a loop's first iteration, on rank 0
        if loop.weights is not None:
            # rank 1 makes no updates: it has what it was sent last, and not, in a copy that is new, what it began with
            here = samples(loop.weights) if channel.rank == 1 and loop.n_ended < _CHECKED else {}
            loop.begun = loop.begun or here
            is_new = isinstance(loop.weights, (dict, list, tuple)) and loop.weights is not loop.sent
            may_be = loop.left and loop.version == channel.version and (is_new or is_array(loop.weights))
            before = dict(here.items() & loop.begun.items()) if may_be else {}
            send(loop.call, channel, Models(loop.weights, in_place=True))
            own = loop.left.items() | (samples(loop.weights) if before else {}).items()
            if lost := sorted(dict(before.items() - own)):
                so = "so results depend on how many ranks there are. give the model itself, not a copy of its weights"
                what = ", ".join(lost[:5]) or "weights"
                print_once(f"mpi_util: {loop.call}: what rank 1 was sent as '{what}' is gone, {so}")
                loop.n_ended = _CHECKED
            self._sent = samples(loop.weights) if is_root and loop.version < 0 else {}
        elif loop.goes_on() and not loop.needs_none and loop.version == channel.version and channel.size > 1:
            so = "the other ranks play with the weights that they had then (weights=False if play needs none)"
            print0_once(f"mpi_util: {loop.call}: no weights= and no rank0_bcast_wts since the last one: {so}")
        loop.version = channel.version
        self._following = self._following if is_root else next(self._numbers, None)
        self._put_back = keep_random_states(seed_of(*loop.stream_key, self.number))

    def __iter__(self) -> Iterator[Rollout]:
        if self._following is None:
            self._finish()
        rollout: Rollout | None = None
        try:
            while (number := self._following) is not None:
                rollout = Rollout() if self._deal else self.loop.kept.setdefault(number, Rollout())
                rollout.start(self, number)
                set_global_seeds(rollout.seed)
                self.loop.enter(number)
                yield rollout
                if rollout.is_open:
                    raise UsageError("rollouts: the body of the loop has ended without rollout.gather(rows)")
        finally:
            if not self.over:  # the body has left the loop; an error is still reported with the episode
                self._put_back()
                if self._deal and self.loop.kind == "steps" and rollout and rollout.is_open:
                    self._deal.end(0)  # the ranks that go on do not wait for the rows of this one

    def add(self, number: int, rows: Any) -> Any:
        """Takes the rows of a rollout; collective with the rank's last one. Returns: `batch`."""
        state(failure.FailureState).at(state(_Process).outside)
        n, rows = 0, _listed(rows)
        for path, leaf in tree.walk(rows):
            items = leaf if isinstance(leaf, list) else [leaf]
            n = max(n, len(leaf) if items is leaf or getattr(leaf, "shape", None) else 1)
            if any(getattr(item, "requires_grad", False) for item in items):
                fix = "if the loss needs it, compute it again in the update, from what it was made of"
                print0_once(f"mpi_util: {self.loop.call}: '{path}' comes to rank 0 without its gradient; {fix}")
            if items is leaf:  # pickled, a tensor would be a leaf of its own, through which no gradient comes
                leaf[:] = [item.detach() if hasattr(item, "detach") else item for item in leaf]
        if self._deal and self.loop.kind == "steps":
            if not n:
                raise BatchError(f"{self.loop.call}: steps= needs rows, and episode {number} has none")
            self._deal.end(n)
        self._following = next(self._numbers, None)
        # a program that has rollouts to come may use the same arrays for them
        self._found.append((number, rows if self._following is None else copied(rows), n))
        if self._following is None:
            self._finish()
        return self.batch

    def _finish(self) -> None:
        """Collective: the rows come to rank 0."""
        loop, channel = self.loop, self.loop.channel
        now = samples(loop.weights) if self._sent else {}
        if changed := sorted(name for name, text in self._sent.items() if now.get(name, text) != text):
            so = "no other rank sees that, so results depend on their number where a rollout reads it before it sets it"
            fix = "gather what the change needs, and make it on rank 0, where the weights are updated"
            print0_once(f"mpi_util: {loop.call}: rollouts change '{', '.join(changed[:5])}' of weights=; {so}. {fix}")
        what = f"{loop.kind}={loop.n}, seed={loop.seed}, iteration {self.number}, phase {loop.phase!r}"

        def decide(of_ranks: list[tuple[str, list[tuple[int, int]]]]) -> list[tuple[int, Collected]]:
            texts, sizes = zip(*of_ranks)
            if len({*texts}) > 1:
                raise rank_mismatch(f"{loop.call}: all ranks must collect the same", texts)
            numbers, rows = zip(*sorted(itertools.chain(*sizes)))
            ends = [*itertools.accumulate(rows)]
            n = bisect.bisect_left(ends, loop.n) + 1 if loop.kind == "steps" else len(ends)
            of_all = Collected(n, ends[n - 1], len(ends) - n, ends[-1] - ends[n - 1])
            return [(numbers[n - 1], of_all)] * channel.size  # the last number that is used

        loop.n_ended += 1
        checked = channel.rank == 1 and loop.n_ended < _CHECKED and loop.weights is not None
        loop.left, loop.sent = (samples(loop.weights), loop.weights) if checked else ({}, None)
        op = f"{loop.call} (gather)"  # not that of the weights: a rank may have left this iteration for the next
        last, self.collected = channel.agree(op, lambda: (what, [(i, n) for i, _, n in self._found]), decide)
        loop.mean = self.collected.steps / self.collected.rollouts
        used = {i: rows for i, rows, _ in self._found if i <= last}
        batch = to_rank0(channel, loop.call, [*used.values()], [*used])
        if loop.phase == PHASE:
            total = state(_Process)
            total.collected = Collected(*map(operator.add, total.collected, self.collected))
        self.batch, self.over = None if channel.rank else batch, True
        self._put_back()


def _code_of(play: Any) -> Any:
    """Equal for what a loop makes again each time: a method, or a lambda or partial of the same variables, objects."""
    if isinstance(play, functools.partial):
        return _code_of(play.func), [*map(id, play.args)], {name: id(value) for name, value in play.keywords.items()}
    return (play.__code__, *map(id, play.__closure__ or ())) if inspect.isfunction(play) else play


def _names_asked(play: Callable[..., Any]) -> list[str]:
    """Those of the arguments of `play` that `collect` gives."""
    if not callable(play):
        raise UsageError(f"collect: play is a function that plays a rollout; got {play!r}")
    parameters = inspect.signature(play).parameters
    for name, parameter in parameters.items():
        if name not in _GIVEN and parameter.default is parameter.empty and parameter.kind.name[:3] != "VAR":
            fix = f"give it the rest by a function: lambda seed: play({name}, seed)"
            raise UsageError(f"collect: play asks for '{name}', but is given {', '.join(_GIVEN)}; {fix}")
    bound = getattr(play, "keywords", {})  # of a functools.partial
    return [name for name in parameters if name in _GIVEN and name not in bound]


def _rows_of(loop: _Loop, play: Callable[..., Any], asks: list[str], rollout: Rollout) -> Any:
    """The rows of a rollout: what `play` returns, or what the generator that it has returned yields next."""
    if not isinstance(rollout.kept, GeneratorType):
        rows = play(**{name: getattr(rollout, name) for name in asks})
        if not isinstance(rows, GeneratorType):
            if loop.kind == "envs":
                raise UsageError("collect: with envs=, play is a generator function, so that its environment continues")
            return rows
        if loop.kind != "envs":
            raise UsageError("collect: play yields, as envs= needs it; with episodes= or steps= it returns its rows")
        rollout.kept = rows
    for rows in rollout.kept:
        return rows
    raise UsageError("collect: the generator of play has ended; it yields rows in every iteration: while True: ...")


def _listed(node: Any) -> Any:
    """The rows in the form that is gathered: what is no array, tensor or number is in lists of Python objects."""
    if not isinstance(node, list) and (items := tree.children(node)) is not None:
        return tree.with_items(node, [_listed(item) for _, item in items])
    return node if is_array(node) else tree.Objects(node if isinstance(node, list) else [node])


def _refill(rows: Any, batch: Any) -> None:
    """The lists in `rows` get what is in the batch in their place; nothing where there is no batch."""
    if isinstance(rows, list):
        rows[:] = batch or ()
    elif isinstance(rows, (dict, tuple)):
        for key in rows if isinstance(rows, dict) else range(len(rows)):
            _refill(rows[key], batch and batch[key])
