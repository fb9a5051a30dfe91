"""What belongs to one process as a whole, of any kind: the state of each module."""

from collections.abc import Callable
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


process = States()


def state(kind: Callable[..., State]) -> State:
    """This process's one `kind`, made at the first call: the service locator through which modules keep their state."""
    return process.of(kind)
