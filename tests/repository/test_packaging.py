"""What pip installs, and what a source distribution holds."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser

import pytest
from conftest import ROOT, run

import mpi_util

PACKAGES = ("mpi_util", "mpi_util_spinup", "mpi_util_weight_sync", "mpi_util_sb3")
IMPORT_ALL = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not found.name.endswith("__main__"):
            print(importlib.import_module(found.name).__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, source distribution), made from the files that git knows."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).exists():  # not so one that is being removed
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source], 200)
    assert done.status == 0, done.out + done.err
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.mark.slow
def test_the_wheel_holds_mpi_util_and_its_satellites(built):
    """train.py, trainer/ and policies/, names that every such project has, stay in the repository."""
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        about = Parser().parsestr(wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode())
    code = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert code | {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"mpi_util-{mpi_util.__version__}.dist-info"}
    assert about["Version"] == mpi_util.__version__ in (ROOT / "CHANGELOG.md").read_text()
    text = about.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert "# mpi_util" in text and all(link.startswith("https:") for link in links), links


@pytest.mark.slow
def test_the_source_distribution_is_complete(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    wanted = """tests/conftest.py tests/cluster/hosts.sh tests/ranks/harness.py examples/core.py docs/train.md
    constraints.txt benchmarks/record.py benchmarks/results/gather.json policies/rules.py trainer/run.py train.py"""
    for name in wanted.split():
        assert (root / name).exists(), name
    environment = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run(
        [sys.executable, "-m", "pytest", "-q", "tests/policies/test_returns.py", "tests/core/test_deal.py"],
        100,
        environment,
        cwd=root,
    )
    assert done.status == 0, done.out


@pytest.mark.slow
def test_what_is_installed_works_from_anywhere(built, tmp_path):
    """As installed: the files of the wheel, and the function that its command calls."""
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "train.py").write_text("open('executed', 'w')")  # a project's own

    def ran(*arguments, status=0):
        done = run([sys.executable, *arguments], 100, {"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path / "else")
        assert done.status == status, done.out + done.err
        return done

    pytest.importorskip("stable_baselines3")
    pytest.importorskip("torchrl")
    paths = ran("-c", IMPORT_ALL, *PACKAGES).out.split()
    known = [str(path) for package in PACKAGES for path in (tmp_path / "site" / package).rglob("[!_]*.py")]
    assert set(known) <= set(paths)
    command = "import sys; from mpi_util.__main__ import main; sys.exit(main())"
    assert "doctor" in ran("-c", command).out and "usage: " in ran("-m", "mpi_util", "doctor", "--help").out
    assert ran("-c", command, "train", status=2).err.count("\n") == 1
    assert not (tmp_path / "else" / "executed").exists()
    assert "progress.txt" in ran("-m", "mpi_util_spinup.plot", "none", status=2).err
