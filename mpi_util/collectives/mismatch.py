"""What is wrong where ranks, or segments of one rank, do not fit together; in each rank's process, mostly rank 0's.

Nothing here runs while all is well but the comparison of `check_same`.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import tree
from ..errors import BatchError, RankMismatchError, rank_mismatch

Structure = Any  # of a batch: (leaves, containers), see gather.py


def check_same(op: str, descriptions: Sequence[Sequence[Any]]) -> None:
    """Raises the RankMismatchError that names the first array that differs between the ranks, if there is one."""
    other = next((description for description in descriptions if description != descriptions[0]), None)
    if other is None:
        return
    found = [{name: (dtype, shape) for name, dtype, shape in description} for description in descriptions]
    differ = (entry for entry in (*other, *descriptions[0]) if entry not in other or entry not in descriptions[0])
    name = (next(differ, None) or other[0])[0]

    def text(one: dict[str, Any]) -> str:
        dtype, shape = one.get(name, ("missing", ""))
        with contextlib.suppress(TypeError):  # the name of a dtype that NumPy lacks
            dtype = dtype and np.dtype(dtype)
        what = dtype if dtype == "missing" else f"{dtype} {shape}" if dtype else "None"
        return f"{what} (of {len(one)} arrays)"

    what = f"{op}: '{name}' is not the same on all ranks; they must have the same names, dtypes and shapes"
    raise rank_mismatch(what, map(text, found))


def structures_differ(op: str, structures: Mapping[int, Structure]) -> RankMismatchError:
    """The error that shows the structure of each rank, by rank, where they are not the same."""
    first, expected = next(iter(structures.items()))
    other = next(k for k, structure in structures.items() if structure != expected)
    path, there, here = difference(expected, structures[other])
    table = []
    for structure in structures.values():
        found = {_quoted(p): text for p, text in _by_path(structure).items()}
        others = ", ".join(name for name in found if name.startswith("'")) or "nothing"
        table.append(found.get(path, f"missing; this rank has {others}"))
    what = f"{op}: {path} is {there} on rank {first} and {here} on rank {other}"
    what += "; structure, keys, dtypes and shapes must be the same on every rank"
    return rank_mismatch(what, table, structures)


def list_refused(op: str, path: str, items: list[Any], indexed: bool) -> BatchError:
    """The error of a batch with a list that may be a structure, or rows."""
    kind = type(next(item for item in items if not tree.is_plain(item))).__name__
    fix = "make it a tuple if each position means something, one array if its items are rows; for others: rank0_gather"
    if not path and not indexed:
        fix = "for episodes of deal() or share() add index=, as in index=episodes.taken; for others: rank0_gather"
    return BatchError(f"{op}: {_quoted(path, indexed)} is a list of {len(items)} with {kind} objects; {fix}")


def _by_path(structure: Structure) -> dict[str, str]:
    leaves, containers = structure
    return dict(containers) | {leaf.path: str(leaf) for leaf in leaves}


def difference(these: Structure, those: Structure) -> tuple[str, str, str]:
    """The first part that differs, what it is in these, what it is in those."""
    a, b = _by_path(these), _by_path(those)
    path = next((p for p in sorted(a.keys() | b.keys()) if a.get(p) != b.get(p)), "")
    return _quoted(path), a.get(path, "missing"), b.get(path, "missing")


def _quoted(path: str, indexed: bool = False) -> str:
    return f"'{path}'" if path else "an item of the batch" if indexed else "the batch"
