"""Spinning Up's tools for experiments under their own names: `spinup.utils.run_utils` becomes `mpi_util.run_utils`."""

from .runs.experiment import ExperimentError, Result, setup_logger_kwargs
from .runs.grid import ExperimentGrid, call_experiment, valid_str

__all__ = ["ExperimentError", "ExperimentGrid", "Result", "call_experiment", "setup_logger_kwargs", "valid_str"]
