"""The arguments of phase 1, checked: whose weights are sent, and to which workers; which model gets them."""

import functools
from typing import Any

from ..errors import UsageError

_EXCLUDES = {  # argument -> those that would say the same as a part of it
    "params_map": ["context", "model", "weights", "device_map_fn"],
    "context": ["model", "weights", "device_map_fn"],
    "model": ["weights"],
}


def worker_indices(given: dict[str, Any], ranks: int | None) -> list[int]:
    """The workers. UsageError: the arguments given to `init_on_sender` exclude each other, or say too little.

    Args: ranks: number of workers where no argument says it.
    """
    for name, excluded in _EXCLUDES.items():
        for other in excluded:
            if name in given and other in given:
                raise UsageError(f"init_on_sender: {name}= and {other}= exclude each other; leave one out")
    if not given.keys() & {"params_map", "context", "model", "weights"}:
        raise UsageError("init_on_sender: give model=, weights=, context= or params_map=")
    if "context" in given and "model_id" not in given:
        raise UsageError("init_on_sender: context= needs model_id=, which says where in it the model is")
    if not all(isinstance(k, int) and k >= 0 for k in given.get("params_map", ())):
        raise UsageError(f"init_on_sender: the keys of params_map= are worker indices: {[*given['params_map']]}")
    name, said = "context", getattr(given.get("context"), "num_workers", None)
    if "params_map" in given:
        name, said = "params_map", len(given["params_map"])
    count = given.get("num_workers", ranks if said is None else said)
    if said not in (None, count):
        raise UsageError(f"init_on_sender: num_workers= says {count} workers and {name}= {said}")
    if count is None:
        raise UsageError("init_on_sender: how many workers? give num_workers=")
    if count < 0:
        raise UsageError(f"init_on_sender: num_workers={count}")
    return sorted(given.get("params_map", range(count)))


def name_of(model_id: str | None) -> str:
    """The model, in messages."""
    return f"the model '{model_id}'" if model_id is not None else "the model"


def own_model(model_id: str | None, model: Any, context: Any, worker_idx: int | None) -> tuple[Any, int | None]:
    """A receiver's model and index, from the arguments of `init_on_receiver`."""
    if context is None:
        return model, worker_idx
    if model is not None:
        raise UsageError("init_on_receiver: context= and model= exclude each other; leave one out")
    if model_id is None:
        raise UsageError("init_on_receiver: context= needs model_id=, which says where in it the model is")
    return resolve(context, model_id), getattr(context, "worker_idx", None) if worker_idx is None else worker_idx


def resolve(context: Any, model_id: str) -> Any:
    """The model of that name in a context: the result of its `get_model`, or the attribute at the dotted path."""
    if hasattr(context, "get_model"):
        return context.get_model(model_id)
    try:
        return functools.reduce(getattr, model_id.split("."), context)
    except AttributeError as error:
        raise UsageError(f"no model '{model_id}' in the context: {error}") from None
