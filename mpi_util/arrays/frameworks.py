"""Loads torch, TensorFlow and their kin when they are needed, in any process, or says what to install."""

import importlib
import sys
from typing import Any

from ..errors import MissingFrameworkError

_NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras", "gymnasium": "Gymnasium"}
_PACKAGES = {"keras": "tensorflow", "gymnasium": "'gymnasium[mujoco]'"}


def framework(module: str) -> Any:
    """The framework's module: "torch", "tensorflow", "keras", "tensordict", "torchrl", "gymnasium" or "matplotlib".

    Raises MissingFrameworkError: it is not installed.
    """
    try:
        return sys.modules.get(module) or importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        name, package = _NAMES.get(module, module), _PACKAGES.get(module, module)
        raise MissingFrameworkError(f"this needs {name}, which is not installed: pip install {package}") from None
