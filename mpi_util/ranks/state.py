"""What belongs to one process as a whole, of any kind: the state of each module, and what was changed in Python."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

State = TypeVar("State")


class States:
    """Objects by their class, each made, with `arguments`, when it is first asked for: a service locator.

    A module keeps what belongs to the process, or to one communicator, in a class of its own. The owner need not know
    the module, and a test forgets the state of all modules in one call.
    """

    def __init__(self, *arguments: Any):
        self._arguments = arguments
        self._made: dict[Any, Any] = {}

    def of(self, kind: Callable[..., State]) -> State:
        try:
            made: State = self._made[kind]
        except KeyError:
            made = self._made[kind] = kind(*self._arguments)
        return made

    def close(self) -> None:
        """Closes those that can be closed, and forgets all."""
        for made in self._made.values():
            if hasattr(made, "close"):
                made.close()
        self._made.clear()


class Process(States):
    """The state of this process, and the changes that this package has made in its interpreter and environment."""

    def __init__(self) -> None:
        super().__init__()
        self.undo = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute that is not ours, such as sys.excepthook, until `reset`."""
        self.undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Sets environment variables, until `reset`."""
        for name in variables:
            if name in os.environ:
                self.undo.callback(os.environ.__setitem__, name, os.environ[name])
            else:
                self.undo.callback(os.environ.pop, name, None)
        os.environ.update(variables)

    def reset(self) -> None:
        """For tests: a process that has not used mpi_util. MPI, if it was started, and affinity stay."""
        self.undo.close()
        self.close()


process = Process()


def state(kind: Callable[..., State]) -> State:
    """This process's one `kind`, made at the first call: the service locator through which modules keep their state."""
    return process.of(kind)
