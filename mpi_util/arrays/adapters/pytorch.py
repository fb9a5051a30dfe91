"""torch: modules (parameters and buffers), optimizers (their state), and single tensors."""

import weakref
from typing import Any

import numpy as np

from ...errors import WeightsError
from ..frameworks import framework
from . import KeptSlots, Slot


def to_array(leaf: Any) -> np.ndarray:
    """The values of a tensor in host memory: a view of a CPU tensor, a copy from any other device.

    bfloat16, which NumPy lacks, comes as the uint16 of its bits.
    """
    array: np.ndarray = _bits(leaf.detach().cpu()).resolve_conj().resolve_neg().numpy()
    return array


def from_array(array: np.ndarray, like: Any) -> Any:
    """A CPU tensor over `array`'s memory, of `like`'s dtype where its values came as bits."""
    torch = framework("torch")
    tensor = torch.from_numpy(array)
    return tensor.view(like.dtype) if _travels_as_bits(like) else tensor


def to_numbers(leaf: Any) -> np.ndarray:
    """The values of a tensor in host memory; bfloat16 and 8-bit floats as float32."""
    return to_array(leaf.float() if _travels_as_bits(leaf) else leaf)


def from_numbers(array: np.ndarray, like: Any) -> Any:
    """A tensor with these values on `like`'s device, of its dtype where NumPy does not know that."""
    torch = framework("torch")
    tensor = torch.from_numpy(np.asarray(array)).to(like.device)
    return tensor.to(like.dtype) if _travels_as_bits(like) else tensor


def token(leaf: Any) -> Any:
    """An empty tensor of the same dtype."""
    torch = framework("torch")
    return torch.empty(0, dtype=leaf.dtype)


def slots(model: Any) -> list[Slot]:
    """Parameters and buffers of a module (shared ones once), or every tensor of an optimizer's state."""
    torch = framework("torch")
    if isinstance(model, torch.nn.Module):
        return _module_slots(model)
    if isinstance(model, torch.optim.Optimizer):
        state = model.state_dict()["state"]
        named = [
            (f"{index}/{key}", value)
            for index in sorted(state)
            for key, value in sorted(state[index].items())
            if isinstance(value, torch.Tensor)
        ]
        if not named:
            raise WeightsError(
                f"{type(model).__name__} has no state yet: take a step, or load_state_dict, on every rank"
            )
    elif isinstance(model, torch.Tensor):
        named = [("tensor", model)]
    else:
        raise WeightsError(f"no weights found in a {type(model).__name__}; give a module, an optimizer or tensors")
    return [tensor_slot(name, tensor) for name, tensor in named]


# By module: what its slots were made from, and they. To make them takes longer than to send the weights of a small one.
_made: weakref.WeakKeyDictionary[Any, tuple[Any, Any, KeptSlots]] = weakref.WeakKeyDictionary()


def _module_slots(module: Any) -> list[Slot]:
    """The slots of a module: the same list as long as it has the same tensors in the same places."""
    named = [*module.named_parameters(), *module.named_buffers()]
    places = [(name, id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in named]
    if module not in _made or _made[module][0] != places:
        _made[module] = places, named, KeptSlots(tensor_slot(name, tensor) for name, tensor in named)
    return _made[module][-1]


def forget(module: Any) -> None:
    """Keeps nothing of what `slots` has found in the module: it would keep the memory of tensors that are replaced."""
    _made.pop(module, None)


def tensor_slot(name: str, tensor: Any) -> Slot:
    """The slot of one tensor, on whatever device it lives."""
    torch = framework("torch")
    bits = _bits(tensor.detach())
    on_host = bits.device.type == "cpu" and bits.is_contiguous()
    host: np.ndarray | None = bits.view(-1).numpy() if on_host else None
    dtype = host.dtype if host is not None else torch.empty(0, dtype=bits.dtype).numpy().dtype

    def read(out: np.ndarray) -> None:
        torch.from_numpy(out).copy_(bits)

    def write(values: np.ndarray) -> None:
        bits.copy_(torch.from_numpy(values))

    if not _travels_as_bits(tensor):
        return Slot(name, dtype, tuple(bits.shape), host, read, write)

    def number(values: np.ndarray) -> np.ndarray:
        numbers: np.ndarray = torch.from_numpy(values).view(tensor.dtype).float().numpy()
        return numbers

    def as_bits(numbers: np.ndarray) -> np.ndarray:
        return to_array(torch.from_numpy(numbers).to(tensor.dtype))

    return Slot(name, dtype, tuple(bits.shape), host, read, write, number, as_bits)


def _travels_as_bits(tensor: Any) -> bool:
    """NumPy has no such dtype: bfloat16 and the 8-bit floats."""
    return tensor.is_floating_point() and str(tensor.dtype).removeprefix("torch.") not in (
        "float16",
        "float32",
        "float64",
    )


def _bits(tensor: Any) -> Any:
    """The tensor, or a view of the bits of one whose dtype NumPy does not know."""
    torch = framework("torch")
    if not _travels_as_bits(tensor):
        return tensor
    return tensor.view(torch.uint16 if tensor.element_size() == 2 else torch.uint8)
