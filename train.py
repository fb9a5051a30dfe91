"""Train a policy on N processes: all collect rollouts, rank 0 alone updates, the weights go back to all.

    python train.py Humanoid-v4 --nprocs 10
    python train.py InvertedPendulum-v4 --nprocs 2 -n 500
    python train.py Humanoid-v4 --nprocs 2 --batch_steps 4000 --num_envs 20
    python train.py Hopper-v4 --nprocs 2 --algo trpo --framework tf
    python train.py Hopper-v4 --nprocs 2 --parallel average
    python train.py --resume runs/Humanoid-v4/20260101-120000-s0

For one seed and configuration the result has the same bits for every --nprocs. See --help.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import mpi_util
from mpi_util.averaging import add
from mpi_util.logx import EpochLogger
from policies import config as configuration
from policies.actor import Actor, Spec, init_params, parse_hid_list
from policies.advice import Advice, timed
from policies.config import Config
from policies.minibatches import TooFewRows
from policies.rollout import Runner, Segments, action_map, empty_batch, make_env
from policies.scaler import Scaler
from policies.share import ALONE, Part

PARAMS_STREAM = 0
DROPPED = 2  # value of control["stop"]: end, and this iteration counts for nothing
CONTROL = ("stop", "evaluate", "save", "iteration", "episodes", "steps")


def main() -> int:
    """The whole run. Returns the exit status."""
    config = configuration.parse()
    if mpi_util.mpi_fork(config.nprocs) == "parent":
        return 0
    is_root = mpi_util.rank == 0
    average = config.parallel == "average" and mpi_util.nworkers > 1
    threadpool_limits(1, user_api="blas")  # a rollout's bits, and its speed on shared cores, need NumPy on one thread
    stop = mpi_util.StopRequest()

    envs, spec = all_or_none(lambda: build_envs(config))
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(PARAMS_STREAM,)))
    actor, scaler = Actor(spec, init_params(spec, rng, config.log_std)), Scaler(spec.obs_dim)
    control = {name: np.zeros(1, np.int64) for name in CONTROL} | {"rew_scale": np.array([config.first_rew_scale])}
    learns = is_root or average
    training, record = all_or_none(
        lambda: build_training(config, spec, actor, scaler, control, average) if learns else (None, None)
    )
    logger = all_or_none(lambda: build_logger(config, record, control))
    weights = actor.params | scaler.arrays | control
    mpi_util.rank0_bcast_wts(weights)
    if not config.resume:
        save(training, record, logger)
    if is_root:
        record.announce()

    made = (actor, scaler, control["rew_scale"], config.seed, config.gamma, config.lam)
    runners = {e: Runner(env, *made) for e, env in envs.items()}
    if config.batch_steps:
        collect = segments(config, runners, control, stop)
    else:
        collect = episodes(config, runners[0], control, stop, average)
    pool = share_out if average else gather
    evaluate = trial(config, actor, scaler, control, stop)
    phases, advice, log = mpi_util.Phases(), Advice(config.parallel, mpi_util.nworkers, mpi_util.usable_cores()), {}
    while not control["stop"][0]:
        actor.refresh()
        if is_root:
            record.display.doing(f"iteration {control['iteration'][0] + 1}: collecting")
        with phases("rollout"):
            batches, places = collect()
        with phases("gather"):
            batch, part, work_s = pool(batches, places, spec, stop)
        with phases("update"):
            if batch is not None:
                log = training.learn(batch, part)
            elif is_root:
                control["stop"][0] = DROPPED
            if is_root:
                control["save"][0] = record.due()
        with phases("bcast"):
            mpi_util.rank0_bcast_wts(weights)
        if control["stop"][0] == DROPPED:
            break
        with phases("evaluate"):
            tests = evaluate() if control["evaluate"][0] else {}
        seconds = phases.take()
        times = record.times(part.total, seconds, work_s[0]) if is_root else {}
        write_row(logger, config, control, batch, tests, log | times)
        if is_root:
            record.tried(tests, actor.params | scaler.arrays)
        exchange_s = time_exchange(actor.params) if advice.needs_exchange else 0.0
        said = advice.after(seconds, work_s, training.cost if learns else (0.0, 0), exchange_s)
        if is_root:
            record.display.say(said)
        if control["save"][0]:
            save(training, record, logger)
    save(training, record, logger)
    if is_root:
        record.finish("stopped" if stop else "done", int(control["iteration"][0]), int(control["steps"][0]))
    return stop.status


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
    policy_hid = parse_hid_list(config.policy_hid_list, obs_dim, act_dim, "policy")
    valfunc_hid = parse_hid_list(config.valfunc_hid_list, obs_dim, act_dim, "value")
    return envs, Spec(obs_dim, act_dim, discrete, policy_hid, valfunc_hid)


def build_training(
    config: Config, spec: Spec, actor: Actor, scaler: Scaler, control: dict[str, np.ndarray], average: bool
) -> tuple[Any, Any]:
    """The learners of this rank, and on rank 0 the run's record."""
    from policies.record import Record  # here, because of what they load, which ranks that only collect never do
    from policies.training import Training

    share, ranks = (Ranks(), mpi_util.nworkers) if average else (ALONE, 1)
    threads = max(1, mpi_util.usable_cores() // ranks)
    training = Training(config, spec, actor.params, scaler, control, share, threads)
    return training, Record(config, spec, mpi_util.nworkers, training.resumed) if mpi_util.rank == 0 else None


def build_logger(config: Config, record: Any, control: dict[str, np.ndarray]) -> EpochLogger:
    """The logger of progress.txt and config.json, which rank 0 writes."""
    if record is None:
        return EpochLogger()
    keep_rows = int(control["iteration"][0]) if config.resume else None
    logger = EpochLogger(record.folder.path, show=record.display.row, keep_rows=keep_rows)
    logger.save_config(record.settings)
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
        (batch, which rows of it are here, seconds of work in it as in Runner's batches), on rank 0; (None, None, zeros)
        elsewhere, and if the run is to stop.
    """
    batch = mpi_util.rank0_accum_batches(batches, index=places)
    if mpi_util.rank or stop:
        return None, None, np.zeros(3)
    return batch, Part.whole(len(batch["observes"])), batch["work_s"].sum(axis=0)


def share_out(
    batches: list[dict], places: list[int], spec: Spec, stop: mpi_util.StopRequest
) -> tuple[dict | None, Part | None, np.ndarray]:
    """Collective: `gather`'s twin, but each rank keeps its own rows; all learn which rows of the whole these are."""
    if mpi_util.all_sum(bool(stop)):
        return None, None, np.zeros(3)
    notes = [{"rows": len(b["observes"]), "rank": mpi_util.rank, "work_s": b["work_s"]} for b in batches]
    notes = mpi_util.all_accum_batches(notes, index=places)
    ends = np.cumsum(notes["rows"])
    own = [np.arange(end - n, end) for end, n, k in zip(ends, notes["rows"], notes["rank"]) if k == mpi_util.rank]
    in_order = [batches[i] for i in np.argsort(places)] or [empty_batch(spec)]
    batch = {key: np.concatenate([b[key] for b in in_order]) for key in in_order[0]}
    return batch, Part(np.concatenate([*own, np.empty(0, int)]), int(ends[-1])), notes["work_s"].sum(axis=0)


def time_exchange(params: dict[str, np.ndarray]) -> float:
    """Collective: seconds that an exchange of gradients takes among the ranks."""
    flat = np.zeros(sum(array.size for array in params.values()), np.float32)
    return timed(lambda: add("advice", lambda: {"grad": flat}))


def write_row(
    logger: EpochLogger,
    config: Config,
    control: dict[str, np.ndarray],
    batch: dict[str, np.ndarray] | None,
    tests: dict[str, np.ndarray],
    columns: dict[str, float],
) -> None:
    """Collective: a row of progress.txt.

    Args:
        batch: what this rank learned from, if it did.
        tests: ep_ret, ep_len of the episodes with the most likely actions, on rank 0, if there were any.
        columns: of what the learners log, and of the times; rank 0's count.
    """
    if batch is not None:
        logger.store(EpRet=batch["ep_ret"], EpLen=batch["ep_len"])
    if tests:
        logger.store(TestEpRet=tests["ep_ret"], TestEpLen=tests["ep_len"])
    for column, key in (("Iteration", "iteration"), ("Episodes", "episodes"), ("TotalEnvInteracts", "steps")):
        logger.log_tabular(column, control[key][0])
    logger.log_tabular("EpRet", with_min_and_max=True)
    logger.log_tabular("EpLen", average_only=True)
    for column, value in columns.items():
        logger.log_tabular(column, value)
    if config.eval_every:
        logger.log_tabular("TestEpRet", with_min_and_max=True)
        logger.log_tabular("TestEpLen", average_only=True)
    logger.dump_tabular()


def save(training: Any, record: Any, logger: EpochLogger) -> None:
    """Collective among the ranks that learn: rank 0 writes a checkpoint."""
    if training is not None:
        arrays, scalars = training.state()
        if record is not None:
            logger.sync()  # the rows that the checkpoint counts on
            record.save(training.params | training.scaler.arrays, arrays, scalars)


def episodes(
    config: Config, runner: Runner, control: dict[str, np.ndarray], stop: mpi_util.StopRequest, average: bool
) -> Callable[[], tuple[list, list]]:
    """Collects whole episodes, dealt to whichever rank is free. Returns a function: () -> (batches, their places).

    Where every rank learns from its own, they are dealt in turn: who is free first must not decide what a rank learns.
    """

    def collect() -> tuple[list, list]:
        first = int(control["episodes"][0])
        left = config.num_episodes - first if config.num_episodes else config.batch_size
        return whole_episodes(runner, min(config.batch_size, left), (), first, stop, average)

    return collect


def trial(
    config: Config, actor: Actor, scaler: Scaler, control: dict[str, np.ndarray], stop: mpi_util.StopRequest
) -> Callable[[], dict]:
    """Tries the policy with its most likely actions. Returns a function: () -> on rank 0 what came of all episodes."""
    if not config.eval_every:
        return dict
    env = make_env(config.env, config.env_arguments, quiet=True)
    runner = Runner(env, actor, scaler, control["rew_scale"], config.seed, config.gamma, config.lam, greedy=True)

    def play() -> dict:
        actor.refresh()
        number = (int(control["iteration"][0]),)
        batches, places = whole_episodes(runner, config.eval_episodes, number, 0, stop)
        results = [{key: batch[key] for key in ("ep_ret", "ep_len")} for batch in batches]
        results = mpi_util.rank0_accum_batches(results, index=places)
        return results if mpi_util.rank == 0 and not stop else {}

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


def segments(
    config: Config, runners: dict[int, Runner], control: dict[str, np.ndarray], stop: mpi_util.StopRequest
) -> Callable[[], tuple[list, list]]:
    """Collects a segment of each environment. Returns a function: () -> (batches, their places)."""
    n_steps = config.batch_steps // config.num_envs
    # a resumed run begins new episodes; an environment has ended at most one per step so far
    ours = Segments(runners, first=n_steps * int(control["iteration"][0]))
    return lambda: ours.collect(n_steps, lambda: bool(stop))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FloatingPointError, OSError) as error:  # a reward or a gradient is not finite; the disk is full
        mpi_util.fail(f"train.py: {error}")
    except TooFewRows as error:
        mpi_util.fail(f"train.py: {error}", status=2)
    except mpi_util.LaunchError as error:
        sys.exit(f"train.py: {error}")
