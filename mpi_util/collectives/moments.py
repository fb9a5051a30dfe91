"""Merges the running means and deviations (normalisers) that environments update; in the process of each rank.

Ranks send `Moments` of each environment's samples, and no sums of squares: these lose digits if the mean is far from 0.
"""

from typing import Any, NamedTuple

import numpy as np

from ..arrays.adapters import adapter_for
from ..errors import BatchError, rank_mismatch
from ..ranks.identity import Comm
from ..ranks.state import state
from ..ranks.threads import Threads
from .channel import channel_of

# Attributes: of normalisers in Gymnasium's wrappers and Stable-Baselines3's VecNormalize; of what is wrapped
_INSIDE = ("obs_rms", "return_rms", "ret_rms", "env", "venv", "envs")
_MERGED = "_mpi_util_merged"  # attribute of an object: its state at the last merge, which copies and pickles keep
_ROUNDING = 1e-6


class Moments(NamedTuple):
    """Of some samples: their number, mean, and sum of squared differences from it; numbers, or arrays elementwise."""

    n: float
    mean: Any
    m2: Any


Numbers = tuple[int, ...]  # keys, outermost first, that say which environment
States = list[tuple[Numbers, Moments, Moments | None]]  # of one place: state now and at the last merge


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of the samples of `a` and `b` together."""
    if not a.n or not b.n:
        return a if a.n else b
    n, delta = a.n + b.n, b.mean - a.mean
    return Moments(n, a.mean + delta * (b.n / n), a.m2 + b.m2 + delta * delta * (a.n * (b.n / n)))


def merge_moments(holder: Any, *, comm: Comm = None) -> None:
    """Collective: gives the normalisers of all environments one state: the last merged one and what each has added.

    Call it on every rank once per iteration; the other ranks wait for one that does not. After loading a saved state,
    call it before the first rollout too: a state that is the same in all of them counts once.

    Items of lists, and of dicts with whole numbers as keys, are environments, of which a rank may have any number. What
    they hold under one name ("obs_rms") is merged in float64 (Chan, Golub and LeVeque, 1983, equations 1.5), in the
    order of the keys, then of ranks and lists: the same bits at any number of ranks, if each environment has its own.

    Args:
        holder: object with attributes mean, var (arrays, tensors or numbers; var divides by count) and count, or an
            object that holds some: Gymnasium's NormalizeObservation and NormalizeReward, Stable-Baselines3's
            VecNormalize, wrappers and vector environments around them, lists, dicts, tuples (which have places, not
            environments). They are changed in place. A place outside environments must be on every rank.
        comm: communicator; None: all ranks.

    Raises:
        RankMismatchError: on every rank, if names or shapes differ.
        BatchError: on every rank, if none has such an object, or one has one that takes no values.
    """
    found: dict[str, list[tuple[Numbers, Any]]] = {}
    updates = state(Threads).all_cores

    def describe() -> dict[str, States]:
        _find(holder, found, set())
        for name, rms in ((name, rms) for name, own in found.items() for _, rms in own):
            try:
                vars(rms)[_MERGED], rms.mean, rms.var, rms.count = vars(rms).get(_MERGED), rms.mean, rms.var, rms.count
            except (AttributeError, TypeError) as error:
                raise BatchError(f"merge_moments: '{name}', a {type(rms).__name__}, takes no values: {error}") from None
        return {name: [(key, _state(rms), _last(rms)) for key, rms in own] for name, own in found.items()}

    def merged(of_ranks: list[dict[str, States]]) -> list[dict[str, Moments | None]]:
        shapes = [{name: {now.mean.shape for _, now, _ in own} for name, own in each.items()} for each in of_ranks]
        pools = {name: [one for each in of_ranks for one in each.get(name, [])] for own in shapes for name in own}
        if not pools:
            raise BatchError(f"merge_moments: no object with mean, var and count in a {type(holder).__name__}")
        for name, pool in pools.items():
            missing = not all(name in own for own in shapes) and not all(numbers for numbers, _, _ in pool)
            if missing or len({now.mean.shape for _, now, _ in pool}) > 1:
                raise rank_mismatch("merge_moments: names and shapes must be the same in all environments", shapes)
        return [{name: _merge_one(pool) for name, pool in pools.items()}] * len(of_ranks)

    channel = channel_of(comm)
    for name, total in channel.agree("merge_moments", describe, merged).items():
        for _, rms in found.get(name, []):
            if total is not None:
                _write(rms, total)
            vars(rms)[_MERGED] = tuple(_state(rms))  # in the object's own dtype
    if updates:  # between its gather and its update, for which rank 0 keeps its threads
        channel.begin_update()


def _find(holder: Any, found: dict[str, Any], seen: set[int], name: str = "", numbers: Numbers = ()) -> None:
    """Adds each object with mean, var and count in `holder` to `found`, once. seen: ids of what has been looked at."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if all(hasattr(holder, key) for key in ("mean", "var", "count")):
        found.setdefault(name, []).append((numbers, holder))
        return
    if isinstance(holder, (list, tuple)):  # 0: the numbers in a list say nothing on other ranks
        inside = [(0 if isinstance(holder, list) else str(i), value) for i, value in enumerate(holder)]
    elif isinstance(holder, dict):
        inside = list(holder.items())
    else:  # not getattr: a wrapper may pass it on to what it wraps
        inside = [(key, value) for key, value in getattr(holder, "__dict__", {}).items() if key in _INSIDE]
    for key, value in inside:
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            _find(value, found, seen, name, (*numbers, int(key)))
        else:
            _find(value, found, seen, f"{name}/{key}".lstrip("/"), numbers)


