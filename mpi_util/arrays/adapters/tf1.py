"""The variables of a tf.compat.v1 session and its graph, in every rank. May be deleted where none is used."""

from typing import Any

import numpy as np

from ...errors import WeightsError
from ..layout import Slot
from . import framework, value_slot
from .tensorflow import check_dtype


def slots(session: Any, graph: Any, trainable: bool = False) -> list[Slot]:
    """All global variables of the graph by name (BatchNorm's statistics, optimizer state, counters), or `trainable`."""
    if not hasattr(session, "run") or id(getattr(session, "graph", None)) != id(graph):
        wrong = "a graph goes with the tf.compat.v1 session that runs it; several models: give a list, [pi, vf]"
        raise WeightsError(wrong)
    kind = "trainable_variables" if trainable else "variables"
    variables = sorted(graph.get_collection(kind), key=lambda variable: variable.name)
    values = _Values(session, variables)
    return [values.slot(i) for i in range(len(variables))]


class _Values:
    """The values of a session's variables, all read in one run of the session and all written in one.

    Writing runs each variable's own initializer with its input replaced, so a finalized graph will do.
    """

    def __init__(self, session: Any, variables: list[Any]):
        self.session, self.variables = session, variables
        self.values: list[np.ndarray] | None = None
        self.pending: dict[int, np.ndarray] = {}

    def slot(self, i: int) -> Slot:
        variable = self.variables[i]
        name, _, _ = variable.name.partition(":")
        check_dtype(name, variable.dtype)
        if not variable.shape.is_fully_defined():
            raise WeightsError(f"'{name}' has no fixed shape: {variable.shape}")
        dtype, shape = np.dtype(variable.dtype.as_numpy_dtype), tuple(variable.shape.as_list())

        def write(values: np.ndarray) -> None:
            self.pending[i] = values.copy()

        return value_slot(name, dtype, shape, lambda: self.read()[i], write)._replace(flush=self.flush)

    def read(self) -> list[np.ndarray]:
        tf = framework("tensorflow")
        if self.values is None:
            try:
                self.values = list(self.session.run(self.variables))
            except tf.errors.FailedPreconditionError:
                raise WeightsError("the session's variables have no values yet: run their initializer first") from None
        return self.values

    def flush(self) -> None:
        pending, self.pending, self.values = self.pending, {}, None
        while pending:
            inputs = {self.variables[i].initializer.inputs[1].name: i for i in pending}  # variables may share an input
            now = {i: pending.pop(i) for i in inputs.values()}
            feeds = {name: now[i] for name, i in inputs.items()}
            self.session.run([self.variables[i].initializer for i in now], feeds)
