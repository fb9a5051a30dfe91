"""Spinning Up's name for it: `spinup.utils.serialization_utils` becomes `mpi_util.serialization_utils`."""

from .runs.to_json import convert_json, is_json_serializable

__all__ = ["convert_json", "is_json_serializable"]