def _state(rms: Any) -> Moments:
    numbers = (adapter_for(x).to_array(x, numbers=True) for x in (rms.count, rms.mean, rms.var))
    count, mean, var = (np.asarray(x, float) for x in numbers)
    return Moments(float(count), mean, var * count)


def _last(rms: Any) -> Moments | None:
    """The state at the last merge, unless the object has been reset since."""
    if vars(rms)[_MERGED] is None:
        return None
    now, last = _state(rms), Moments(*vars(rms)[_MERGED])
    longer = now.n > last.n and now.mean.shape == last.mean.shape
    same = all(map(np.array_equal, now, last))
    return last if same or (longer and (_added(now, last).m2 >= -_ROUNDING * (1 + now.m2)).all()) else None


def _merge_one(pool: States) -> Moments | None:
    """The states of one place merged. None: there is only one, or all start from the same state."""
    if len(pool) == 1 or all(before is None and all(map(np.array_equal, now, pool[0][1])) for _, now, before in pool):
        return None
    pool = sorted(pool, key=lambda one: one[0])  # those with the same numbers stay in the order of ranks
    total = max((before for _, _, before in pool if before), key=lambda base: base.n, default=Moments(0.0, 0.0, 0.0))
    for _, now, before in pool:
        total = merge(total, _added(now, before))
    return total


def _added(now: Moments, before: Moments | None) -> Moments:
    """The samples added since `before` (equation 1.5 solved for them)."""
    if before is None or not before.n:
        return now
    n = now.n - before.n
    if not n:
        return Moments(0.0, now.mean, now.m2)
    mean = now.mean + (now.mean - before.mean) * (before.n / n)
    delta = mean - before.mean
    return Moments(n, mean, now.m2 - before.m2 - delta * delta * (before.n * (n / now.n)))


def _write(rms: Any, state: Moments) -> None:
    for name, value in (("mean", state.mean), ("var", state.m2 / state.n if state.n else state.m2), ("count", state.n)):
        old = getattr(rms, name)
        if isinstance(old, (int, float)):
            value = type(old)(value)
        else:
            dtype = adapter_for(old).to_array(old, numbers=True).dtype
            value = adapter_for(old).from_numbers(np.asarray(value).astype(dtype), old)
        setattr(rms, name, value)
