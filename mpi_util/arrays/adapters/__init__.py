"""Adapters read and write the arrays of a framework's objects, one file for each framework. They run in every rank.

The adapter of an object is loaded by name when such an object is met, so none knows another, and no framework is loaded
before the program has loaded it. May import `arrays` and `errors`, and a framework inside functions. Read first:
`Adapter` and `slots` below, then pytorch.py.
"""

import contextlib
import functools
import importlib.util
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from ...errors import BatchError, MissingFrameworkError, MpiUtilError, WeightsError, first_line
from .. import tree
from ..layout import Slot

T = TypeVar("T")

# the package of an object's class, or of one of its bases -> adapter; Keras first: it derives from the frameworks below
_ADAPTERS = {"keras": "keras", "torch": "pytorch", "tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax"}
# attributes that may differ between ranks, and how the names of those begin that are the frameworks' own
_OF_A_RANK = {"rank", "seed", "training", "stop_training", "stop_predicting"}
MODES = ("training", "deterministic", "use_running_average")  # of torch's modules; of nnx's
_OF_FRAMEWORKS = ("_self_", "_torch", "_is_")
_AUTOMATIC_NUMBER = re.compile(r"_\d+(?=[/_:]|$)")
_NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras", "gymnasium": "Gymnasium"}
_HAS_JAX = importlib.util.find_spec(".jax", __name__) is not None  # a copy may lack the adapter
_PACKAGES = {"keras": "tensorflow", "gymnasium": "'gymnasium[mujoco]'"}


def framework(module: str) -> Any:
    """The module: "torch", "tensorflow", "keras", "jax", "tensordict", "torchrl", "gymnasium" or "matplotlib".

    Raises MissingFrameworkError: it is not installed; the message says what to install.
    """
    try:
        return sys.modules.get(module) or importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        name, package = _NAMES.get(module, module), _PACKAGES.get(module, module)
        raise MissingFrameworkError(f"this needs {name}, which is not installed: pip install {package}") from None


class Adapter(Protocol):
    """What each adapter module has; with tensors that can be written in place also `tensor_slot(name, tensor)`.

    A broadcast to a dict, list or tuple of tensors needs `tensor_slot`, whose `write` changes the tensor. Of immutable
    arrays (JAX's) an adapter has `item_slot`, which replaces them in what holds them, and `opened`. An object that can
    replace them itself, as a Keras variable, needs only `slots`.

    A tensor's values come in host memory, as a view where possible, in a dtype that travels (bits of one that NumPy
    lacks) or as `numbers` that NumPy can calculate with; and go back to a tensor of the same kind as `like`: over the
    array's memory where possible, or as numbers on `like`'s device. A token is small, is sent, and stands for `like`.
    """

    def to_array(self, leaf: Any, numbers: bool = False) -> np.ndarray: ...
    def from_array(self, array: np.ndarray, like: Any) -> Any: ...
    def from_numbers(self, array: np.ndarray, like: Any) -> Any: ...
    def token(self, leaf: Any) -> Any: ...
    def slots(self, model: Any) -> "list[Slot]": ...
    def parts(self, model: Any) -> list[tuple[str, Any, Any]]: ...  # (name, part, names that are not its state)


def adapter_for(thing: Any) -> Adapter:
    """The adapter of the framework that `thing` (a model or a tensor) comes from."""
    kind: type = type(thing)
    return _adapter_of(kind)


def array_of(thing: Any, numbers: bool = False) -> np.ndarray:
    """The adapter's `to_array`. BatchError: there is none, or it is not known what its rows are."""
    if not (is_array(thing) or isinstance(thing, (list, str, bytes)) or is_of_framework(thing)):
        raise BatchError(not_rows(thing))
    try:
        return adapter_for(thing).to_array(thing, numbers=numbers)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise BatchError(f"is a {type(thing).__name__} of which no array can be made: {first_line(error)}") from None


def numbers_of(thing: Any, kinds: str = "fiub") -> np.ndarray | None:
    """A number, array or tensor as a NumPy array; None: it is something else, or its dtype is of none of `kinds`."""
    try:
        array = adapter_for(thing).to_array(thing, numbers=True)
    except Exception:  # of whatever framework
        return None
    return array if array.dtype.kind in kinds else None


