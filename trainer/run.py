"""What each rank holds of a run, and the steps of an iteration that need more than one line."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import mpi_util
from mpi_util.logx import EpochLogger
from policies.actor import Actor, Spec
from policies.scaler import Scaler
from trainer.advice import PHASES, Advice
from trainer.collect import EpisodeCollector, Evaluator, SegmentCollector
from trainer.config import Config
from trainer.control import DROPPED, Control
from trainer.environment import make_env
from trainer.rollout import Runner
from trainer.sharing import NOTHING, Pooled, gather, keep_own

COLLECTING = ("rollout", "gather", "record", "update")  # phases of a batch's collection, and of what goes on beside it

if TYPE_CHECKING:  # they load what ranks that only collect do without
    from trainer.evaluator import Beside
    from trainer.record import Record
    from trainer.training import Training


@dataclass
class Run:
    """What this rank holds.

    Attributes:
        average: every rank learns, each from its own rollouts; else rank 0 alone.
        envs: this rank's environments, by number.
        training: the learners; None: this rank only collects.
        record: run folder and screen; None: this is not rank 0.
        logger: of progress.txt and config.json, which rank 0 writes.
    """

    config: Config
    average: bool
    stop: mpi_util.StopRequest
    envs: dict[int, Any]
    spec: Spec
    actor: Actor
    scaler: Scaler
    control: Control
    training: "Training | None" = None
    record: "Record | None" = None
    logger: EpochLogger | None = None

    def collect(self, collector: EpisodeCollector | SegmentCollector, phases: mpi_util.Phases) -> None:
        """Collective: the batch of the next update, unless nothing more is to be collected."""
        if self.control.stop:
            return
        self.doing(f"iteration {self.control.iteration + 1}: collecting")
        with phases("rollout"):
            collected = collector.collect()
        with phases("gather"):
            data = (keep_own if self.average else gather)(collected, self.spec, self.stop)
        if data.batch is not None:
            data.batch["seconds"] = np.array([phases.seconds.get(name, 0.0) for name in COLLECTING])
            self.training.take(data, self.control.rew_scale)
        elif self.record is not None:
            self.control.stop = DROPPED

    def learn(self, phases: mpi_util.Phases) -> tuple[dict[str, float], Pooled]:
        """One update on the ranks that learn. Returns: as Training.learn."""
        if not self.config.overlap:
            self.doing(f"iteration {self.control.iteration + 1}: updating")
        with phases("update"):
            return self.training.learn() if self.training is not None else ({}, NOTHING)

    def doing(self, what: str) -> None:
        """On rank 0: shows what is going on."""
        if self.record is not None and what:
            self.record.display.doing(what)

    def publish(self) -> None:
        """On the ranks that learn: what was learned goes into `weights`, unless this iteration is dropped."""
        if self.training is not None and self.control.stop != DROPPED:
            self.training.publish(self.weights)
            self.control.save = self.record is not None and self.record.due()

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """What rank 0 broadcasts after each update."""
        return self.actor.params | self.scaler.arrays | self.control.arrays

    def collector(self) -> EpisodeCollector | SegmentCollector:
        """Collective: what collects this rank's part of an iteration; made after the first broadcast."""
        runners = {e: Runner(env, self.actor, self.scaler, self.config, self.control) for e, env in self.envs.items()}
        if self.config.batch_steps:
            saved = mpi_util.bcast(self.training.episodes if self.training is not None else {})
            return SegmentCollector(self.config, self.control, self.actor, runners, self.stop, saved)
        return EpisodeCollector(runners[0], self.stop, in_turn=self.average)

    def evaluator(self) -> "Evaluator | Beside | None":
        """What evaluates the policy, on the ranks that do; made after the first broadcast."""
        config, training = self.config, self.training
        if config.eval_async and self.record is not None:
            from trainer.evaluator import Beside

            return Beside(config, self.spec, self.control, self.weights, training.asked, self.stop, self.report_late)
        if config.eval_async or not config.eval_every:
            return None
        plays = make_env(config, quiet=True), self.actor, self.scaler, config, self.control
        return Evaluator(Runner(*plays, training=False, greedy=True), self.stop)

    def report(
        self, data: Pooled, tests: dict[str, np.ndarray], log: dict[str, float], seconds: dict[str, float]
    ) -> None:
        """Collective: writes a row of progress.txt.

        Args: data: what this rank learned from. log: of the learners; seconds: of the phases: rank 0's are written.
        """
        logger, control = self.logger, self.control
        columns: dict[str, float] = {}
        if self.record is not None:  # with --overlap the batch was collected in the iteration before, beside its update
            seconds = seconds | dict(zip((*COLLECTING[:3], "beside"), data.batch.get("seconds", ())))
            columns = log | self.record.times(data.part.total, seconds, data.work[0])
        if data.batch is not None:
            logger.store(EpRet=data.batch["ep_ret"], EpLen=data.batch["ep_len"])
        logger.log_tabular("Iteration", control.iteration)
        ready = self.training.ready.batch if self.training is not None else None  # with --overlap: of the next row
        logger.log_tabular("Episodes", control.episodes - (0 if ready is None else len(ready["ep_ret"])))
        logger.log_tabular("TotalEnvInteracts", control.steps)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.log_tabular("EpLen", average_only=True)
        for column, value in columns.items():
            logger.log_tabular(column, value)
        self.report_tests(tests, int(data.work[3]))

    def report_tests(self, tests: dict[str, np.ndarray], restarts: int) -> None:
        """Collective: completes the row, and keeps the policy that was evaluated, if it is the best so far.

        Args: tests: what the evaluator returned; {}: nothing. restarts: of environments, in training.
        """
        logger = self.logger
        if tests:
            logger.store(TestEpRet=tests["ep_ret"], TestEpLen=tests["ep_len"])
        if self.config.eval_every:
            logger.log_tabular("TestEpRet", with_min_and_max=True)
            logger.log_tabular("TestEpLen", average_only=True)
        if self.config.eval_async:
            logger.log_tabular("TestIteration", tests["iteration"] if tests else math.nan)
        if self.config.on_env_error == "restart":
            logger.log_tabular("EnvRestarts", restarts + (int(tests["work"][:, 3].sum()) if tests else 0))
        logger.dump_tabular()
        if self.record is not None and tests:
            self._keep_best(tests, self.record.row["AverageTestEpRet"])

    def report_late(self, tests: dict[str, np.ndarray]) -> None:
        """On rank 0: prints a result that belongs to no row. Args: tests: as Beside.evaluate returns them."""
        test_ret = float(tests["ep_ret"].mean())
        self.record.display.say(f"evaluation of iteration {int(tests['iteration'][0])}: return {test_ret:.1f}")
        self._keep_best(tests, test_ret)

    def _keep_best(self, tests: dict[str, np.ndarray], test_ret: float) -> None:
        policy = self.actor.params | self.scaler.arrays
        self.record.keep_best({name: tests.get(name, array) for name, array in policy.items()}, test_ret)

    def evaluate_owed(self, evaluator: "Evaluator | Beside | None") -> None:
        """Collective: makes the evaluation that a stop has left undone, and writes its row again."""
        row = dict(self.record.row) if self.record is not None else {}
        restarts = int(row.pop("EnvRestarts", 0))
        self.logger.log_current_row = {key: value for key, value in row.items() if "Test" not in key}
        self.report_tests(evaluator.evaluate() if evaluator else {}, restarts)

    def advise(self, advice: Advice, seconds: dict[str, float], data: Pooled) -> None:
        """On rank 0: adds the seconds of this iteration's phases, and prints the advice when it is complete."""
        if self.record is not None:
            numbers = {name: seconds.get(name, 0.0) for name in PHASES}
            numbers |= dict(zip(("busy", "asleep", "sleeps"), data.work))
            self.record.display.say(advice.after(**numbers, env_steps=data.part.total))

    def save(self, collector: EpisodeCollector | SegmentCollector) -> None:
        """Collective: rank 0 writes a checkpoint."""
        running = collector.state()
        if self.training is not None:
            arrays, scalars = self.training.state()
            if self.record is not None:
                owed = {"evaluate": self.control.arrays["evaluate"]}
                self.logger.sync()  # the rows that the checkpoint counts on

                def write() -> None:
                    self.record.save(self.actor.params | self.scaler.arrays, arrays | running | owed, scalars)
                    self.note_saved()

                self.logger.attempt("a checkpoint", write)

    def note_saved(self) -> None:
        """On rank 0: what `--max_restarts` starts again from; before the first checkpoint, in the same folder."""
        mpi_util.saved({"run_dir": str(self.record.folder.path), "iteration": self.control.iteration})
