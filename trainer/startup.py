"""Builds what a run needs, on all ranks or on none: bad input ends the job with one line and status 2."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

import mpi_util
from mpi_util.logx import EpochLogger
from policies.actor import INIT_LOG_STD, Spec, parse_hid_list
from policies.scaler import scaler_for
from policies.share import ALONE
from trainer.config import Config
from trainer.control import Control
from trainer.environment import action_map, image_shape, make_env, make_shown_env
from trainer.rollout import networks
from trainer.run import Run
from trainer.sharing import Ranks

EXTRAS = {"torch": "torch", "tensorflow": "tf", "keras": "tf"}  # of --framework and --network, by module
PARAMS_STREAM = 0  # of the random streams of a run's seed; trainer.rollout has the others


def set_up(config: Config) -> Run:
    """Collective: this rank's part of the run, or the end of the job with one line that says what is wrong."""
    config = replace(config, nprocs=mpi_util.nworkers)  # where a launcher has started the processes, its number counts
    stop = mpi_util.StopRequest()
    mpi_util.watchdog(config.watchdog, config.watchdog_kill)
    average = config.parallel == "average" and mpi_util.nworkers > 1
    envs, spec = all_or_none(lambda: build_envs(config.check()))
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(PARAMS_STREAM,)))
    actor = all_or_none(lambda: networks(spec).Actor(spec, networks(spec).init_params(spec, rng, config.log_std)))
    run = Run(config, average, stop, envs, spec, actor, scaler_for(spec), Control(config.first_rew_scale))
    all_or_none(lambda: build_training(run))
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
    if discrete and config.log_std != INIT_LOG_STD:
        raise ValueError(f"--log_std has no effect with the discrete actions of {config.env}; leave it out")
    policy_hid = parse_hid_list(config.policy_hid_list, obs_dim, act_dim, "policy")
    valfunc_hid = parse_hid_list(config.valfunc_hid_list, obs_dim, act_dim, "value")
    image = image_shape(env, config)
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

    run.training = Training(run.config, run.spec, run.actor.params, Ranks() if run.average else ALONE)
    run.training.publish(run.weights)
    if is_root:
        keep_rows = run.control.iteration - run.control.evaluate if run.config.resume else None
        run.record = Record(run.config, run.spec, run.training.resumed | {"rows": keep_rows or 0})
        how = {"show": run.record.show, "keep_rows": keep_rows, "numbered_by": "Iteration"}
        run.logger = EpochLogger(run.record.folder.path, **how)
        run.logger.save_config(run.record.settings)
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
    problems = [p for p in mpi_util.all_accum_batches([problem]) if p]
    if problems:
        if mpi_util.rank == 0:
            print(f"train.py: {problems[0]}", file=sys.stderr)
        sys.exit(2)
    return result
