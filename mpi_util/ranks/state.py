"""What belongs to one process as a whole, of any kind: the state of each module."""

from collections.abc import Callable
from typing import Any, TypeVar

State = TypeVar("State")
made: dict[Any, Any] = {}  # by class; a test clears it, and so forgets the state of all modules


def state(kind: Callable[[], State]) -> State:
    """This process's one `kind`, made at the first call: the service locator through which modules keep their state."""
    if kind not in made:
        made[kind] = kind()
    found: State = made[kind]
    return found