def is_of_framework(thing: Any) -> bool:
    """True for a model, tensor or other object of a framework; not for an optimizer, say, or an object of NumPy."""
    return hasattr(adapter_for(thing), "parts")


def is_model(thing: Any) -> bool:
    """True for what has weights or a state of its own: modules and optimizers of torch, TensorFlow, Keras and nnx."""
    kind: type = type(thing)
    stateful = any(hasattr(kind, name) for name in ("state_dict", "trainable_variables", "variables"))
    return (stateful and is_of_framework(thing)) or _is_nnx(kind)


def is_array(thing: Any) -> bool:
    """True for a number, an array or a tensor, of any package. What else has a method __array__ may be a table."""
    kind: type = type(thing)
    return isinstance(thing, (bool, int, float, complex)) or _is_array_class(kind)


@functools.cache  # of the class, as an object may make up any attribute
def _is_array_class(kind: type) -> bool:
    return hasattr(kind, "dtype") and hasattr(kind, "shape")


def copied(rows: Any) -> Any:
    """The same rows in memory of their own, where what they are in can be written."""
    leaves = dict(tree.walk(rows))
    for path, leaf in leaves.items():
        if isinstance(leaf, (np.ndarray, list)):
            leaves[path] = leaf.copy() if isinstance(leaf, np.ndarray) else tree.Objects(leaf)
        elif hasattr(leaf, "detach"):
            leaves[path] = leaf.detach().clone()
    return tree.rebuild(rows, leaves)


def not_rows(thing: Any) -> str:
    """Text for an object of which it is not known what its rows are."""
    return f"is of class {type(thing).__name__}, not known to be rows; give arrays or tensors, or use rank0_gather"


@functools.cache  # asked for every leaf of every batch
def _adapter_of(kind: type) -> Adapter:
    name = next((name for root, name in _ADAPTERS.items() if root in _packages(kind)), "arrays")
    adapter: Adapter = _load("jax" if _is_nnx(kind) else name)
    return adapter


@functools.cache
def _is_nnx(kind: type) -> bool:
    return _HAS_JAX and "flax" in _packages(kind) and bool(_load("jax").is_nnx(kind))


def _packages(kind: type) -> set[str]:
    return {cls.__module__.partition(".")[0] for cls in kind.__mro__}


@functools.cache  # to ask a torch module for an attribute that it lacks takes longer than to look at its weights
def _is_session(kind: type) -> bool:
    return "tensorflow" in _packages(kind) and hasattr(kind, "run") and hasattr(kind, "graph")


def _load(name: str) -> Any:
    return importlib.import_module(f".{name}", __name__)


def slots(
    model: Any, graph: Any = None, read_only: bool = False, trainable: bool = False, held: Any = None
) -> list[Slot]:
    """Everything in `model` that a broadcast of its weights carries.

    Args:
        graph: of the tf.compat.v1 session `model`; None: the session's own, or `model` is something else.
        trainable: of a session, only the trainable variables.
        read_only: take from a dict, list or tuple also what cannot be written in place; to write its slot is an error.
        held: a list that gets (path, model) of each model of a framework.

    Raises:
        WeightsError: the model is of no known kind, or holds no weights.
    """
    found: list[Slot]
    kind: type = type(model)
    if graph is not None or _is_session(kind):
        found = _load("tf1").slots(model, graph if graph is not None else model.graph, trainable)
    elif isinstance(model, (dict, list, tuple)) or not is_of_framework(model):
        found = _load("arrays").slots(model, read_only, [] if held is None else held)
    else:  # Keras and TensorFlow have containers of their own
        found = adapter_for(model).slots(model)
        if held is not None:
            held.append(("", model))
    if not found:
        raise WeightsError(f"{type(model).__name__} holds no weights")
    return found


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """An error in the block names the weight."""
    try:
        yield
    except BatchError as error:
        raise WeightsError(f"'{name or 'the array'}' {error}") from None


def opened(model: T) -> tuple[Any, Callable[[], T], Collection[str]] | None:
    """(what is written, what then gives the new tree, names of what is only in that) of a tree of JAX's; else None."""
    return _load("jax").opened(model) if tree.jax_trees() and _HAS_JAX else None


