"""TensorFlow in every rank: tensors, variables, and modules that hold variables."""

from typing import Any

import numpy as np

from ...errors import BatchError, WeightsError
from ...host.segments import ALIGN
from ..layout import Slot
from . import as_bits, as_numbers, framework, is_extension, value_slot, weight_name


def to_array(leaf: Any, numbers: bool = False) -> np.ndarray:
    """The values in host memory, a view where possible; of a dtype that NumPy lacks bits, or float32 as `numbers`."""
    return as_numbers(_values(leaf)) if numbers else as_bits(_values(leaf))


def from_array(array: np.ndarray, like: Any) -> Any:
    """A CPU tensor over `array`'s memory if TensorFlow can use it as it lies, else a copy."""
    tf = framework("tensorflow")
    aligned = array.ctypes.data % ALIGN == 0  # TensorFlow's kernels rely on it
    shareable = aligned and array.flags.c_contiguous and array.flags.writeable and array.dtype != bool
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__()) if shareable else tf.constant(array)
    dtype = getattr(like, "dtype", like)  # or `like` is the token of a tensor
    return tf.bitcast(tensor, dtype) if is_extension(np.dtype(dtype.as_numpy_dtype)) else tensor


def from_numbers(array: np.ndarray, like: Any) -> Any:
    """A tensor with these values on `like`'s device, of its dtype where NumPy lacks that."""
    tf = framework("tensorflow")
    numpy_dtype = np.dtype(like.dtype.as_numpy_dtype)
    with tf.device(like.device):
        return tf.constant(np.asarray(array, numpy_dtype if is_extension(numpy_dtype) else None))


def token(leaf: Any) -> Any:
    """The dtype stands for the tensor."""
    return leaf.dtype


def slots(model: Any) -> list[Slot]:
    """The variable itself, or all variables of a tf.Module."""
    tf = framework("tensorflow")
    if isinstance(model, (tf.Variable, tf.Tensor)):
        return [tensor_slot("variable", model)]
    if isinstance(model, tf.Module):
        return [tensor_slot(weight_name(i, v.name), v) for i, v in enumerate(model.variables)]
    known = "a Keras model or optimizer, a tf.Module, a dict or list of tf.Variable, or a tf.compat.v1 session"
    raise WeightsError(f"no weights found in a {type(model).__name__}; give {known} and its graph")


def parts(model: Any) -> list[tuple[str, Any, Any]]:
    """(class, module, ()) of a tf.Module and those in it."""
    modules = (model, *model.submodules) if isinstance(model, framework("tensorflow").Module) else ()
    return [(type(part).__name__, part, ()) for part in modules]


def tensor_slot(name: str, variable: Any) -> Slot:
    """The slot of one variable, on whatever device it lives."""
    tf = framework("tensorflow")
    if not isinstance(variable, tf.Variable):
        raise WeightsError(f"'{name}' is a {type(variable).__name__}, not writable in place; use a tf.Variable")
    check_dtype(name, variable.dtype)
    now = variable.value()
    if tf.is_symbolic_tensor(now):
        wrong = "belongs to a graph; give the tf.compat.v1 session and graph; inside tf.function use mpi_tf"
        raise WeightsError(f"'{name}' {wrong}")
    dtype = np.dtype(variable.dtype.as_numpy_dtype)
    return value_slot(name, dtype, tuple(now.shape), lambda: _values(variable), variable.assign)


def check_dtype(name: str, dtype: Any) -> None:
    """Raises WeightsError unless a variable of this dtype holds numbers or booleans."""
    if dtype.is_quantized or not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        raise WeightsError(f"'{name}' is a {dtype.name} variable; weights are numbers or booleans")


def _values(leaf: Any) -> np.ndarray:
    tf = framework("tensorflow")
    tensor = leaf.value() if isinstance(leaf, tf.Variable) else leaf
    if not isinstance(tensor, tf.Tensor):
        raise BatchError(f"is a {type(leaf).__name__}; make it a dense tf.Tensor")
    if tf.is_symbolic_tensor(tensor):
        raise BatchError("is a tensor of a graph and has no values yet; call this outside of tf.function")
    if tensor.dtype == tf.string:
        raise BatchError("holds strings; make it a list of str")
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())  # of shape () it gives scalars only
