"""Train a policy on N processes: all collect rollouts, rank 0 alone updates, the weights go back to all.

    python train.py Humanoid-v4 --nprocs 10
    python train.py InvertedPendulum-v4 --nprocs 2 -n 500
    python train.py Humanoid-v4 --nprocs 2 --batch_steps 4000 --num_envs 20
    python train.py Hopper-v4 --nprocs 2 --algo trpo --framework tf
    python train.py Hopper-v4 --nprocs 2 --parallel average
    python train.py --resume runs/Humanoid-v4/20260101-120000-s0

For one seed and configuration the result has the same bits for every --nprocs. See --help.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpi_util
from mpi_util.collectives.averaging import add
from mpi_util.logx import EpochLogger
from mpi_util.mpi_pytorch import setup_pytorch_for_mpi
from policies import config as configuration
from policies.actor import INIT_LOG_STD, Actor, Spec, init_params, parse_hid_list
from policies.advice import Advice, timed
from policies.config import Config
from policies.minibatches import TooFewRows
from policies.rollout import Runner, Segments, action_map, empty_batch, make_env
from policies.scaler import Scaler
from policies.share import ALONE, Part

PARAMS_STREAM = 0
DROPPED = 2  # value of control["stop"]: end, and this iteration counts for nothing
CONTROL = ("stop", "evaluate", "save", "iteration", "episodes", "steps")


@dataclass
class Run:
    """What this rank has of the run.

    Attributes:
        average: every rank learns, each from its own rollouts; else rank 0 alone.
        control: what rank 0 tells beside the weights: CONTROL's names, and rew_scale -> array of shape (1,).
        envs: this rank's environments, by number.
        training: the learners; None: this rank only collects.
        record: folder and screen; None: this is not rank 0.
    """

    config: Config
    average: bool
    stop: mpi_util.StopRequest
    envs: dict[int, Any]
    spec: Spec
    actor: Actor
    scaler: Scaler
    control: dict[str, np.ndarray]
    training: Any = None
    record: Any = None
    logger: EpochLogger | None = None

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """What rank 0 sends after each update."""
        return self.actor.params | self.scaler.arrays | self.control

    def say(self, text: str) -> None:
        """A line on rank 0's screen, if there is one to say."""
        if self.record is not None:
            self.record.display.say(text)


def main() -> int:
    """The whole run. Returns the exit status."""
    config = configuration.parse()
    if mpi_util.mpi_fork(config.nprocs) == "parent":
        return 0
    run = set_up(config)
    weights, control, record = run.weights, run.control, run.record
    mpi_util.rank0_bcast_wts(weights)
    if not config.resume:
        save(run)
    if record is not None:
        record.announce()

    collect, pool, evaluate = collector(run), share_out if run.average else gather, trial(run)
    phases, log = mpi_util.Phases(), {}
    pieces = config.num_envs if config.batch_steps else config.batch_size
    advice = Advice(config.parallel, mpi_util.nworkers, mpi_util.usable_cores(), pieces)
    while not control["stop"][0]:
        run.actor.refresh()
        if record is not None:
            record.display.doing(f"iteration {control['iteration'][0] + 1}: collecting; Ctrl-C saves and ends")
        with phases("rollout"):
            batches, places = collect()
        with phases("gather"):
            batch, part, work = pool(batches, places, run.spec, run.stop)
        with phases("update"):
            if batch is not None:
                log = run.training.learn(batch, part)
            if record is not None:
                control["stop"][0] = DROPPED if batch is None else control["stop"][0]
                control["save"][0] = record.due()
        with phases("bcast"):
            mpi_util.rank0_bcast_wts(weights)
        if control["stop"][0] == DROPPED:
            break
        with phases("evaluate"):
            tests = evaluate() if control["evaluate"][0] else {}
        seconds = phases.take()
        with phases("record"):
            report(run, batch, tests, log | (record.times(part.total, seconds, work[0]) if record is not None else {}))
            run.say(advise(run, advice, seconds, work, part))
            if control["save"][0]:
                save(run)
    save(run)
    if record is not None:
        record.finish("stopped" if run.stop else "done", int(control["iteration"][0]), int(control["steps"][0]))
    return run.stop.status


