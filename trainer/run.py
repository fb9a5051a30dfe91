"""What each rank holds of a run, how that is built, and the steps of an iteration that need more than one line."""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import mpi_util
from mpi_util_spinup.files import lock_folder
from mpi_util_spinup.logx import EpochLogger
from policies.actor import Actor, Spec, parse_hid_list
from policies.data_parallel import ALONE, LearnerGroup
from policies.hyper import DEFAULTS, users_function
from policies.scaler import Scaler, scaler_for
from trainer.collect import NOTHING, EpisodeCollector, Evaluator, Pooled, SegmentCollector, gather, keep_own
from trainer.config import Config
from trainer.control import DROPPED, STOP, Control
from trainer.environment import action_map, check_env, image_shape, make_env, make_shown_env, versioned
from trainer.rollout import Runner, networks
from trainer.run_folder import from_start

COLLECTING = ("rollout", "gather", "record", "update")  # phases of a batch's collection, and of what runs beside it
EXTRAS = {"torch": "torch", "tensorflow": "tf", "keras": "tf", "ale_py": "atari"}  # by module
PARAMS_STREAM = 0  # of the random streams of a run's seed; trainer.rollout has the others


@dataclass
class Run:
    """What this rank holds."""

    config: Config
    average: bool  # every rank learns, each from its own rollouts; else rank 0 alone
    stop: mpi_util.StopRequest
    envs: dict[int, Any]  # this rank's environments, by number
    spec: Spec
    actor: Actor
    scaler: Scaler
    control: Control
    training: Any = None  # trainer.training.Training, the learners; None: this rank only collects
    record: Any = None  # trainer.record.Record, run folder and screen; None: this is not rank 0
    logger: EpochLogger | None = None  # of progress.txt and config.json, which rank 0 writes
    runners: list[Runner] = field(default_factory=list)  # all that were made, to be closed at the end

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
        self.runners += runners.values()
        if self.config.batch_steps:
            saved = mpi_util.bcast(self.training.episodes if self.training is not None else {})
            return SegmentCollector(self.config, self.control, self.actor, runners, self.stop, saved)
        return EpisodeCollector(runners[0], self.stop, in_turn=self.average)

    def evaluator(self) -> Any:
        """What evaluates the policy: Evaluator or Beside; None: not this rank. Made after the first broadcast."""
        config, training = self.config, self.training
        if config.eval_async and self.record is not None:
            from trainer.evaluator import Beside

            return Beside(self, training.asked)
        if config.eval_async or not config.eval_every:
            return None
        plays = make_env(config, quiet=True), self.actor, self.scaler, config, self.control
        self.runners.append(runner := Runner(*plays, training=False, greedy=True))
        return Evaluator(runner, self.stop)

    def report(
        self, data: Pooled, tests: dict[str, np.ndarray], log: dict[str, float], seconds: dict[str, float]
    ) -> None:
        """Collective: writes a row of progress.txt.

        Args: data: what this rank learned from. log: the learners' numbers. seconds: of each phase; rank 0's count.
        """
        logger, control, episodes = self.logger, self.control, self.control.episodes
        if self.record is not None:  # with --overlap the batch was collected in the iteration before, beside its update
            seconds = seconds | dict(zip((*COLLECTING[:3], "beside"), data.batch.get("seconds", ())))
            log = log | self.record.times(data.part.total, seconds, data.work[0])
        if data.batch is not None:
            logger.store(EpRet=data.batch["ep_ret"], EpLen=data.batch["ep_len"])
        if self.training is not None and self.training.ready.batch is not None:  # with --overlap: of the next row
            episodes -= len(self.training.ready.batch["ep_ret"])
        counts = {"Iteration": control.iteration, "Episodes": episodes, "TotalEnvInteracts": control.steps}
        for column, value in counts.items():
            logger.log_tabular(column, value)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.log_tabular("EpLen", average_only=True)
        for column, value in log.items():
            logger.log_tabular(column, value)
        self.report_tests(tests, int(data.work[1]))

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
            logger.log_tabular("EnvRestarts", restarts + (int(tests["work"][:, 1].sum()) if tests else 0))
        if self.config.hook:
            self.call_hook()
        logger.dump_tabular()
        if self.record is not None and tests:
            self._keep_best(tests, self.record.row["AverageTestEpRet"])

    def call_hook(self) -> None:
        """Collective: the user's function adds columns to a complete row, and all ranks do what it wants."""
        hook = self.record.hook if self.record is not None else None
        if hook is not None and not self.control.evaluate:  # else the row will be completed on resume
            with mpi_util.during("hook", iteration=self.control.iteration):
                for column, value in hook.columns(self.logger.log_current_row).items():
                    self.logger.log_tabular(column, value)
        self.follow_hook(hook)

    def follow_hook(self, hook: Any) -> None:
        """Collective: takes over settings that the user's function has changed, and ends the run if it says so."""
        changed, stopped = mpi_util.bcast(hook and (hook.changed, hook.stopped))
        if self.training is not None:
            self.training.change(changed)
        if stopped:
            self.control.stop = STOP

    def report_late(self, tests: dict[str, np.ndarray]) -> None:
        """On rank 0: prints a result that belongs to no row. Args: tests: as Beside.evaluate returns them."""
        test_ret = float(tests["ep_ret"].mean())
        self.record.display.say(f"evaluation of iteration {int(tests['iteration'][0])}: return {test_ret:.1f}")
        self._keep_best(tests, test_ret)

    def _keep_best(self, tests: dict[str, np.ndarray], test_ret: float) -> None:
        policy = self.actor.params | self.scaler.arrays
        self.record.keep_best({name: tests.get(name, array) for name, array in policy.items()}, test_ret)

    def evaluate_owed(self, evaluator: Any) -> None:
        """Collective: makes the evaluation that a stop has left undone, and writes its row again."""
        row = dict(self.record.row) if self.record is not None else {}
        restarts = int(row.pop("EnvRestarts", 0))
        self.logger.log_current_row = {key: value for key, value in row.items() if "Test" not in key}
        self.report_tests(evaluator.evaluate() if evaluator else {}, restarts)

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


