"""Two pretended hosts for the tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, skip_without_hosts
from machines import Machines


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two hosts; skipped where they cannot be made."""
    skip_without_hosts()
    folder = tmp_path_factory.mktemp("hosts")
    made = Machines(folder / "hosts", [ROOT, Path(sys.prefix), folder.parent])
    yield made
    made.close()