def set_up(config: Config) -> Run:
    """Collective: builds what this rank needs, or ends with one line that says why it cannot."""
    stop = mpi_util.StopRequest()
    average = config.parallel == "average" and mpi_util.nworkers > 1
    envs, spec = all_or_none(lambda: build_envs(config))
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(PARAMS_STREAM,)))
    actor, scaler = Actor(spec, init_params(spec, rng, config.log_std)), Scaler(spec.obs_dim)
    control = {name: np.zeros(1, np.int64) for name in CONTROL} | {"rew_scale": np.array([config.first_rew_scale])}
    run = Run(config, average, stop, envs, spec, actor, scaler, control)
    if mpi_util.rank == 0 or average:
        run.training, run.record = all_or_none(lambda: build_training(run))
    else:
        all_or_none(lambda: None)
    run.logger = all_or_none(lambda: build_logger(run))
    return run


def build_envs(config: Config) -> tuple[dict[int, Any], Spec]:
    """This rank's environments by number, and the sizes of the networks for them."""
    is_root = mpi_util.rank == 0
    arguments = config.env_arguments | ({"render_mode": "human"} if config.render and is_root else {})
    numbers = range(mpi_util.rank, config.num_envs, mpi_util.nworkers) if config.batch_steps else [0]
    if not numbers:
        raise ValueError(f"more processes than --num_envs {config.num_envs}: in segment mode each needs an environment")
    envs = {e: make_env(config.env, arguments, quiet=not is_root or e > 0) for e in numbers}
    env = next(iter(envs.values()))
    obs_dim = env.observation_space.shape[0]
    act_dim, discrete, _ = action_map(env.action_space)
    if discrete and config.log_std != INIT_LOG_STD:
        raise ValueError(f"--log_std has no effect with the discrete actions of {config.env}; leave it out")
    policy_hid = parse_hid_list(config.policy_hid_list, obs_dim, act_dim, "policy")
    valfunc_hid = parse_hid_list(config.valfunc_hid_list, obs_dim, act_dim, "value")
    return envs, Spec(obs_dim, act_dim, discrete, policy_hid, valfunc_hid)


