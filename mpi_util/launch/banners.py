"""Pass on what the ranks print, without the launchers' own banners.

A failed job ends with one line that names the rank; the dozen lines that mpiexec prints are shown only when nothing
better is known.
"""

from __future__ import annotations

import math
import os
import re
import select
import threading
import time
from typing import IO

# Open MPI draws lines of exactly 74 dashes (4.x: 55 too). Users draw such lines as well, so the first line inside must
# name the launcher.
_NAMES_OPEN_MPI = rb"\b(?:prterun|mpirun|mpiexec|orterun|MPI_ABORT)\b|^Primary job  terminated"
_HYDRA_HEAD = b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
_BLOCKS = (
    rb"\n?={60,}\n" + _HYDRA_HEAD + rb"\n(?:=  .*\n)*={60,}\n",
    rb"(?<!-)(?P<dashes>-{74}|-{55})\n.*(?:" + _NAMES_OPEN_MPI + rb").*\n(?:.*\n)*?(?P=dashes)\n",
)
_LINES = {  # how a line of a banner begins, and what must follow
    b"YOUR APPLICATION TERMINATED": rb" WITH THE EXIT STRING: ",
    b"This typically refers to a problem with your application": rb"\.",
    b"Please see the FAQ page": rb" for debugging suggestions",
    b"[mpiexec@": b"",
    b"[proxy:": b"",
    b"Abort(": rb"-?\d+\)(?: on node \d+ .*)?: (?:application called MPI_Abort\(|Fatal error in )",
    b"application called MPI_Abort(": b"",
    b"*** An error occurred in MPI_": b"",
}
_ALSO_PASSED = (b"Fatal error in ", b"*** An error")  # errors of MPI, of which more lines follow
_ANY_LINE = b"|".join(re.escape(start) + rest for start, rest in _LINES.items())
_BANNER = re.compile(b"|".join((*_BLOCKS, rb"^(?:" + _ANY_LINE + rb").*\n")), re.MULTILINE)

_RULER = re.compile(rb"\n?={60,}\n|(?<!-)(?:-{74}|-{55})\n")
# Hydra writes its block line by line, after an empty line.
_PART_OF_RULER = re.compile(rb"(?:^\n|\n?=+|-+)\Z", re.MULTILINE)
_LARGEST_BANNER_BYTES = 8192
_CHUNK_BYTES = 1 << 16
_HOLD_S = 0.05  # how long a line waits that may be the start of a banner: launchers write a banner at once
_LOOK_S = 0.5  # between two looks at the deadline
STDOUT, STDERR = 1, 2


class BannerFilter:
    """Splits one output stream of a launcher into what the ranks wrote and the launcher's banners."""

    def __init__(self) -> None:
        self.banners = ""  # those taken out so far, as text
        self.held = b""  # what may become a banner
        self._after_banner = False

    def feed(self, data: bytes) -> bytes:
        """What has just arrived -> what can be passed on: all, but for what may be the first part of a banner."""
        if self._after_banner:
            data = data.removeprefix(b"\0")  # Open MPI sends the end of its string along
        self._after_banner = False
        text = _BANNER.sub(self._keep, self.held + data)
        start = _banner_start(text)
        self.held = text[start:]
        return text[:start]

    def release(self) -> bytes:
        """What was held back: its rest did not come, so it was no banner."""
        held, self.held = self.held, b""
        return held

    def _keep(self, match: re.Match[bytes]) -> bytes:
        self.banners += match.group().decode(errors="replace")
        self._after_banner = match.end() == len(match.string)
        return match.group() if any(text in match.group() for text in _ALSO_PASSED) else b""


def _banner_start(text: bytes) -> int:
    """Where a banner may begin whose rest has not arrived; the text's length if nowhere."""
    tail_start = max(0, len(text) - _LARGEST_BANNER_BYTES)
    for ruler in _RULER.finditer(text, tail_start):
        line, newline, _ = text[ruler.end() :].partition(b"\n")  # what has arrived of the line that tells
        if b"=" in ruler.group():
            opens = line == _HYDRA_HEAD if newline else _HYDRA_HEAD.startswith(line)
        else:
            opens = not newline or re.search(_NAMES_OPEN_MPI, line) is not None
        if opens:
            return ruler.start()
    last_line = text.rpartition(b"\n")[2]
    if last_line and any(last_line.startswith(start) or start.startswith(last_line) for start in _LINES):
        return len(text) - len(last_line)
    part = _PART_OF_RULER.search(text, tail_start)
    return part.start() if part else len(text)


class Stream(threading.Thread):
    """Passes one output of the launcher on to ours, without the launcher's banners.

    It is a thread, so that a reader of ours that stalls (`train.py | less`) does not keep signals from the ranks. What
    has no reader any more (`| head`, a closed terminal) is dropped: the work of the ranks is not.

    Attributes:
        stalls: it waits for our reader.
        deadline: when it ends, as time.monotonic(), even if a process that left the job still holds its pipe open.
    """

    def __init__(self, source: IO[bytes], target: int):
        super().__init__(daemon=True)
        self.filter = BannerFilter()
        self.stalls = False
        self.deadline = math.inf
        self._source, self._target = source, target
        self._last_byte = b"\n"

    def run(self) -> None:
        """Until the source ends, or the deadline has come."""
        source = select.poll()
        source.register(self._source, select.POLLIN)
        while time.monotonic() < self.deadline:
            if not source.poll(1000 * (_HOLD_S if self.filter.held else _LOOK_S)):
                self._write(self.filter.release())
            elif data := os.read(self._source.fileno(), _CHUNK_BYTES):
                self._write(self.filter.feed(data))
            else:
                break
        self._write(self.filter.release())
        if self._last_byte != b"\n" and self._target == STDERR:
            self._write(b"\n")  # a rank's death has cut its line short, and ours follows

    def _write(self, data: bytes) -> None:
        self._last_byte = data[-1:] or self._last_byte
        room, self.stalls = select.poll(), True
        room.register(self._target, select.POLLOUT)
        try:
            while data and room.poll():  # then a pipe has room for PIPE_BUF bytes
                data = data[os.write(self._target, data[: select.PIPE_BUF]) :]
        except OSError:  # EPIPE; EIO of a terminal
            pass
        self.stalls = False
