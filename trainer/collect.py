"""Which rank runs which episodes: whole ones, dealt to the ranks; segments of fixed length; evaluations."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import mpi_util
from trainer.config import Config
from trainer.control import DROPPED, Control
from trainer.rollout import MOST_REPLAYED, Episode, Runner


class Collected(NamedTuple):
    """What one rank collected.

    Attributes:
        batches: one per episode, or part of an episode, as Runner makes them.
        places: of each batch, its position in the order of all ranks' batches.
    """

    batches: list[dict[str, np.ndarray]]
    places: list[int]


class EpisodeCollector:
    """Collects whole episodes."""

    phase = "rollout"  # for messages

    def __init__(
        self, config: Config, control: Control, runner: Runner, stop: mpi_util.StopRequest, in_turn: bool = False
    ):
        """Args: stop: drops the episodes that have not ended. in_turn: episode i goes to rank i % nworkers."""
        self.config, self.control, self.runner, self.stop, self.in_turn = config, control, runner, stop, in_turn

    def collect(self) -> Collected:
        """Collective: the episodes after those so far, `batch_size` or what is left of `num_episodes`."""
        first, n = self.control.episodes, self.config.batch_size
        if self.config.num_episodes:
            n = min(n, self.config.num_episodes - first)
        return self.run([(first + i,) for i in range(n)])

    def run(self, keys: Sequence[tuple[int, ...]]) -> Collected:
        """Collective: the episodes of these keys, the same on every rank; places are positions in it.

        Each goes to the next rank that is free; in turn, where timing must not decide which rank gets it.
        """
        deal = mpi_util.deal(len(keys))
        self.stop.then = deal.close
        if self.stop:
            deal.close()

        def stopped() -> bool:
            deal.serve()
            return deal.closed

        collected = Collected([], [])
        for i in range(mpi_util.rank, len(keys), mpi_util.nworkers) if self.in_turn else deal:
            with mpi_util.during(self.phase, episode=keys[i][-1]):
                self.runner.start(Episode(keys[i]))
                batch, _ = self.runner.run(stop=stopped)
            if batch is None:
                break
            collected.batches.append(batch)
            collected.places.append(i)
        return collected

    def state(self) -> dict[str, np.ndarray]:
        """As SegmentCollector.state: none, as no episode is under way between iterations."""
        return {}


class SegmentCollector:
    """Collects a segment of fixed length from each environment; the next one continues where it ended.

    Episode j of environment e has the key (e, j). An environment stays on one rank until the run is resumed.
    """

    def __init__(
        self, config: Config, control: Control, runners: dict[int, Runner], stop: mpi_util.StopRequest, saved: dict
    ):
        """Collective: continues the episodes of a resumed run.

        Args:
            runners: by number of the environment, those of this rank. control: of the iteration to begin with.
            saved: what `state` returned on rank 0; {}: a new run.
        """
        self.config, self.control, self.runners, self.stop = config, control, runners, stop
        self.n_steps = config.batch_steps // config.num_envs
        first = self.n_steps * control.iteration  # a checkpoint without episodes had used at most these numbers
        self.episodes = {e: Episode.unpack(saved, e) if saved else Episode((e, first)) for e in runners}
        lost = [e for e, episode in self.episodes.items() if episode.length and not self._started(e)]
        self.episodes |= {e: self.episodes[e].next for e in lost}
        if n_lost := int(mpi_util.all_sum(len(lost))):
            text = f"train.py: {n_lost} of {config.num_envs} environments {config.env} could not be replayed (not "
            text += f"deterministic, or episodes of more than {MOST_REPLAYED:,} steps): they begin new episodes, and "
            mpi_util.print0(text + "results differ from those of an undisturbed run", file=sys.stderr)

    def _started(self, e: int) -> bool:
        """Brings environment `e` to where its episode is. Returns: as Runner.start."""
        with mpi_util.during("rollout", episode=self.episodes[e].name):
            return self.runners[e].start(self.episodes[e])

    def collect(self) -> Collected:
        """Steps each environment; a batch for each part of an episode, places in the order of environments and time."""
        collected, self.before = Collected([], []), dict(self.episodes)
        for e, runner in self.runners.items():
            left, part = self.n_steps, 0
            while left:
                if runner.episode is not self.episodes[e]:  # not earlier, so that the time counts as rollout
                    self._started(e)
                with mpi_util.during("rollout", episode=self.episodes[e].name):
                    batch, ended = runner.run(left, lambda: bool(self.stop))
                if batch is not None:
                    left -= len(batch["adv"])
                    collected.batches.append(batch)
                    collected.places.append(e * (self.n_steps + 1) + part)
                    part += 1
                elif not ended:
                    return collected
                self.episodes[e] = runner.episode.next if ended else runner.episode
        return collected

    def state(self) -> dict[str, np.ndarray]:
        """Collective: on rank 0, arrays from which a resumed run continues the episodes; {} elsewhere."""
        episodes = self.before if self.control.stop == DROPPED else self.episodes
        packed = [episode.pack(self.runners[e].actor.spec) for e, episode in episodes.items()]
        arrays = mpi_util.rank0_accum_batches(packed, index=list(episodes))
        return arrays if mpi_util.rank == 0 else {}


class Evaluator(EpisodeCollector):
    """Evaluates the policy, with a runner of deterministic actions, on episodes that training does not use."""

    phase = "evaluate"

    def evaluate(self) -> dict[str, np.ndarray]:
        """Collective: `eval_episodes` episodes with the current weights.

        Returns:
            On rank 0 ep_ret, ep_len and work of all episodes, as Runner's, in their order; {} elsewhere, and where the
            run was stopped before: `control.evaluate` then stays set on rank 0.
        """
        self.runner.actor.refresh()
        keys = [(self.control.iteration, i) for i in range(self.config.eval_episodes)]
        batches, places = self.run(keys)
        results = [{key: batch[key] for key in ("ep_ret", "ep_len", "work")} for batch in batches]
        results = mpi_util.rank0_accum_batches(results, index=places)
        if mpi_util.rank:
            return {}
        self.control.evaluate = len(results.get("ep_ret", ())) < len(keys)
        return {} if self.control.evaluate else results