def build_training(run: Run) -> tuple[Any, Any]:
    """The learners of this rank, and on rank 0 the run's record."""
    from policies.record import Record  # here, because of what they load, which ranks that only collect never do
    from policies.training import Training

    if run.config.framework == "torch":
        with contextlib.suppress(mpi_util.MissingFrameworkError):  # Training says it better
            setup_pytorch_for_mpi()  # for good: from here on the learners alone change torch's number of threads
    share, ranks = (Ranks(), mpi_util.nworkers) if run.average else (ALONE, 1)
    threads = max(1, mpi_util.usable_cores() // ranks)
    training = Training(run.config, run.spec, run.actor.params, run.scaler, run.control, share, threads)
    is_root = mpi_util.rank == 0
    return training, Record(run.config, run.spec, mpi_util.nworkers, training.resumed) if is_root else None


def build_logger(run: Run) -> EpochLogger:
    """The logger of progress.txt and config.json, which rank 0 writes."""
    if run.record is None:
        return EpochLogger()
    keep_rows = int(run.control["iteration"][0]) if run.config.resume else None
    logger = EpochLogger(run.record.folder.path, show=run.record.show, keep_rows=keep_rows)
    logger.save_config(run.record.settings)
    return logger


def all_or_none(build: Callable[[], Any]) -> Any:
    """Collective: `build()` on every rank; if it fails on any, one line says why and all end with status 2."""
    result, problem = None, None
    try:
        result = build()
    except (ValueError, OSError, mpi_util.UsageError) as error:
        problem = str(error)
    except ImportError as error:
        problem = f"{error}; install what train.py needs: pip install -e '.[train]'"
    problems = [p for p in mpi_util.all_accum_batches([problem]) if p]
    if problems:
        if mpi_util.rank == 0:
            print(f"train.py: {problems[0]}", file=sys.stderr)
        sys.exit(2)
    return result


class Ranks:
    """All ranks learn in step, each from its own rollouts; see policies.share.Alone."""

    def __init__(self) -> None:
        self.n_learners, self.index = mpi_util.nworkers, mpi_util.rank

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Collective: `x` becomes its sum over the ranks."""
        add("update", lambda: {"sum": x})
        return x


def gather(
    batches: list[dict], places: list[int], spec: Spec, stop: mpi_util.StopRequest
) -> tuple[dict | None, Part | None, np.ndarray]:
    """Collective: all ranks' batches on rank 0.

    Returns:
        (batch, which rows of it are here, the work in it as in Runner's batches), on rank 0; (None, None, zeros)
        elsewhere, and if the run is to stop.
    """
    batch = mpi_util.rank0_accum_batches(batches, index=places)
    if mpi_util.rank or stop:
        return None, None, np.zeros(3)
    return batch, Part.whole(len(batch["observes"])), batch["work"].sum(axis=0)


def share_out(
    batches: list[dict], places: list[int], spec: Spec, stop: mpi_util.StopRequest
) -> tuple[dict | None, Part | None, np.ndarray]:
    """Collective: `gather`'s twin, but each rank keeps its own rows; all learn which rows of the whole these are."""
    if mpi_util.all_sum(bool(stop)):
        return None, None, np.zeros(3)
    notes = [{"rows": len(b["observes"]), "rank": mpi_util.rank, "work": b["work"]} for b in batches]
    notes = mpi_util.all_accum_batches(notes, index=places)
    ends = np.cumsum(notes["rows"])
    own = [np.arange(end - n, end) for end, n, k in zip(ends, notes["rows"], notes["rank"]) if k == mpi_util.rank]
    in_order = [batches[i] for i in np.argsort(places)] or [empty_batch(spec)]
    batch = {key: np.concatenate([b[key] for b in in_order]) for key in in_order[0]}
    return batch, Part(np.concatenate([*own, np.empty(0, int)]), int(ends[-1])), notes["work"].sum(axis=0)


def advise(run: Run, advice: Advice, seconds: dict[str, float], work: np.ndarray, part: Part | None) -> str:
    """Collective: what the times of this iteration say about --nprocs and --parallel, on rank 0; or "".

    Args:
        seconds: of this iteration's phases. work, part: as `gather` gives them.
    """
    exchange_s = 0.0
    if advice.needs_exchange:
        flat = np.zeros(sum(array.size for array in run.actor.params.values()), np.float32)
        exchange_s = timed(lambda: add("advice", lambda: {"grad": flat}))
    cost = run.training.cost if run.training is not None else (0, 1)
    return advice.after(seconds, tuple(work), part.total if part is not None else 0, cost, exchange_s)


def report(
    run: Run, batch: dict[str, np.ndarray] | None, tests: dict[str, np.ndarray], columns: dict[str, float]
) -> None:
    """Collective: a row of progress.txt; and what the tests say goes on record.

    Args:
        batch: what this rank learned from, if it did.
        tests: ep_ret, ep_len of the episodes with the most likely actions, on rank 0, if there were any.
        columns: of what the learners log, and of the times; rank 0's count.
    """
    logger = run.logger
    if batch is not None:
        logger.store(EpRet=batch["ep_ret"], EpLen=batch["ep_len"])
    if tests:
        logger.store(TestEpRet=tests["ep_ret"], TestEpLen=tests["ep_len"])
    for column, key in (("Iteration", "iteration"), ("Episodes", "episodes"), ("TotalEnvInteracts", "steps")):
        logger.log_tabular(column, run.control[key][0])
    logger.log_tabular("EpRet", with_min_and_max=True)
    logger.log_tabular("EpLen", average_only=True)
    for column, value in columns.items():
        logger.log_tabular(column, value)
    if run.config.eval_every:
        logger.log_tabular("TestEpRet", with_min_and_max=True)
        logger.log_tabular("TestEpLen", average_only=True)
    logger.dump_tabular()
    if run.record is not None:
        run.record.keep_best(run.actor.params | run.scaler.arrays)


def save(run: Run) -> None:
    """Collective among the ranks that learn: rank 0 writes a checkpoint."""
    if run.training is not None:
        arrays, scalars = run.training.state()
        if run.record is not None:
            run.logger.sync()  # the rows that the checkpoint counts on
            run.record.save(run.actor.params | run.scaler.arrays, arrays, scalars)


def collector(run: Run) -> Callable[[], tuple[list, list]]:
    """Collects an iteration's share of this rank. Returns a function: () -> (batches, their places)."""
    runners = {e: make_runner(run, env) for e, env in run.envs.items()}
    return segments(run, runners) if run.config.batch_steps else episodes(run, runners[0])


def make_runner(run: Run, env: Any, greedy: bool = False) -> Runner:
    """Lets the run's policy act in an environment; greedy: with its most likely actions."""
    config, rew_scale = run.config, run.control["rew_scale"]
    return Runner(env, run.actor, run.scaler, rew_scale, config.seed, config.gamma, config.lam, greedy=greedy)


def episodes(run: Run, runner: Runner) -> Callable[[], tuple[list, list]]:
    """Collects whole episodes, dealt to whichever rank is free. Returns a function: () -> (batches, their places).

    Where every rank learns from its own, they are dealt in turn: who is free first must not decide what a rank learns.
    """
    config = run.config

    def collect() -> tuple[list, list]:
        first = int(run.control["episodes"][0])
        left = config.num_episodes - first if config.num_episodes else config.batch_size
        return whole_episodes(runner, min(config.batch_size, left), (), first, run.stop, run.average)

    return collect


def segments(run: Run, runners: dict[int, Runner]) -> Callable[[], tuple[list, list]]:
    """Collects a segment of each environment. Returns a function: () -> (batches, their places)."""
    n_steps = run.config.batch_steps // run.config.num_envs
    # a resumed run begins new episodes; an environment has ended at most one per step so far
    ours = Segments(runners, first=n_steps * int(run.control["iteration"][0]))
    return lambda: ours.collect(n_steps, lambda: bool(run.stop))


def trial(run: Run) -> Callable[[], dict]:
    """Tries the policy with its most likely actions. Returns a function: () -> on rank 0 what came of all episodes."""
    config = run.config
    if not config.eval_every:
        return dict
    runner = make_runner(run, make_env(config.env, config.env_arguments, quiet=True), greedy=True)

    def play() -> dict:
        run.actor.refresh()
        number = (int(run.control["iteration"][0]),)
        batches, places = whole_episodes(runner, config.eval_episodes, number, 0, run.stop)
        results = [{key: batch[key] for key in ("ep_ret", "ep_len")} for batch in batches]
        results = mpi_util.rank0_accum_batches(results, index=places)
        return results if mpi_util.rank == 0 and not run.stop else {}

    return play


def whole_episodes(
    runner: Runner, n: int, number: tuple[int, ...], first: int, stop: mpi_util.StopRequest, in_turn: bool = False
) -> tuple[list[dict], list[int]]:
    """Collective: episodes (*number, first) to (*number, first + n - 1), dealt to whichever rank is free, or in turn.

    Returns:
        (batches of this rank's episodes, the place of each among the n).
    """
    deal = mpi_util.deal(n)
    stop.then = deal.close
    if stop:
        deal.close()

    def give_up() -> bool:
        deal.serve()
        return deal.closed

    batches, places = [], []
    for i in range(mpi_util.rank, n, mpi_util.nworkers) if in_turn else deal:
        runner.start(*number, first + i)
        with mpi_util.during("rollout", episode=first + i):
            batch, _ = runner.run(stop=give_up)
        if batch is None:
            break
        batches.append(batch)
        places.append(i)
    return batches, places


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FloatingPointError, OSError) as error:  # a reward or a gradient is not finite; the disk is full
        mpi_util.fail(f"train.py: {error}")
    except TooFewRows as error:
        mpi_util.fail(f"train.py: {error}", status=2)
    except mpi_util.LaunchError as error:
        sys.exit(f"train.py: {error}")
