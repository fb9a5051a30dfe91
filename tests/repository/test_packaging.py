"""What pip installs, and what a source distribution holds."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser

import pytest
from conftest import ROOT, run

import mpi_util
from trainer import train

FOLDERS = ("mpi_util", "policies", "trainer")


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


def test_the_wheel_carries_what_a_user_needs(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        about = Parser().parsestr(wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode())
    wanted = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert wanted | {"train.py", "mpi_util/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {
        *FOLDERS,
        "train.py",
        f"mpi_util-{mpi_util.__version__}.dist-info",
    }
    assert about["Version"] == mpi_util.__version__ in (ROOT / "CHANGELOG.md").read_text()
    text = about.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert "# mpi_util" in text and all(link.startswith("https:") for link in links), links


def test_the_source_distribution_is_complete(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    wanted = """tests/conftest.py tests/cluster/hosts.sh tests/ranks/harness.py examples/core.py docs/train.md
    constraints.txt benchmarks/record.py benchmarks/results/gather.json policies/rules.py"""
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


def test_the_command_works_from_anywhere(built, tmp_path):
    """As installed: the files of the wheel, and the function that its command calls."""
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "site")
    command = tmp_path / "mpi-util"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom mpi_util.__main__ import main\nsys.exit(main())\n")
    command.chmod(0o755)
    (tmp_path / "else").mkdir()

    def ran(*arguments, status=0):
        done = run([command, *arguments], 100, {"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path / "else")
        assert done.status == status, done.out + done.err
        return done

    out = ran("train", "InvertedPendulum-v4", "--total_steps", 2000, "--nprocs", 2, "--name", "a").out
    assert "continue: mpi-util train --resume runs/InvertedPendulum-v4/a-s0 --total_steps N" in out
    assert "mean return" in ran("watch", "runs/InvertedPendulum-v4/a-s0", "--episodes", 2).out
    assert ran("plot", "runs", "--out", "a.png").out == "a.png\n"
    ran("train", "--resume", "runs/InvertedPendulum-v4/a-s0", "--total_steps", 3000)
    assert ran("nix", status=2).err.count("\n") == 1


def test_training_is_a_call(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = train("InvertedPendulum-v4", nprocs=2, total_steps=2000, seed=3, overlap=True)
    assert folder.parent == tmp_path / "runs" / "InvertedPendulum-v4" and (folder / "policy.safetensors").exists()
    assert "2 processes" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match=r"has ended with status 2$"):
        train("Nix-v0")
    assert "cannot make environment" in capfd.readouterr().err and not os.path.exists("runs/Nix-v0")
