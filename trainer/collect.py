"""Which rank runs which episodes (whole ones, dealt to the ranks; segments of fixed length; evaluations), and which
rank then learns from which rows: rank 0 from all, or each from its own, with sums over the ranks."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

import mpi_util
from policies.actor import Actor, Spec
from policies.data_parallel import Part
from trainer.config import Config
from trainer.control import DROPPED, Control
from trainer.rollout import MOST_REPLAYED, Episode, Runner, Steps, alone, empty_batch, together

RESULT = ("ep_ret", "ep_len", "work")  # what the result of an evaluation has of Runner's batches
# One rank's batches, of episodes or parts of them, as Runner makes them, by position in the order of all ranks' batches
Collected = dict[int, dict[str, np.ndarray]]


def play(runner: Runner, phase: str, key: tuple[int, ...], stop: Callable[[], bool] = lambda: False) -> Any:
    """A whole episode, with what it took. Args and returns: as Runner.run; phase: for messages."""
    with mpi_util.during(phase, episode=key[-1]):
        began = time.perf_counter()
        runner.start(Episode(key))
        if (batch := runner.run(stop=stop)[0]) is not None:
            batch["work"][:, 0] += time.perf_counter() - began
    return batch


class EpisodeCollector:
    """Collects whole episodes."""

    phase = "rollout"  # for messages

    def __init__(self, runner: Runner, stop: mpi_util.StopRequest, in_turn: bool = False):
        """Args: stop: drops the episodes that have not ended. in_turn: episode i goes to rank i % nworkers."""
        self.runner, self.stop, self.in_turn = runner, stop, in_turn
        self.config, self.control = runner.config, runner.control

    def collect(self) -> Collected:
        """Collective: the episodes after those so far, `batch_size` or what is left of `num_episodes`."""
        first, n = self.control.episodes, self.config.batch_size
        if self.config.num_episodes:
            n = min(n, self.config.num_episodes - first)
        return self.run([(first + i,) for i in range(n)])

    def run(self, keys: Sequence[tuple[int, ...]]) -> Collected:
        """Collective: plays the episodes of `keys`, equal on all ranks. Returns: this rank's, by position in `keys`.

        The next rank that is free takes the next one; in turn, where timing must not decide which rank does.
        """
        deal = mpi_util.deal(len(keys))
        self.stop.then = deal.close
        if self.stop:
            deal.close()

        def stopped() -> bool:
            deal.serve()
            return deal.closed

        collected: Collected = {}
        for i in range(mpi_util.rank, len(keys), mpi_util.nworkers) if self.in_turn else deal:
            if (batch := play(self.runner, self.phase, keys[i], stopped)) is None:
                break
            collected[i] = batch
        return collected

    def state(self) -> dict[str, np.ndarray]:
        """As SegmentCollector.state: none, as no episode is under way between iterations."""
        return {}


class SegmentCollector:
    """Collects a segment of fixed length from each environment; the next one continues where it ended.

    Episode j of environment e has the key (e, j). An environment stays on one rank until the run is resumed. Episode 0
    is cut at (e + 1) / num_envs of its limit, not reported: else episodes of one length would always begin together.
    """

    def __init__(
        self, config: Config, control: Control, actor: Actor, runners: dict[int, Runner], stop: mpi_util.StopRequest,
        saved: dict[str, Any],
    ):  # fmt: skip
        """Collective. Args: runners: this rank's, by environment. saved: what `state` gave rank 0; {}: a new run."""
        self.config, self.control, self.actor, self.runners, self.stop = config, control, actor, runners, stop
        self.n_steps = self.config.batch_steps // self.config.num_envs
        self.limit = next((r.env.spec.max_episode_steps for r in runners.values() if r.env.spec), None) or 0
        self.episodes = {e: Episode.unpack(saved, e) if saved else Episode((e, 0)) for e in self.runners}
        lost = [e for e, episode in self.episodes.items() if episode.length and not self._started(e)]
        self.episodes |= {e: self.episodes[e].next for e in lost}
        if n_lost := int(mpi_util.all_sum(len(lost))):
            text = f"train.py: {n_lost} of {self.config.num_envs} environments {self.config.env} could not be replayed "
            text += f"(not deterministic, or episodes of more than {MOST_REPLAYED:,} steps): they begin new episodes, "
            mpi_util.print0(text + "and results differ from those of an undisturbed run", file=sys.stderr)

    def _during(self, e: int) -> AbstractContextManager[None]:
        return mpi_util.during("rollout", episode=self.episodes[e].name)

    def _started(self, e: int) -> bool:
        """Brings environment `e` to where its episode is. Returns: as Runner.start."""
        with self._during(e):
            return self.runners[e].start(self.episodes[e])

    def collect(self) -> Collected:
        """Steps each environment, one after the other; in turn where the actor multiplies rows together."""
        collected: Collected = {}
        self.before, began = dict(self.episodes), time.perf_counter()
        segments = {e: self._segment(e, collected) for e in self.runners}
        if self.actor.height:
            together(segments, self.actor, self.stop.__bool__, self._during)
        else:
            all(alone(segment, self.actor, self.stop.__bool__) for segment in segments.values())
        if collected:  # rank 0 has none with --overlap
            next(iter(collected.values()))["work"][:, 0] += time.perf_counter() - began
        return collected

    def _segment(self, e: int, collected: Collected) -> Steps:
        """Steps environment `e`, as Runner.steps. Returns: True."""
        runner, left, part = self.runners[e], self.n_steps, 0
        while left:
            if runner.episode is not self.episodes[e]:  # not earlier, so that the time counts as rollout
                self._started(e)
            length = self.episodes[e].length
            cut = self.limit * (e + 1) // self.config.num_envs * (self.episodes[e].key[-1] == 0)
            with self._during(e):  # which `together` says again, as it steps others in between
                batch, ended = yield from runner.steps(min(left, cut - length) if length < cut else left)
            if batch is not None:
                left -= len(batch["adv"])
                collected[e * (self.n_steps + 1) + part] = batch
                part += 1
            self.episodes[e] = runner.episode.next if ended or 0 < cut == runner.episode.length else runner.episode
        return True

    def state(self) -> dict[str, np.ndarray]:
        """Collective: on rank 0, arrays from which a resumed run continues the episodes; {} elsewhere."""
        episodes = self.before if self.control.stop == DROPPED else self.episodes
        packed = [episode.pack(self.actor.spec) for episode in episodes.values()]
        arrays = mpi_util.rank0_accum_batches(packed, index=list(episodes))
        mpi_util.bcast(None)  # a gather gives rank 0 all cores; with several threads its next actions had other bits
        return arrays if mpi_util.rank == 0 else {}


