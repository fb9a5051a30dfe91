"""Draws the two pictures of docs/architecture.md from the code: who imports whom, among packages and within mpi_util.

    python docs/rooms.py            # writes the pictures into docs/architecture.md
    python docs/rooms.py --check    # status 1 if the pictures there are not the code's

A room is a folder of `mpi_util/`, with all that is in it, or a file at its top. What counts as an import:

- an import statement, inside a function too;
- a string that is a module's name: of `import_module`, of `python -m`, or in a table of such names;
- the file of a module that is started as a script: its module was imported for its `__file__`.

Not counted: what is under `if TYPE_CHECKING`, which no process loads.
"""

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = ("mpi_util", "mpi_util_spinup", "mpi_util_weight_sync", "mpi_util_sb3", "policies", "trainer")
# Code for several machines is used from below, and found only there: its callers load it where such machines exist.
LOADED_FROM_BELOW = "mpi_util.cluster"
STARTS = {"__main__": "doctor", "serve": "simulators"}  # files at the top of mpi_util, and their rooms
Graph = dict[str, set[str]]


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
def imports() -> Graph:
    """The modules of this project that each module imports."""
    found = {}
    for name, path in modules().items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = _Loaded().visit(ast.parse(path.read_text()))
        loaded = {_module(target) for target in [*_statements(tree, package), *_strings(tree, package)]}
        found[name] = loaded - {"", name}
    return found


class _Loaded(ast.NodeTransformer):
    """Removes from a file what is for type checkers alone."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def _module(name: str) -> str:
    """The module that has this name, or the attribute of this name; "": it is none of ours."""
    return name if name in modules() else parent if (parent := name.rpartition(".")[0]) in modules() else ""


def _statements(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            source = ".".join(filter(None, [*base, node.module]))
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _strings(tree: ast.AST, package: str) -> Iterator[str]:
    """Strings that are the name of a module of ours: absolute, or after a package's name that is put in front."""
    inside = ["", f"{package}.", f"{package.partition('.')[0]}."]
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)}
    loads_by_name = not names.isdisjoint(("import_module", "__import__", "find_spec"))
    for text, before in _texts(tree):
        dotted = text.strip(".")
        name = next((name for start in inside if (name := start + dotted) in modules()), "")
        if "." in text or before == "-m" or (loads_by_name and "." in name):  # else it is a word, such as "mpi_util"
            yield name
        if before == "-m":
            yield f"{dotted}.__main__"


def _texts(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(each string of the code, of an f-string what is constant in it; the string before it in a list or a call)."""
    for node in ast.walk(tree):
        before = ""
        for child in ast.iter_child_nodes(node):
            text = ""
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                text = child.value
            elif isinstance(child, ast.JoinedStr):
                text = "".join(str(part.value) for part in child.values if isinstance(part, ast.Constant))
            if text and not isinstance(node, ast.JoinedStr):
                yield text, before
            before = text


def package_of(module: str) -> str:
    """The package at the top of the repository; `train` for train.py."""
    return module.partition(".")[0]


def room_of(module: str) -> str:
    """The room of mpi_util that a module is in; "" for a module of another package.

    `__init__.py` is the room `mpi_util`. A file that starts the program of a room is in it.
    """
    package, _, rest = module.partition(".")
    if package != "mpi_util":
        return ""
    first = rest.partition(".")[0]
    return f"mpi_util.{STARTS.get(first, first)}" if first else package


def between(group: Callable[[str], str]) -> Graph:
    """The groups of modules that each group imports."""
    found: Graph = {}
    for module, targets in imports().items():
        if here := group(module):
            found.setdefault(here, set()).update({group(target) for target in targets} - {"", here})
    return found


def downward(graph: Graph) -> Graph:
    """The graph without the arrows that go up: to LOADED_FROM_BELOW, from what that imports itself."""
    below = _reachable({**graph, LOADED_FROM_BELOW: graph.get(LOADED_FROM_BELOW, set())}, LOADED_FROM_BELOW)
    return {node: targets - ({LOADED_FROM_BELOW} if node in below else set()) for node, targets in graph.items()}


def floors(graph: Graph) -> list[list[str]]:
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


def drawing(graph: Graph) -> str:
    """Mermaid's text: one box for each node, floor by floor, an arrow to each node that it imports.

    Arrows that follow from others (a imports b, b imports c: a to c) are left out; those that go up are dashed.
    """
    solid = downward(graph)
    below = {node: _reachable(solid, node) for node in graph}
    lines = ["```mermaid", "flowchart TD"]
    for height, nodes in reversed(list(enumerate(floors(solid), 1))):
        lines.append(f"    subgraph floor{height}[ ]")
        lines += [f'        {_id(node)}["{_label(node)}"]' for node in nodes]
        lines.append("    end")
    for node, targets in sorted(solid.items()):
        direct = [t for t in sorted(targets) if not any(t in below[other] for other in targets - {t})]
        lines += [f"    {_id(node)} --> {_id(target)}" for target in direct]
        lines += [f"    {_id(node)} -.-> {_id(target)}" for target in sorted(graph[node] - targets)]
    return "\n".join([*lines, "```", ""])


def _reachable(graph: Graph, node: str) -> set[str]:
    found: set[str] = set()
    rest = set(graph[node])
    while rest:
        found |= rest
        rest = set().union(*(graph[r] for r in rest)) - found
    return found


def _id(node: str) -> str:
    return node.replace(".", "_")


def _label(node: str) -> str:
    path = modules()[node]
    for start, room in STARTS.items():
        if node == f"mpi_util.{room}":
            return f"{room}/, {start}.py"
    return node.removeprefix("mpi_util.") + ("/" if path.name == "__init__.py" else ".py")


def with_drawings(text: str) -> str:
    """The document with the pictures of today's code, each between its two marks."""
    for name, group in (("packages", package_of), ("rooms", room_of)):
        begin, end = f"<!-- {name}: made by docs/rooms.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + drawing(between(group)) + end + rest.split(end)[1]
    return text


def main() -> int:
    """Writes the pictures into the document, or checks them."""
    text = DOCUMENT.read_text()
    new = with_drawings(text)
    if "--check" in sys.argv[1:]:
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
