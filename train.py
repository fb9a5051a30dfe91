"""Train a policy on N processes: all collect rollouts, rank 0 alone updates, the weights go back to all.

    python train.py Humanoid-v4 --nprocs 10
    python train.py InvertedPendulum-v4 --nprocs 2 -n 500
    python train.py Humanoid-v4 --nprocs 2 --batch_steps 4000 --num_envs 20
    python train.py --resume runs/Humanoid-v4/20260101-120000-s0

For one seed and configuration the result has the same bits for every --nprocs. See --help.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import mpi_util
from policies import config as configuration
from policies.actor import Actor, Spec, init_params, parse_hid_list
from policies.config import Config
from policies.rollout import Runner, Segments, action_map, make_env
from policies.scaler import Scaler

PARAMS_STREAM = 0


def main() -> int:
    """The whole run. Returns the exit status."""
    config = configuration.parse()
    if mpi_util.mpi_fork(config.nprocs) == "parent":
        return 0
    is_root = mpi_util.rank == 0
    threadpool_limits(1, user_api="blas")  # a rollout's bits, and its speed on shared cores, need NumPy on one thread
    stop = mpi_util.StopRequest()

    envs, spec = all_or_none(lambda: build_envs(config))
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(PARAMS_STREAM,)))
    actor, scaler = Actor(spec, init_params(spec, rng)), Scaler(spec.obs_dim)
    control = {name: np.zeros(1, np.int64) for name in ("stop", "evaluate", "iteration", "episodes", "steps")}
    training = all_or_none(lambda: build_training(config, spec, actor, scaler, control) if is_root else None)
    weights = actor.params | scaler.arrays | control
    mpi_util.rank0_bcast_wts(weights)

    runners = {e: Runner(env, actor, scaler, config.seed, config.gamma, config.lam) for e, env in envs.items()}
    if config.batch_steps:
        collect = segments(config, runners, control, stop)
    else:
        collect = episodes(config, runners[0], control, stop)
    evaluate = trial(config, actor, scaler, control, stop)
    phases = mpi_util.Phases()
    while not control["stop"][0]:
        actor.refresh()
        with phases("rollout"):
            batches, places = collect()
        with phases("gather"):
            batch = mpi_util.rank0_accum_batches(batches, index=places)
        with phases("update"):
            if is_root and stop:
                control["stop"][0] = 1  # this iteration is dropped
            elif is_root:
                training.learn(batch, phases.seconds["rollout"] + phases.seconds["gather"])
        with phases("bcast"):
            mpi_util.rank0_bcast_wts(weights)
        with phases("evaluate"):
            tests = evaluate() if control["evaluate"][0] else None
        if is_root:
            training.report(phases.take(), tests)
    if is_root:
        training.finish("stopped" if stop else "done")
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


def build_training(config: Config, spec: Spec, actor: Actor, scaler: Scaler, control: dict[str, np.ndarray]) -> Any:
    """Rank 0's learners and run folder."""
    from policies.training import Training  # here, because it loads torch, which the other ranks never do

    return Training(config, spec, actor.params, scaler, control, mpi_util.nworkers, mpi_util.usable_cores())


def all_or_none(build: Callable[[], Any]) -> Any:
    """Collective: `build()` on every rank; if it fails on any, one line says why and all end with status 2."""
    result, problem = None, None
    try:
        result = build()
    except (ValueError, OSError) as error:
        problem = str(error)
    except ImportError as error:
        problem = f"{error}; install what train.py needs: pip install -e '.[train]'"
    problems = [p for p in mpi_util.all_accum_batches([problem]) if p]
    if problems:
        if mpi_util.rank == 0:
            print(f"train.py: {problems[0]}", file=sys.stderr)
        sys.exit(2)
    return result


def episodes(
    config: Config, runner: Runner, control: dict[str, np.ndarray], stop: mpi_util.StopRequest
) -> Callable[[], tuple[list, list]]:
    """Collects whole episodes, dealt to whichever rank is free. Returns a function: () -> (batches, their places)."""

    def collect() -> tuple[list, list]:
        first = int(control["episodes"][0])
        left = config.num_episodes - first if config.num_episodes else config.batch_size
        return whole_episodes(runner, min(config.batch_size, left), (), first, stop)

    return collect


def trial(
    config: Config, actor: Actor, scaler: Scaler, control: dict[str, np.ndarray], stop: mpi_util.StopRequest
) -> Callable[[], dict | None]:
    """Tries the policy with its most likely actions. Returns a function: () -> on rank 0 what came of all episodes."""
    if not config.eval_every:
        return lambda: None
    env = make_env(config.env, config.env_arguments, quiet=True)
    runner = Runner(env, actor, scaler, config.seed, config.gamma, config.lam, greedy=True)

    def play() -> dict | None:
        actor.refresh()
        number = (int(control["iteration"][0]),)
        batches, places = whole_episodes(runner, config.eval_episodes, number, 0, stop)
        results = [{key: batch[key] for key in ("ep_ret", "ep_len")} for batch in batches]
        results = mpi_util.rank0_accum_batches(results, index=places)
        return None if stop else results

    return play


def whole_episodes(
    runner: Runner, n: int, number: tuple[int, ...], first: int, stop: mpi_util.StopRequest
) -> tuple[list[dict], list[int]]:
    """Collective: episodes (*number, first) to (*number, first + n - 1), dealt to whichever rank is free.

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
    for i in deal:
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
    except mpi_util.LaunchError as error:
        sys.exit(f"train.py: {error}")
