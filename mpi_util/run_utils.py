"""Spinning Up's tools to run experiments, under their own names: `spinup.utils.run_utils` becomes `mpi_util.run_utils`.

Each run is a subprocess, which starts its ranks. Functions are pickled by name; with cloudpickle installed also those
that have none (lambdas, functions within functions).
"""

from .runs.experiment import setup_logger_kwargs
from .runs.grid import ExperimentGrid, call_experiment, valid_str
from .runs.schedule import ExperimentError, Result

__all__ = ["ExperimentError", "ExperimentGrid", "Result", "call_experiment", "setup_logger_kwargs", "valid_str"]
