"""Train a policy on N processes: all collect rollouts, rank 0 alone updates, the weights go back to all.

    python train.py Humanoid-v4 --nprocs 10
    python train.py InvertedPendulum-v4 --nprocs 2 -n 500
    python train.py Humanoid-v4 --nprocs 2 --batch_steps 4000 --num_envs 20
    python train.py Hopper-v4 --nprocs 2 --algo trpo --framework tf
    python train.py Hopper-v4 --nprocs 2 --parallel average
    python train.py Humanoid-v4 --hosts h1:10,h2:10
    python train.py --resume runs/Humanoid-v4/20260101-120000-s0

For one seed and configuration the result has the same bits for every --nprocs. See --help.
"""

import gc
import io
import os
import signal
import sys

if __name__ == "__main__":  # the imports take a second, in which Ctrl-C and SIGTERM end it without a traceback
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as in a background job of a script
            signal.signal(signum, lambda signum, _: os._exit(128 + signum))

import mpi_util
from trainer.command_line import parse
from trainer.config import LAUNCH
from trainer.control import DROPPED, BadData
from trainer.environment import make_env
from trainer.run import set_up


def main() -> int:
    """One run, on every rank. Returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # where it takes ASCII alone, a folder's name may not be
    options = {word.split("=")[0] for word in sys.argv}
    if "--watch" in options:
        from trainer.play import main as watch

        return watch()
    if "--seeds" in options:
        from trainer.seeds import several_seeds

        return several_seeds(sys.argv[0], sys.argv[1:])
    config = parse()
    launch = {name: getattr(config, name) for name in LAUNCH}
    if config.nprocs > mpi_util.nworkers and os.isatty(1):  # their imports take seconds, on few cores
        print(f"{config.env}: starting {config.nprocs} processes", flush=True)
    if mpi_util.mpi_fork(config.nprocs, **launch) == "parent":
        return 0
    if mpi_util.rank >= mpi_util.nworkers:  # of an environment of several ranks this one is not the first
        make_env(config, quiet=True)  # does not return
    config = config.again(mpi_util.last_saved)
    is_root = mpi_util.rank == 0

    # Environments and actor on every rank; learners on rank 0, or on all that learn; run folder and screen on rank 0.
    run = set_up(config)
    control, record, weights = run.control, run.record, run.weights
    mpi_util.rank0_bcast_wts(weights)
    collector, evaluator = run.collector(), run.evaluator()
    if not config.resume:
        run.save(collector)
    if is_root:
        record.announce(control.steps, control.episodes, control.ended)
    phases = mpi_util.Phases()
    if control.evaluate:  # the run was stopped before it had evaluated the policy
        with mpi_util.during("evaluate"):
            run.evaluate_owed(evaluator)

    while not control.ended:
        run.actor.refresh()
        updates = control.iteration
        if config.overlap:  # rank 0 updates on what the last iteration has collected, while the others collect
            log, data = run.learn(phases)
            run.collect(collector, phases)
        else:
            run.collect(collector, phases)
            log, data = run.learn(phases)
        with phases("bcast"):
            run.publish()
            mpi_util.rank0_bcast_wts(weights)
        if control.stop == DROPPED:
            break
        with phases("evaluate"):
            run.doing("evaluating" if control.evaluate else "")
            tests = evaluator.evaluate() if evaluator and control.iteration > updates else {}
        seconds = phases.take()
        with phases("record"):
            if control.iteration > updates:  # not so in the first iteration with --overlap
                run.report(data, tests, log, seconds)
            if control.save:
                run.save(collector)

    if config.eval_async and evaluator and (tests := evaluator.evaluate()):
        run.report_late(tests)
    run.save(collector)
    if is_root:
        record.finish("stopped" if run.stop else "done", control.iteration, control.steps, not run.logger.unsaved)
    for runner in run.runners:
        runner.close()
    return run.stop.status


def run() -> int:
    """`main`, where data that are unfit or a failed start end with one line. Returns the exit status."""
    try:
        status = main()
        gc.collect()  # environments are in cycles, and ale_py complains of what is left when Python ends
        return status
    except BadData as error:
        mpi_util.fail(f"train.py: {error}")
    except mpi_util.LaunchError as error:
        if not error.silent:
            print(f"train.py: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(run())
