"""Dealing in one process: what the collective tests cannot time."""

import importlib
import struct

import mpi_util

module = importlib.import_module("mpi_util.deal")  # the package's own name `deal` is the function


def test_a_round_that_is_closed_amid_a_take_stays_closed(monkeypatch):
    dealt = mpi_util.deal(5)

    class ClosedWhileReading:
        size = module._SLOT.size

        @staticmethod
        def unpack_from(*where):
            found = struct.unpack_from("qqqq", *where)
            dealt.close()  # as a signal handler, or rank 0 beside another rank, does
            return found

    monkeypatch.setattr(module, "_SLOT", ClosedWhileReading)
    assert next(iter(dealt)) == 0
    assert dealt.closed and list(dealt) == []
