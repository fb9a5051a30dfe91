"""Keras 3 in every rank, on any of its backends: layers and models, optimizers, metrics, and single variables."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ...errors import BatchError, WeightsError
from ..layout import Slot
from . import adapter_for, framework, value_slot, weight_name


def _of_backend(name: str) -> Callable[..., Any]:
    """The function of this name of the backend's adapter, for the tensor that it keeps for a variable."""

    def function(*arguments: Any, **numbers: bool) -> Any:
        *before, variable = arguments
        if not isinstance(variable, framework("keras").Variable):
            raise BatchError(f"is a {type(variable).__name__}, which has no values")
        return getattr(adapter_for(variable.value), name)(*before, variable.value, **numbers)

    return function


to_array, token = _of_backend("to_array"), _of_backend("token")
from_array, from_numbers = _of_backend("from_array"), _of_backend("from_numbers")


def slots(model: Any) -> list[Slot]:
    """Weights of a layer or model (BatchNorm's statistics too), or all variables of an optimizer or a metric."""
    keras = framework("keras")
    if isinstance(model, keras.Variable):
        return [tensor_slot("variable", model)]
    name = type(model).__name__
    if isinstance(model, keras.Layer):
        variables = model.weights
        if not variables and not model.built:
            raise WeightsError(f"{name} has no weights yet: call build(input_shape), or the model once, on every rank")
    elif isinstance(model, keras.optimizers.Optimizer):
        variables = model.variables
        if not model.built:
            wrong = "has no state yet: call build(model.trainable_variables), or take a step, on every rank"
            raise WeightsError(f"{name} {wrong}")
    elif isinstance(model, keras.Metric):
        variables = model.variables
    else:
        raise WeightsError(f"no weights found in a {name}; give a model, a layer, an optimizer or variables")
    return [tensor_slot(weight_name(i, variable.path), variable) for i, variable in enumerate(variables)]


def parts(model: Any) -> list[tuple[str, Any, Any]]:
    """(name, layer, names of what every layer and model has) of a model's layers."""
    layers = model._flatten_layers() if isinstance(model, framework("keras").Layer) else ()
    return [(weight_name(i, layer.name), layer, _names_of_any()) for i, layer in enumerate(layers)]


_names_of_any = cache(lambda: {*vars(framework("keras").Model(name="any"))})


def tensor_slot(name: str, variable: Any) -> Slot:
    """The slot of one variable: that of the tensor which the backend keeps for it, if that can be written in place."""
    if not isinstance(variable, framework("keras").Variable):
        raise WeightsError(f"'{name}' is a {type(variable).__name__}; only variables can be written in place")
    make = getattr(adapter_for(variable.value), "tensor_slot", None)
    return api_slot(name, variable) if make is None else make(name, variable.value)


def api_slot(name: str, variable: Any) -> Slot:
    """The slot of a variable whose backend (JAX, NumPy) replaces its tensor at each change."""
    keras = framework("keras")
    values: Any = keras.ops.convert_to_numpy(variable)
    read = partial(keras.ops.convert_to_numpy, variable)
    # a copy: the backend may keep the array that it is given
    return value_slot(name, values.dtype, values.shape, read, lambda new: variable.assign(new.copy()))