def set_up(config: Config) -> Run:
    """Collective: this rank's part of the run, or the end of the job with one line that says what is wrong."""
    # where a launcher has started the processes, its number counts
    config = replace(config, nprocs=mpi_util.nworkers * (config.ranks_per_env or 1))
    stop = mpi_util.StopRequest()
    mpi_util.watchdog(config.watchdog, config.watchdog_kill)
    average = config.parallel == "average" and mpi_util.nworkers > 1
    all_or_none(lambda: users_function("--hook", config.hook) if config.hook and mpi_util.rank == 0 else None)
    check_env(config)  # before this process has others, which may not outlast the end of one
    envs, spec = all_or_none(lambda: build_envs(config.check()))
    config = replace(config.fitted(spec), env=versioned(config.env))
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(PARAMS_STREAM,)))
    actor = all_or_none(lambda: networks(spec).Actor(spec, networks(spec).init_params(spec, rng, config.log_std)))
    run = Run(config, average, stop, envs, spec, actor, scaler_for(spec), Control(config.gamma))
    resumed = config.resume if mpi_util.rank == 0 else None
    # before any rank reads the checkpoint: a run that is just ending may still write it
    lock = all_or_none(lambda: lock_folder(from_start(resumed)) if resumed else None)
    all_or_none(lambda: build_training(run))
    if config.hook:
        run.follow_hook(run.record.hook if run.record is not None else None)
    del lock  # now the logger keeps it
    return run


def build_envs(config: Config) -> tuple[dict[int, Any], Spec]:
    """This rank's environments by number, and the sizes of the networks for them."""
    is_root = mpi_util.rank == 0
    numbers: Iterable[int] = [0]
    if config.batch_steps:
        apart = config.overlap and mpi_util.nworkers > 1  # rank 0 updates while the others collect
        collecting, first = mpi_util.nworkers - apart, mpi_util.rank - apart
        numbers = range(first, config.num_envs, collecting) if first >= 0 else ()
    envs = {e: make_env(config, quiet=not is_root or e > 0) for e in numbers}
    if config.render and is_root:
        envs |= {e: make_shown_env(config) for e in list(envs)[:1]}
    env = next(iter(envs.values()), None) or make_env(config, quiet=not is_root)
    obs_dim = env.observation_space.shape[0]
    act_dim, discrete, _ = action_map(env.action_space)
    for name in ("log_std", "std_fall") if discrete and not config.resume else ():
        if getattr(config, name) not in (getattr(Config, name), DEFAULTS[config.algo].get(name)):
            raise ValueError(f"--{name} has no effect with the discrete actions of {config.env}; leave it out")
    policy_hid = parse_hid_list(config.policy_hid_list, obs_dim, act_dim, "policy")
    valfunc_hid = parse_hid_list(config.valfunc_hid_list, obs_dim, act_dim, "value")
    image = image_shape(env, config)
    if not envs:  # this rank collects nothing
        env.close()
    return envs, Spec(obs_dim, act_dim, discrete, policy_hid, valfunc_hid, config.network, image)


def build_training(run: Run) -> None:
    """Sets `run.training` on the ranks that learn, `run.record` on rank 0, and `run.logger`."""
    is_root = mpi_util.rank == 0
    if not is_root:
        run.logger = EpochLogger()
    if not (is_root or run.average):
        return
    from trainer.record import Record  # here, because of what they load, which ranks that only collect never do
    from trainer.training import Training

    group = LearnerGroup(mpi_util.nworkers, mpi_util.rank, mpi_util.all_sum) if run.average else ALONE
    run.training = Training(run.config, run.spec, run.actor.params, group)
    run.training.publish(run.weights)
    if is_root:
        keep_rows = run.control.iteration - run.control.evaluate if run.config.resume else None
        record = run.record = Record(run.config, run.spec, run.training.resumed)
        run.logger = EpochLogger(record.folder.path, show=record.show, keep_rows=keep_rows, numbered_by="Iteration")
        record.begin(keep_rows or 0)
        if not run.control.stop:  # else it has reached its limit, which may be a slip, and does nothing more
            run.logger.save_config(record.settings)
        run.note_saved()


def all_or_none(build: Callable[[], Any]) -> Any:
    """Collective: `build()` on every rank; if it fails on any, rank 0 prints one line, and all exit with status 2."""
    result, problem = None, None
    try:
        result = build()
    except (ValueError, OSError, MemoryError, mpi_util.UsageError) as error:
        problem = str(error)
    except ImportError as error:
        extra = EXTRAS.get(error.name or "", "train")
        problem = f"{error}; install what train.py needs: pip install -c constraints.txt -e '.[{extra}]'"
    if problems := [p for p in mpi_util.all_accum_batches([problem]) if p]:
        if mpi_util.rank == 0:
            print(f"train.py: {problems[0]}", file=sys.stderr)
        sys.exit(2)
    return result
