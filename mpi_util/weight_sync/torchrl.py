"""The scheme as a weight-sync backend of torchrl, for torchrl's own collectors.

    from mpi_util.weight_sync.torchrl import TorchRLWeightSyncScheme

    collector = MultiSyncCollector(..., weight_sync_schemes={"policy": TorchRLWeightSyncScheme()})
    ...
    collector.update_policy_weights_()

The import registers it: `WeightSyncScheme.from_backend("mpi_util")` of torchrl makes one too. A collector in an MPI
rank needs none: give its policy to an `MPIWeightSyncScheme`, and collect within `frozen()`.
"""

import importlib
from operator import attrgetter
from typing import Any

from ..arrays.frameworks import framework
from .scheme import MultiProcessWeightSyncScheme

framework("torchrl")  # where it is missing, one line says so
base: Any = importlib.import_module("torchrl.weight_update.weight_sync_schemes")


@base.register_weight_sync_backend("mpi_util")
class TorchRLWeightSyncScheme(base.WeightSyncScheme):  # type: ignore[misc]  # it has no types
    """A `MultiProcessWeightSyncScheme` (attribute `scheme`) behind torchrl's interface; `options`: its arguments."""

    def __init__(self, strategy: str = "tensordict", **options: Any):
        super().__init__(strategy)
        self.scheme = MultiProcessWeightSyncScheme(strategy, **options)

    def _init_on_sender_impl(
        self, *, model_id: Any = None, context: Any = None, devices: Any = None, ctx: Any = None, **given: Any
    ) -> None:
        if devices is not None:  # a worker's model is where the worker has put it
            given.setdefault("num_workers", len(devices))
        if context is not None:
            self.context, model = context, base._resolve_model(context, model_id)
            if model is None and model_id == "policy":  # it has factories, which make those of its workers
                factories = context.policy_factory
                if any(factory is not factories[0] for factory in factories):
                    given["params_map"] = {k: factory() for k, factory in enumerate(factories)}
                else:
                    model = factories[0]()
            given |= {"model": model, "num_workers": context.num_workers}
        self.model_id = model_id
        self.scheme.init_on_sender(model_id=model_id, **given)

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, worker_idx: int | None = None, model: Any = None, **_: Any
    ) -> None:
        self.model_id, self.context = model_id, context
        if context is not None:
            model = model if model is not None else base._resolve_model(context, model_id)
            worker_idx = getattr(context, "worker_idx", worker_idx)
        self._worker_idx = worker_idx
        _materialise(model)
        self.scheme.init_on_receiver(model_id=model_id, worker_idx=worker_idx, model=model, on_update=self._updated)

    @property
    def model(self) -> Any:
        """The model of this side; torchrl sets another."""
        return self.scheme.model

    @model.setter
    def model(self, model: Any) -> None:
        receiver = self.scheme._need_receiver("model")
        with receiver.lock.writing():
            receiver.model = model

    # `receive` is torchrl's own: without a transport it does nothing, and a thread of the worker applies what arrives
    _setup_connection_and_weights_on_sender_impl = property(attrgetter("scheme.connect"))
    _setup_connection_and_weights_on_receiver_impl = property(attrgetter("scheme.connect"))
    send = property(attrgetter("scheme.send"))
    send_async = property(attrgetter("scheme.send_async"))
    wait_async = property(attrgetter("scheme.wait_async"))
    shutdown = property(attrgetter("scheme.shutdown"))

    def _updated(self, version: int) -> None:
        """Updates the worker's collector too: it counts policy versions, and may have collectors of its own."""
        if hasattr(context := self.context, "update_policy_weights_"):
            weights = self._strategy.extract_weights(self.model)
            context.update_policy_weights_(model_id=self.model_id or "policy", policy_or_weights=weights)

    def create_transport(self, **_: Any) -> None:
        """None: the scheme moves the weights itself."""


def _materialise(model: Any) -> None:
    """Gives memory to what torchrl sent without: a worker gets its policy on the device "meta"."""
    torch = framework("torch")
    made: dict[Any, Any] = {}  # tied ones stay tied
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        empty = torch.empty_like(tensor, device="cpu")
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        made[tensor] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    tensors[name] = made[tensor]
