"""Draws the rooms of docs/architecture.md from the imports of the code, and checks which way they point.

    python docs/rooms.py            # writes the drawing into docs/architecture.md
    python docs/rooms.py --check    # status 1 if the drawing there is not the code's

A room is a folder with code, or a file at the top of `mpi_util/`. Imports inside functions count too.
"""

import ast
import functools
import graphlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = ("mpi_util", "policies", "trainer")
BEGIN, END = "<!-- rooms: made by docs/rooms.py -->\n", "<!-- end of rooms -->"


@functools.cache
def modules() -> dict[str, Path]:
    """The file of each module, by dotted name; `train` is train.py."""
    found = {"train": ROOT / "train.py"}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules of this project that each module imports."""
    return {name: _imports_of(name, path) - {name} for name, path in modules().items()}


def _imports_of(name: str, path: Path) -> set[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            inner = {f"{target}.{alias.name}" for alias in node.names}
            found |= {i if i in modules() else target for i in inner}
    return found & modules().keys()


def room_of(module: str) -> str:
    """The folder of a module; the module itself at the top of `mpi_util`."""
    path = modules()[module]
    in_folder = path.name == "__init__.py" or path.parent in (ROOT, ROOT / "mpi_util")
    return module if in_folder else module.rpartition(".")[0]


def room_imports() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for module, targets in imports().items():
        rooms = found.setdefault(room_of(module), set())
        rooms |= {room_of(target) for target in targets} - {room_of(module)}
    return found


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """The nodes by height, the lowest first: each one above all that it imports.

    Raises:
        graphlib.CycleError: they import each other in a circle, which it names.
    """
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    result = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        result.append(ready)
        sorter.done(*ready)
    return result


def drawing() -> str:
    """Mermaid's text: one box for each room, floor by floor, an arrow to each room that it imports.

    Arrows that follow from others (a imports b, b imports c: a to c) are left out.
    """
    graph = room_imports()
    below = {room: _reachable(graph, room) for room in graph}
    lines = ["```mermaid", "flowchart TD"]
    for height, rooms in reversed(list(enumerate(floors(graph), 1))):
        lines.append(f"    subgraph floor{height}[ ]")
        lines += [f'        {_id(room)}["{_label(room)}"]' for room in rooms]
        lines.append("    end")
    for room, targets in sorted(graph.items()):
        direct = [t for t in sorted(targets) if not any(t in below[other] for other in targets - {t})]
        lines += [f"    {_id(room)} --> {_id(target)}" for target in direct]
    return "\n".join([*lines, "```", ""])


def _reachable(graph: dict[str, set[str]], room: str) -> set[str]:
    found: set[str] = set()
    rest = set(graph[room])
    while rest:
        found |= rest
        rest = set().union(*(graph[r] for r in rest)) - found
    return found


def _id(room: str) -> str:
    return room.replace(".", "_")


def _label(room: str) -> str:
    path = modules()[room]
    return room.removeprefix("mpi_util.").replace(".", "/") + ("/" if path.name == "__init__.py" else ".py")


def main() -> int:
    """Writes the drawing into the document, or checks it."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    new = before + BEGIN + drawing() + END + rest.split(END)[1]
    if "--check" in sys.argv[1:]:
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
