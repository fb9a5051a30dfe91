"""The forms in which a caller gets weights."""

from typing import Any

import numpy as np

from ..arrays.frameworks import framework
from .layout import Weights, is_tensordict

STRATEGIES = ("state_dict", "tensordict")


def in_form(thing: Any, strategy: str) -> Any:
    """A copy of the weights of `thing`: a dict by name ("state_dict"), or a TensorDict.

    Tensors of torch stay tensors of torch; all else comes as arrays (bfloat16 as float32).
    """
    copies = _copies(thing)
    if strategy == "state_dict":
        return copies
    tensordict, torch = framework("tensordict"), framework("torch")
    tensors = {name: torch.as_tensor(value) for name, value in copies.items()}
    return tensordict.TensorDict(tensors, batch_size=[]).unflatten_keys(".")


def _copies(thing: Any) -> dict[str, Any]:
    weights = Weights(thing)
    if hasattr(thing, "named_parameters") and not is_tensordict(thing):
        named = {**dict(thing.named_parameters()), **dict(thing.named_buffers())}
        return {name: tensor.detach().clone() for name, tensor in named.items()}
    if is_tensordict(thing):
        return {".".join(k) if isinstance(k, tuple) else k: v.detach().clone() for k, v in thing.items(True, True)}
    found = {}
    for name, slot in weights.slots.items():
        slot.read(bits := np.empty(slot.shape, slot.dtype))
        found[name] = slot.number(bits)
    return found