def modes(held: list[tuple[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    """(number of a part, name of a mode) -> the attributes of that part. Args: held: as of `unsent`."""
    parts = enumerate(part for _, model in held for _, part, _ in adapter_for(model).parts(model))
    named = [(i, name, vars(part)) for i, part in parts for name in MODES[: 3 if _is_nnx(part.__class__) else 1]]
    return {(i, name): own for i, name, own in named if name in own and isinstance(own[name], (bool, type(None)))}


def unsent(held: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(name, text) of each number, array and tensor that is an attribute of a model but none of its weights.

    Equal values have equal texts. Args: held: what `slots` has given.
    """
    return [
        (".".join(filter(None, (path, prefix, name))), text)
        for path, model in held
        for prefix, part, others in adapter_for(model).parts(model)
        for name, value in vars(part).items()
        if (describe := _describer(value.__class__))
        and name not in others and name not in _OF_A_RANK and not name.startswith(_OF_FRAMEWORKS)
        and (text := describe(value))
    ]  # fmt: skip


@functools.cache  # asked for every attribute of every module
def _describer(kind: type) -> Callable[[Any], str] | None:
    is_sampled = _is_array_class(kind) and not hasattr(kind, "assign")  # variables are sent
    return repr if kind in (bool, int, float, complex) else sample if is_sampled else None


def sample(array: Any) -> str:
    """Text that differs where some of up to 2,048 elements do; "" of what has no values, or is amid a calculation."""
    try:
        is_torch = hasattr(array, "data_ptr")  # of which only the sample is copied from a device
        flat = (array if is_torch else array_of(array)).reshape(-1)
        checksum = zlib.crc32(array_of(flat[:: len(flat) // 1024 or 1]).tobytes())
    except (RuntimeError, ValueError, MpiUtilError):  # of a tensor without memory, such as a sparse one
        return ""
    return "" if getattr(array, "grad_fn", None) else f"{tuple(array.shape)} {checksum}"


def weight_name(position: int, path: str) -> str:
    """Name of a model's weight: its position, and its path without the numbers that make layer names unique.

    They count all layers of a class that the process has made: ranks may have `dense/kernel` and `dense_3/kernel`.
    """
    return f"{position}/{_AUTOMATIC_NUMBER.sub('', path.partition(':')[0])}"


def kind_of(thing: Any, array: np.ndarray) -> str:
    """Name of the dtype of a tensor or array whose bits `to_array` has given, such as bfloat16; "" of any other."""
    if array.dtype.kind != "u":
        return ""
    dtype = getattr(thing, "dtype", array.dtype)
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    return "" if name == array.dtype.name else name


def as_bits(array: np.ndarray) -> np.ndarray:
    """The array, or its bits as unsigned integers if its dtype is an extension to NumPy's: bfloat16, 8-bit floats."""
    return array.view(f"u{array.dtype.itemsize}") if is_extension(array.dtype) else array


def is_extension(dtype: Any) -> bool:
    """True for a dtype of NumPy's that another package has registered."""
    return getattr(dtype, "isbuiltin", None) == 2


def as_numbers(array: np.ndarray) -> np.ndarray:
    """The array, or float32 for a dtype that is an extension to NumPy's."""
    return array.astype(np.float32) if is_extension(array.dtype) else array


def value_slot(
    name: str, dtype: np.dtype, shape: tuple[int, ...], read: Callable[[], Any], write: Callable[[np.ndarray], object]
) -> Slot:
    """The slot of an array that is read and written as a whole: values of `dtype`, which may be an extension's."""
    bits = as_bits(np.empty(0, dtype)).dtype
    slot = Slot(
        name, bits, shape, lambda out: np.copyto(out, as_bits(np.asarray(read()))), lambda x: write(x.view(dtype))
    )
    return with_bits(slot, dtype) if is_extension(dtype) else slot


def with_bits(slot: Slot, dtype: np.dtype) -> Slot:
    """The slot of values of an extension's dtype, of which bits travel."""
    return slot._replace(
        to_numbers=lambda bits: as_numbers(bits.view(dtype)),
        to_bits=lambda values: as_bits(values.astype(dtype)),
        kind=dtype.name,
    )
