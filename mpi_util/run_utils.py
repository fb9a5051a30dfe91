"""Spinning Up's tools to run experiments, under their own names: `spinup.utils.run_utils` becomes `mpi_util.run_utils`.

Each run is a subprocess, which starts its ranks. Functions travel by their names, and with cloudpickle, if that is
installed, also those that have none (lambdas, functions within functions).
"""

import json
import os
from collections.abc import Callable
from typing import Any

from .launch import failure
from .runs import schedule
from .runs.experiment import Experiment, setup_logger_kwargs
from .runs.grid import ExperimentError, ExperimentGrid, valid_str
from .runs.schedule import Result

__all__ = [
    "ExperimentError",
    "ExperimentGrid",
    "Result",
    "call_experiment",
    "setup_logger_kwargs",
    "valid_str",
]


def call_experiment(
    exp_name: str,
    thunk: Callable[..., object],
    seed: int = 0,
    num_cpu: int | str = 1,
    data_dir: str | os.PathLike[str] | None = None,
    datestamp: bool = False,
    **kwargs: Any,
) -> Result:
    """Runs `thunk(logger_kwargs=..., seed=seed, **kwargs)` in a subprocess, on `num_cpu` ranks, and waits for it.

    Args:
        exp_name: name of the experiment.
        thunk: function, defined at the top of a module or of the script. A script must start its experiments under
            `if __name__ == "__main__":`. Other functions need cloudpickle, with which no script needs that.
        seed: for the function, and for the name of the run's folder.
        num_cpu: number of ranks; "auto": one for each core that we may use.
        data_dir, datestamp: as for `setup_logger_kwargs`, whose result is passed as `logger_kwargs` if that is not
            among the arguments.
        kwargs: of the function. `env_name` is not passed on: it becomes `env_fn`, a function that makes that Gymnasium
            environment.

    Returns:
        The run's name, seconds and folder.

    Raises:
        ExperimentError: the run failed; its report has been printed.
        UsageError: before it ran: a bad `num_cpu`, what cannot be pickled.
        SystemExit: with 128 + the signal's number, after Ctrl-C, SIGTERM or SIGHUP has stopped the run.
    """
    failure.install()
    experiment = Experiment(exp_name, thunk, seed, num_cpu, data_dir, datestamp, kwargs)
    print(f"{experiment.name}: {json.dumps(experiment.config, indent=4, sort_keys=True)}")
    (result,), signum = schedule.run_all([experiment])
    if signum:
        raise SystemExit(128 + signum)
    if result.status == "failed":
        raise ExperimentError(f"experiment {result.name} failed with status {result.code}", [result])
    return result
