"""Receivers without copies of their own: a torch module whose tensors lie in the block that the sender wrote."""

from typing import Any

import numpy as np

from ..arrays.adapters.pytorch import forget
from ..arrays.frameworks import framework
from ..arrays.layout import Layout
from ..errors import UsageError


class Sharing:
    """Lets the tensors of a torch module on the CPU point into a block, and from one block to the next.

    The objects (Parameter, buffer) stay the same, so that optimizers and others that hold them see the new values. Tied
    ones stay tied.

    Raises:
        UsageError: it is no torch module, or not on the CPU.
    """

    def __init__(self, model: Any):
        if not hasattr(model, "named_parameters"):
            raise UsageError(f"share=True needs a torch module, not a {type(model).__name__}")
        self._model = model
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._aliases = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        for name, tensor in self._tensors.items():
            if tensor.device.type != "cpu":
                raise UsageError(f"share=True needs a module on the CPU; '{name}' is on {tensor.device}")

    def point_into(self, layout: Layout, block: np.ndarray) -> None:
        """Every tensor's values are those in `block`, which must stay as it is until the next call."""
        torch = framework("torch")
        forget(self._model)  # what the adapter remembers of it would keep its former memory
        pointed = set()
        tied = {name: other for other, name in layout.aliases}
        views = []
        for entry in layout.entries:
            values = torch.from_numpy(entry.view(block))
            for name in (entry.name, tied.get(entry.name)):
                tensor = self._aliases.get(name)
                if tensor is not None and id(tensor) not in pointed:
                    pointed.add(id(tensor))
                    views.append((tensor, values if values.dtype == tensor.dtype else values.view(tensor.dtype)))
        for tensor, view in views:
            tensor.data = view

    def part(self) -> None:
        """Every tensor gets memory of its own."""
        for tensor in self._tensors.values():
            tensor.data = tensor.data.clone()
