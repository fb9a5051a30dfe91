"""The scheme in torchrl's own collectors; in the trainer's process and in those of the collector's workers.

The import, which a scheme does where torchrl is loaded, also registers it: `WeightSyncScheme.from_backend("mpi_util")`
of torchrl makes one. A collector in an MPI rank needs none: give its policy to an `MPIWeightSyncScheme`, and collect
within `frozen()`.
"""

import importlib
import weakref
from collections.abc import Callable
from typing import Any

from mpi_util.arrays.adapters import framework
from mpi_util.errors import UsageError

from .scheme import MultiProcessWeightSyncScheme, WeightSyncScheme

framework("torchrl")  # where it is missing, one line says so
base: Any = importlib.import_module("torchrl.weight_update.weight_sync_schemes")
base.WeightSyncScheme.register(WeightSyncScheme)  # for isinstance
base.register_weight_sync_backend("mpi_util")(MultiProcessWeightSyncScheme)
model_of = base._resolve_model  # of a collector, by its model_id


def sender_arguments(collector: Any, model_id: str) -> dict[str, Any]:
    """The `model` or `params_map` of a collector, as `init_on_sender` takes them."""
    model = model_of(collector, model_id)
    if model is None and model_id == "policy":
        factories = collector.policy_factory  # it has these, which make the policies of its workers
        if any(factory is not factories[0] for factory in factories):
            return {"params_map": {k: factory() for k, factory in enumerate(factories)}}
        model = factories[0]()
    if not isinstance(model, framework("torch").nn.Module):
        raise UsageError(f"a scheme requires an nn.Module policy; a {type(model).__name__} has no weights to send")
    return {"model": model}


def shut_down_with(collector: Any, scheme: Any) -> None:
    """From now on the collector's `shutdown` ends the scheme too."""
    collector_ref, scheme_ref, kind = weakref.ref(collector), weakref.ref(scheme), type(collector)

    def shutdown(*args: Any, **kwargs: Any) -> Any:
        try:
            return kind.shutdown(collector_ref(), *args, **kwargs)
        finally:
            if (scheme := scheme_ref()) is not None:
                scheme.shutdown()

    collector.shutdown = shutdown


def after_update(scheme: Any, then: Callable[[int], None] | None) -> Callable[[int], None]:
    """An `on_update`: updates the worker's collector, which counts versions and may have collectors; calls `then`."""
    ref = weakref.ref(scheme)  # the scheme's receiver has this

    def updated(version: int) -> None:
        if (scheme := ref()) is not None and hasattr(collector := scheme.context, "update_policy_weights_"):
            weights = framework("tensordict").TensorDict.from_module(scheme.model).data
            collector.update_policy_weights_(model_id=scheme.model_id or "policy", policy_or_weights=weights)
        if then is not None:
            then(version)

    return updated


def materialise(model: Any) -> None:
    """Gives memory to what torchrl sent without: a worker gets its policy on the device "meta"."""
    torch = framework("torch")
    made: dict[Any, Any] = {}  # tied ones stay tied
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    empty, is_own = torch.empty_like(tensor, device="cpu"), isinstance(tensor, torch.nn.Parameter)
                    empty = torch.nn.Parameter(empty, tensor.requires_grad) if is_own else empty
                    tensors[name] = made.setdefault(tensor, empty)
