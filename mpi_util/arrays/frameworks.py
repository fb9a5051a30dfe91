"""Loads torch, TensorFlow and their kin when they are needed, or says what to install."""

import importlib
import sys
from typing import Any

from ..errors import MissingFrameworkError

_EXTRAS = {"torch": ("PyTorch", "torch"), "tensorflow": ("TensorFlow", "tf"), "keras": ("Keras", "tf")}
_EXTRAS |= {"tensordict": ("TensorDict", "torchrl"), "torchrl": ("TorchRL", "torchrl")}
_EXTRAS |= {"gymnasium": ("Gymnasium", "mujoco"), "matplotlib": ("matplotlib", "plot")}


def framework(module: str) -> Any:
    """The framework's module: "torch", "tensorflow", "keras", "tensordict", "torchrl", "gymnasium" or "matplotlib".

    Raises:
        MissingFrameworkError: it is not installed.
    """
    try:
        return sys.modules.get(module) or importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        name, extra = _EXTRAS[module]
        message = f"this needs {name}, which is not installed: pip install 'mpi_util[{extra}]'"
        raise MissingFrameworkError(message) from None