def episodes_of(runner: Runner) -> list[tuple[int, ...]]:
    """The keys of the episodes of an evaluation after this iteration."""
    return [(runner.control.iteration, i) for i in range(runner.config.eval_episodes)]


class Evaluator(EpisodeCollector):
    """Evaluates the policy, with a runner of deterministic actions, on episodes that training does not use."""

    phase = "evaluate"

    def evaluate(self) -> dict[str, np.ndarray]:
        """Collective: `eval_episodes` episodes with the current weights, if an evaluation is due.

        Returns: on rank 0 ep_ret, ep_len and work of all episodes, as Runner's, in their order; {} elsewhere, and where
            the run was stopped before: `control.evaluate` then stays set on rank 0.
        """
        if not self.control.evaluate:
            return {}
        self.runner.actor.refresh()
        batches = self.run(keys := episodes_of(self.runner))
        results = mpi_util.rank0_accum_batches([*batches.values()], index=list(batches))
        if mpi_util.rank == 0:
            self.control.evaluate = len(results.get("ep_ret", ())) < len(keys)
        return {} if mpi_util.rank or self.control.evaluate else results


class Pooled(NamedTuple):
    """An iteration's steps, as one rank has them."""

    batch: dict[str, np.ndarray] | None  # what it learns from; None: it only collects, or the run was stopped
    part: Part  # which rows of the whole batch these are
    work: np.ndarray  # float64 (2,), as in Runner's batches, summed over all ranks; zeros without a batch


NOTHING = Pooled(None, Part.whole(0), np.zeros(2))


def gather(collected: Collected, spec: Spec, stop: mpi_util.StopRequest) -> Pooled:
    """Collective: all ranks' batches on rank 0, in the order of their places; NOTHING elsewhere, and when stopped."""
    batch = mpi_util.rank0_accum_batches(list(collected.values()), index=list(collected))
    if mpi_util.rank or stop:
        return NOTHING
    return Pooled(batch, Part.whole(len(batch["obs"])), batch["work"].sum(axis=0))


def keep_own(collected: Collected, spec: Spec, stop: mpi_util.StopRequest) -> Pooled:
    """Collective: each rank keeps its own rows, and learns their numbers in the batch that `gather` would make."""
    if mpi_util.all_sum(bool(stop)):
        return NOTHING
    sizes: Any = [{"rows": len(b["obs"]), "rank": mpi_util.rank, "work": b["work"]} for b in collected.values()]
    sizes = mpi_util.all_accum_batches(sizes, index=list(collected))
    ends = np.cumsum(sizes["rows"])
    own = [np.arange(end - n, end) for end, n, k in zip(ends, sizes["rows"], sizes["rank"]) if k == mpi_util.rank]
    in_order = [collected[place] for place in sorted(collected)] or [empty_batch(spec)]
    batch = {key: np.concatenate([b[key] for b in in_order]) for key in in_order[0]}
    return Pooled(batch, Part(np.concatenate([*own, np.empty(0, int)]), int(ends[-1])), sizes["work"].sum(axis=0))
