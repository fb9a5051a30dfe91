"""torchrl's own tests of weight synchronisation, with this package's scheme in place of torchrl's.

    git clone --depth 1 --branch v0.14.1 https://github.com/pytorch/rl
    python -m benchmarks.torchrl_suite rl          (needs the extra torchrl and pytest-timeout)

Taken are the tests of test_collectors.py and test_evaluator.py whose source names a scheme or updates weights. They run
twice: as they are, and with `MultiProcessWeightSyncScheme` of mpi_util wherever torchrl or a test takes
`MultiProcessWeightSyncScheme` or `SharedMemWeightSyncScheme` of torchrl, also where a collector chooses by itself. What
passes as it is must pass with ours, or be listed in `INTERNALS` with the reason; what is listed there and passes is an
error too. Those in `RACES` fail now and then with torchrl's own schemes, and do not count. Nothing of torchrl is kept
here.
"""

import importlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks import record
from mpi_util_weight_sync import MultiProcessWeightSyncScheme

FILES = ("test/test_collectors.py", "test/collectors/test_evaluator.py")
NAMES = re.compile(
    r"weight_sync|WeightSync|update_policy_weights|update_weights|receive_weights|weight_updater|weights="
)
BACKENDS = dict.fromkeys(("multiprocessing", "process"), "MultiProcessWeightSyncScheme")  # of `from_backend`
BACKENDS |= dict.fromkeys(("shared", "thread"), "SharedMemWeightSyncScheme")
OURS = "MPI_UTIL_TORCHRL_SUITE"  # set in the second run
INTERNALS = {  # pattern of test ids -> why they test torchrl's internals
    r"TestCollectorGeneric::test_update_weights\[": "workers are to see a change before the update: shared memory",
}
RACES = {  # pattern of test ids -> what happens now and then with any scheme
    # after 900 updates each in such a collector: 38 times with ours, 55 with SharedMem..., 27 with MultiProcess...
    r"test_multi_collector_bumps_on_update\[.*multi_async\]": "a batch that was under way at the update of one worker "
    "comes after a whole new one of the other, and is taken for a change without an update",
}


class SharedMemWeightSyncScheme(MultiProcessWeightSyncScheme):
    """The same, by the other's name, which is in test ids."""


REPLACED = {cls.__name__: cls for cls in (MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme)}


def pytest_configure(config: Any) -> None:
    """This module is also the plugin of both runs."""
    if not os.environ.get(OURS):
        return
    package = importlib.import_module("torchrl.weight_update")
    importlib.import_module("torchrl.collectors")
    theirs = {name: getattr(package, name) for name in REPLACED}
    schemes = importlib.import_module("torchrl.weight_update.weight_sync_schemes")
    for backend, name in BACKENDS.items():
        schemes.register_weight_sync_backend(backend)(REPLACED[name])
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "torchrl"]:
        for name, ours in REPLACED.items():
            if getattr(module, name, None) is theirs[name]:
                setattr(module, name, ours)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keeps the tests that are about weights."""
    items[:] = [item for item in items if NAMES.search(inspect.getsource(item.function))]


def main() -> None:
    parser = record.command_line(str(__doc__), repeats=1)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of pytorch/rl")
    parser.add_argument("--tests", default="", help="only those that match, as pytest's -k")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each test (default: 120)")
    args = parser.parse_args()
    if missing := [file for file in FILES if not (args.checkout / file).exists()]:
        sys.exit(f"torchrl_suite: {args.checkout} is no checkout of pytorch/rl: it has no {missing[0]}")
    version = (args.checkout / "version.txt").read_text().strip()
    installed = importlib.metadata.version("torchrl")
    if version != installed:
        print(f"torchrl_suite: the tests are of torchrl {version}, {installed} is installed", file=sys.stderr)
    theirs, ours = (outcomes(args, replaced) for replaced in (False, True))
    racing = {test: why for test in theirs for pattern, why in RACES.items() if re.search(pattern, test)}
    passing = [test for test, text in theirs.items() if not text and test not in racing]
    listed = {test: why for test in passing for pattern, why in INTERNALS.items() if re.search(pattern, test)}
    failing = {test: text for test in passing if (text := ours.get(test, "was not run"))}
    for test in sorted(failing.keys() ^ listed.keys()):
        print(f"{test}\n    {'passes, but is listed' if test in listed else failing[test]}")
    wrong = len(failing.keys() ^ listed.keys())
    claims = [
        record.claim("tests that pass with torchrl's schemes: of those not listed, fail with ours", wrong, at_most=0)
    ]
    counts = {
        "tests": len(theirs),
        "not counted": len(racing),
        "pass with torchrl's": len(passing),
        "pass with ours": len(passing) - len(failing),
    }
    record.save(args, counts, claims, torchrl=installed, tests_of=version, listed=listed, races=racing)
    sys.exit(wrong > 0)


def outcomes(args: Any, replaced: bool) -> dict[str, str]:
    """By test: "" if it passes or is skipped, else the last line of its error."""
    environment = {**os.environ, "PYTHONPATH": str(record.ROOT), OURS: "1" if replaced else ""}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.torchrl_suite", f"--junitxml={result}"]
        command += ["-W", "ignore", f"--timeout={args.timeout:g}", "-k", args.tests, *FILES]
        subprocess.run(command, cwd=args.checkout, env=environment)
        if not result.exists():
            sys.exit("torchrl_suite: pytest made no report; its output is above")
        found: dict[str, str] = {}
        for case in ElementTree.parse(result).iter("testcase"):
            problem = next((part for part in case if part.tag in ("failure", "error")), None)
            text = "" if problem is None else (problem.get("message") or problem.text or "?").strip()
            if case.find("skipped") is None:
                found[f"{case.get('classname')}::{case.get('name')}"] = text.splitlines()[0][:300] if text else ""
        return found


if __name__ == "__main__":
    main()
