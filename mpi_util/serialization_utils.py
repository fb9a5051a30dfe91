"""Spinning Up's name for it: `spinup.utils.serialization_utils` becomes `mpi_util.serialization_utils`."""

from .runs.to_json import convert_json

__all__ = ["convert_json"]
