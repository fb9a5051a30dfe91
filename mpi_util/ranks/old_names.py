"""Keywords by the names that they had in the mpi_util of 2017."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def renamed(**old: str) -> Callable[[F], F]:
    """A decorator: the function also takes keywords by old names. Args: old: today's name of each."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{old.get(key, key): value for key, value in kwargs.items()})

        return call  # type: ignore[return-value]

    return decorate
