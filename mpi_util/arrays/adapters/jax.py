"""JAX in every rank: arrays, typed keys, registered pytrees (Flax, optax, Equinox), and Flax's nnx modules."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import BatchError, WeightsError
from .. import tree
from ..layout import Slot
from . import MODES, as_bits, as_numbers, framework, is_array, is_extension, is_model, named, value_slot
from . import slots as slots_of

_NUMBERS = {"int32", "int64", "float32", "float64", "complex64", "complex128"}  # which NumPy's numbers hold exactly


def to_array(leaf: Any, numbers: bool = False) -> np.ndarray:
    """The values in host memory, a view where possible; a key is one value."""
    return as_numbers(_values(leaf)) if numbers else as_bits(_values(leaf))


def from_array(array: np.ndarray, like: Any) -> Any:
    """An array on `like`'s device; on the CPU over `array`'s memory if XLA can use it as it lies, else a copy."""
    return _put(array if _is_key(like) else array.view(like.dtype), like)


def from_numbers(array: np.ndarray, like: Any) -> Any:
    """An array as `like` with these values. Its dtype is theirs, or `like`'s where NumPy lacks that."""
    array = np.asarray(array, like.dtype if is_extension(like.dtype) else None)
    with framework("jax").enable_x64(True):  # else float64 becomes float32
        weak = getattr(like, "weak_type", False) and array.dtype == like.dtype  # it decides the dtype of a product
        return like.at[...].set(array) if weak else _put(array, like)


def token(leaf: Any) -> Any:
    return leaf.reshape(-1)[:0]


def parts(model: Any) -> list[tuple[str, Any, Any]]:
    """(path, part, its variables, arrays and modes) of each part of a module of nnx."""
    nnx, found = sys.modules["flax.nnx"], []
    sent = nnx.Variable, framework("jax").Array
    for path, part in [pair for pair in nnx.iter_graph(model) if is_nnx(type(pair[1]))]:
        names = {k for k, x in vars(part).items() if isinstance(x, sent) or (k in MODES and isinstance(x, bool))}
        found.append((".".join(map(str, path)), part, names))
    return found


def slots(model: Any) -> list[Slot]:
    """The variables of a module or an optimizer of nnx, which is written in place."""
    if not is_nnx(type(model)):
        raise WeightsError(f"no weights found in a {type(model).__name__}; give a tree that holds jax arrays")
    box, (found, build) = dict[str, Any](), tree.jax_items(sys.modules["flax.nnx"].state(model))
    closers = [_open(path, value, box) for path, value in found]
    update: Any = lambda: sys.modules["flax.nnx"].update(model, build([close() for close in closers]))  # noqa: E731
    return [slot._replace(flush=update) for slot in slots_of(box)] if box else []


def item_slot(name: str, owner: Any, key: Any) -> Slot:
    """The slot of the array `owner[key]`, which is replaced at a write."""
    with named(name):
        like, values = owner[key], _values(owner[key])

    def write(new: np.ndarray) -> None:
        owner[key] = from_numbers(new.copy(), like)  # a copy: the memory of a broadcast is used again

    return value_slot(name, values.dtype, values.shape, lambda: _values(owner[key]), write)


def opened(model: Any) -> tuple[Any, Callable[[], Any], set[str]] | None:
    """What can be written in place of the model, and the rest of `adapters.opened`. None: the model itself.

    Of a tree with jax arrays, and of a container that only JAX knows, that is a dict of the leaves, but for functions
    and the like, which stay each rank's own. A tree in which nothing was replaced is the same one afterwards.
    """
    try:
        found, build = tree.jax_items(model, is_model)
    except (TypeError, ValueError):  # its keys cannot be sorted: no tree for JAX
        return None
    others = (dict, list, tuple, np.ndarray)
    array = framework("jax").Array, *(() if isinstance(model, others) or is_model(model) else (np.ndarray,))
    if not any(isinstance(leaf, array) or (len(array) > 1 and is_nnx(type(leaf))) for _, leaf in found):
        return None
    box: dict[str, Any] = {}
    closers = [_open(path, leaf, box) for path, leaf in found]
    tree.check_paths([path for path, _ in found])

    def give() -> Any:
        items = [close() for close in closers]
        return model if all(new is old for new, (_, old) in zip(items, found)) else build(items)

    numbers = (framework("jax").Array, int, float, complex, np.generic)
    return box, give, {path for path, leaf in found if isinstance(leaf, numbers)}


def _open(path: str, leaf: Any, box: dict[str, Any]) -> Callable[[], Any]:
    """Puts a leaf into the box, if it is sent; gives a function that says what it has become there."""
    if not (is_model(leaf) or is_array(leaf)):
        try:
            slots_of([leaf] if hasattr(leaf, "__dict__") else [])
        except WeightsError:  # an object without weights, such as a configuration
            return lambda: leaf
    if isinstance(leaf, framework("jax").Array) and not leaf.shape and not getattr(leaf, "weak_type", False):
        path += " of 64 bits" * (leaf.dtype.name in ("int64", "float64", "complex128"))  # on each rank, or on none
    like = box[path] = leaf.copy() if isinstance(leaf, np.ndarray) and not leaf.flags.writeable else leaf  # of a file
    if not isinstance(like, framework("jax").Array) or like.shape or like.dtype.name not in _NUMBERS:
        return lambda: box[path]
    # it travels as a number: jit makes arrays of numbers, so rank 0's counter may be one when the others' is not yet
    with named(path):
        box[path] = first = _values(like).item()
    return lambda: leaf if box[path] is first else from_numbers(np.array(box[path], like.dtype), like)


def is_nnx(kind: type) -> bool:
    """A class of nnx's modules or optimizers."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(kind, (nnx.Module, nnx.Optimizer))


def _is_key(leaf: Any) -> bool:
    return bool(framework("jax").dtypes.issubdtype(leaf.dtype, framework("jax").dtypes.prng_key))


def _values(leaf: Any) -> np.ndarray:
    jax = framework("jax")
    if isinstance(leaf, jax.core.Tracer):
        raise BatchError("is traced and has no values yet; call this outside of jax.jit, grad, vmap and scan")
    if not isinstance(leaf, jax.Array):
        raise BatchError(f"is a {type(leaf).__name__}; make it a jax array")
    if leaf.is_deleted():
        raise BatchError("is a deleted array, such as one given to a function that donates it; give what that returned")
    if len(leaf.sharding.device_set) > 1:
        raise BatchError("lies on several devices; give jax.device_put(x, jax.devices()[0])")
    if not _is_key(leaf):
        return np.asarray(leaf)
    data = np.asarray(jax.random.key_data(leaf))
    dtype = np.dtype([(str(jax.random.key_impl(leaf)), data.dtype, data.shape[-1:])])
    return np.ndarray(leaf.shape, dtype, np.ascontiguousarray(data))


def _put(array: np.ndarray, like: Any) -> Any:
    jax = framework("jax")  # an array that is committed to its device can't be calculated with on others
    device = next(iter(like.sharding.device_set))
    with jax.enable_x64(True), jax.default_device(device):  # else float64 becomes float32
        device = device if like.committed else None
        if not _is_key(like):
            return jax.device_put(array, device)
    impl = str(jax.random.key_impl(like))
    return jax.random.wrap_key_data(jax.device_put(np.ascontiguousarray(array[impl]), device), impl=impl)
