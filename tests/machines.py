"""Pretended hosts: namespaces of this machine, which tests/cluster/hosts.sh makes."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, TESTS, mpi_environment


class Machines:
    """The pretended hosts h1 and h2."""

    def __init__(self, folder: Path, visible: list[Path]):
        keep = [str(path) for path in visible if str(path).startswith("/tmp/")]
        self._environment = os.environ | {"HOSTS_DIR": str(folder), "KEEP": " ".join(keep)}
        self._call("up", 2)
        self.left()  # what sshd and the shell leave when they are used first

    def _call(self, *arguments: object) -> str:
        command = ["bash", str(TESTS / "cluster" / "hosts.sh"), *map(str, arguments)]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        self._call("down")

    def again(self) -> None:
        """All is new."""
        self.close()
        self._call("up", 2)

    def command(self, host: str, *words: object) -> list[str]:
        return ["bash", str(TESTS / "cluster" / "hosts.sh"), "on", host, *map(str, words)]

    def on(self, host: str, *words: object) -> str:
        return self._call("on", host, *words)

    def __getattr__(self, name: str):
        """cut, heal, kill."""
        return lambda host: self._call(name, host)

    def left(self) -> dict[str, list[str]]:
        """Processes, and files in /tmp and /dev/shm, that are not the hosts' own."""
        found = {}
        for host in ("h1", "h2"):
            files = self.on(host, "sh", "-c", "ls -d /tmp/*mpi* /tmp/hydra* /tmp/prte* /dev/shm/* 2>/dev/null || true")
            lines = self._call("ps", host).splitlines() + files.splitlines()
            found[host] = [line for line in lines if "sshd: root" not in line and " ssh " not in line]
        return found

    def start(self, host: str, mpi: str, *words: object, env: dict[str, str] | None = None) -> subprocess.Popen:
        """Starts this Python there, with the repository's mpi_util."""
        environment = self._environment | {"PYTHONPATH": str(ROOT)} | mpi_environment(mpi) | (env or {})
        environment.pop("TMPDIR", None)  # of the tests, on this machine
        command = self.command(host, sys.executable, *words)
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, host: str, mpi: str, *words: object, timeout: float = 90, env: dict[str, str] | None = None):
        """(status, output, errors)"""
        process = self.start(host, mpi, *words, env=env)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return process.returncode, out, err
