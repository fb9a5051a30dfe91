"""torch in every rank: modules (parameters and buffers), optimizers (their state), and single tensors."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ...errors import WeightsError, first_line
from ..layout import Slot, alignment_key
from . import framework

_NUMPY_FLOATS = ("torch.float16", "torch.float32", "torch.float64")


def to_array(leaf: Any, numbers: bool = False) -> np.ndarray:
    """The values of a tensor in host memory, a view if they are there.

    Of bfloat16 and the 8-bit floats, which NumPy lacks, the bits as unsigned integers, or float32 as `numbers`.
    """
    leaf = leaf.float() if numbers and _travels_as_bits(leaf) else leaf
    array: np.ndarray = _bits(leaf.detach().cpu()).resolve_conj().resolve_neg().numpy()
    return array


def from_array(array: np.ndarray, like: Any) -> Any:
    """A tensor over `array`'s memory, or on `like`'s device; of `like`'s dtype where its values came as bits."""
    tensor = framework("torch").from_numpy(array).to(like.device)
    return tensor.view(like.dtype) if _travels_as_bits(like) else tensor


def from_numbers(array: np.ndarray, like: Any) -> Any:
    """A tensor with these values on `like`'s device, of its dtype where NumPy does not know that."""
    tensor = framework("torch").from_numpy(np.asarray(array)).to(like.device)
    return tensor.to(like.dtype) if _travels_as_bits(like) else tensor


def compact(thing: Any) -> Any:
    """The tensor or parameter, or one with the same values in memory of its own if its memory holds others too."""
    torch, kind = framework("torch"), type(thing)
    if kind not in (torch.Tensor, torch.nn.Parameter) or thing.layout is not torch.strided or thing.is_meta:
        return thing
    if thing.untyped_storage().nbytes() <= thing.nbytes:
        return thing
    values, needs = thing.detach().clone(), thing.requires_grad
    values = values.requires_grad_(needs) if kind is torch.Tensor else kind(values, needs)
    values.__dict__.update(thing.__dict__)
    return values


def token(leaf: Any) -> Any:
    return framework("torch").empty(0, dtype=leaf.dtype, device=leaf.device)


def slots(model: Any) -> list[Slot]:
    """Parameters and buffers of a module (shared ones once), or every tensor of an optimizer's state."""
    torch, kind = framework("torch"), type(model).__name__
    if isinstance(model, torch.nn.Module):
        return [*_module_slots(model)]
    if isinstance(model, torch.optim.Optimizer):
        state = model.state_dict()["state"]
        found = [(f"{i}/{key}", value) for i in sorted(state) for key, value in sorted(state[i].items())]
        for name, value in found:
            if isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
                raise WeightsError(f"'{name}' of {kind} is a list of tensors; send its state_dict by bcast")
        named = [(name, value) for name, value in found if isinstance(value, torch.Tensor)]
        if not named:
            raise WeightsError(f"{kind} has no state: take a step, or load_state_dict, on every rank")
    elif isinstance(model, torch.Tensor):
        named = [("tensor", model)]
    else:
        raise WeightsError(f"no weights found in a {kind}; give a module, an optimizer or tensors")
    return [tensor_slot(name, tensor) for name, tensor in named]


def _module_slots(module: Any) -> Iterator[Slot]:
    cls, base = type(module), framework("torch").nn.Module
    if cls.named_parameters is not base.named_parameters or cls.__eq__ is not base.__eq__:
        yield from (tensor_slot(*named) for named in (*module.named_parameters(), *module.named_buffers()))
        return
    optional = set()
    for prefix, part in module.named_modules():
        optional |= {f"{prefix}.{name}".lstrip(".") for name in part._non_persistent_buffers_set}
        if _is_quantized(part):
            kind = type(part).__name__
            raise WeightsError(f"'{prefix}' ({kind}) keeps its weights elsewhere than in tensors of its own")
    for named in (module.named_parameters, module.named_buffers):
        names: dict[Any, list[str]] = {}  # by tensor, which is equal to itself alone
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
        for tensor, (name, *aliases) in names.items():
            yield tensor_slot(name, tensor)._replace(aliases=tuple(aliases), optional=name in optional)


def _is_quantized(part: Any) -> bool:
    """True if it has weights that are neither parameters nor buffers, which only its state dict shows."""
    torch = framework("torch")
    own: dict[str, Any] = {}
    if type(part)._save_to_state_dict is torch.nn.Module._save_to_state_dict or len(part._parameters):
        return False
    part._save_to_state_dict(own, "", False)
    packed = (isinstance(value, (tuple, torch.ScriptObject)) for value in own.values())
    return any(packed) or any(getattr(value, "is_quantized", False) for value in own.values())


def parts(model: Any) -> list[tuple[str, Any, Any]]:
    """(name, module, what it computes from its parameters: `weight` of weight_norm's weight_g and weight_v) of each."""
    modules = model.named_modules() if isinstance(model, framework("torch").nn.Module) else ()
    return [(name, part, {key.rpartition("_")[0] for key in [*part._parameters.keys()]}) for name, part in modules]


def tensor_slot(name: str, tensor: Any) -> Slot:
    """The slot of one tensor, on whatever device it lives."""
    try:
        return _tensor_slot(name, tensor)
    except (TypeError, RuntimeError, ValueError) as error:
        raise WeightsError(f"'{name}' is a {type(tensor).__name__} that cannot be sent: {first_line(error)}") from None


def _tensor_slot(name: str, tensor: Any) -> Slot:
    torch = framework("torch")
    if tensor.is_meta:
        raise ValueError("it has no memory (device meta)")
    if tensor.layout is not torch.strided:
        raise ValueError("it is sparse")
    shares = any(stride == 0 and n > 1 for n, stride in zip(tensor.shape, tensor.stride()))
    bits = _bits(tensor.detach())
    if bits.device.type == "cpu" and bits.is_contiguous():
        array = bits.numpy()
        slot = Slot(name, array.dtype, array.shape, lambda out: np.copyto(out, array), partial(np.copyto, array), True)
        if not bits.is_inference():  # autograd is to see the write, as it sees torch's own
            slot = slot._replace(flush=partial(torch.autograd.graph.increment_version, bits))
    else:
        slot = Slot(
            name, torch.empty(0, dtype=bits.dtype).numpy().dtype, tuple(bits.shape),
            read=lambda out: torch.from_numpy(out).copy_(bits),
            write=lambda values: bits.copy_(torch.from_numpy(values)),
        )  # fmt: skip
    if bits.device.type == "cpu":
        slot = slot._replace(alignment=alignment_key(bits.data_ptr(), bits.stride(), bits.is_contiguous()))
    if shares:
        slot = slot._replace(unwritable="its elements share memory (expand); give it a clone()")
    if not _travels_as_bits(tensor):
        return slot
    return slot._replace(
        kind=str(tensor.dtype).removeprefix("torch."),
        to_numbers=lambda values: torch.from_numpy(values).view(tensor.dtype).float().numpy(),
        to_bits=lambda numbers: to_array(torch.from_numpy(numbers).to(tensor.dtype)),
    )


def _travels_as_bits(tensor: Any) -> bool:
    """NumPy has no such dtype: bfloat16 and the 8-bit floats."""
    return tensor.is_floating_point() and str(tensor.dtype) not in _NUMPY_FLOATS


def _bits(tensor: Any) -> Any:
    """The tensor, or a view of the bits of one whose dtype NumPy does not know."""
    if not _travels_as_bits(tensor):
        return tensor
    torch = framework("torch")
    return tensor.view(torch.uint16 if tensor.element_size() == 2 else torch.uint8)
