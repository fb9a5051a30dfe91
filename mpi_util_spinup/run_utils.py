"""Spinning Up's tools for experiments under their own names."""

from .experiment import DEFAULT_DATA_DIR, ExperimentError, Result, setup_logger_kwargs
from .grid import ExperimentGrid, all_bools, call_experiment, valid_str

# what is not asked for in Spinning Up's user_config either, or is not waited for here
FORCE_DATESTAMP, DEFAULT_SHORTHAND, WAIT_BEFORE_LAUNCH = False, True, 0

__all__ = [
    "DEFAULT_DATA_DIR", "DEFAULT_SHORTHAND", "FORCE_DATESTAMP", "WAIT_BEFORE_LAUNCH", "ExperimentError",
    "ExperimentGrid", "Result", "all_bools", "call_experiment", "setup_logger_kwargs", "valid_str",
]  # fmt: skip
