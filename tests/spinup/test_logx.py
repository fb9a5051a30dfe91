"""mpi_util_spinup.logx: tables, configurations, saved states and models."""

import collections
import dataclasses
import errno
import functools
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import RANKS, ROOT, fill, run
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_util.errors import UsageError
from mpi_util_spinup import savers
from mpi_util_spinup.logx import EpochLogger, Logger, load_weights
from mpi_util_spinup.table import Progress, say


@pytest.mark.parametrize(("mpi", "n"), [("openmpi", 1), ("mpich", 3), ("openmpi", 4)], indirect=["mpi"])
def test_epoch_logger_on_ranks(run_ranks, tmp_path, n):
    out = run_ranks("spinup_log.py", n, tmp_path / "run").out
    assert out.count("AverageEpRet") == 3  # one table a row, from rank 0


@pytest.mark.tensorflow
def test_models_of_tensorflow(tmp_path):
    finished = run([sys.executable, RANKS / "spinup_tf.py", 1, tmp_path], 120)
    assert finished.status == 0, finished.err


# ---- the table


def table(folder, name="progress.txt"):
    return [line.split("\t") for line in (Path(folder) / name).read_text().split("\n")[:-1]]


def logged(folder, *rows, **keywords):
    """A Logger that has written these rows."""
    logger = Logger(folder, **keywords)
    for row in rows:
        for key, val in row.items():
            logger.log_tabular(key, val)
        logger.dump_tabular()
    return logger


def test_rows_are_on_file_at_once_with_all_digits(tmp_path):
    logged(tmp_path, {"A": 1 / 3, "B": 7, "C": np.float32(0.1), "D": torch.tensor(2.5), "E": True, "F": np.array([4])})
    assert table(tmp_path) == [
        ["A", "B", "C", "D", "E", "F"],
        ["0.3333333333333333", "7", "0.10000000149011612", "2.5", "1", "4"],
    ]


def test_the_terminal_gets_a_box(tmp_path, capsys):
    logged(tmp_path, {"Epoch": 1, "EpRet": 1234.5678}, {"Epoch": 2})
    assert capsys.readouterr().out.splitlines()[1:] == [
        "-------------------------------------",
        "|           Epoch |               1 |",
        "|           EpRet |        1.23e+03 |",
        "-------------------------------------",
        "-------------------------------------",
        "|           Epoch |               2 |",
        "|           EpRet |                 |",
        "-------------------------------------",
    ]


def test_show_takes_the_place_of_all_that_is_printed(tmp_path, capsys):
    rows = []
    logger = logged(tmp_path, {"Epoch": 1}, show=rows.append)
    logger.save_config({"a": 1})
    assert rows == [{"Epoch": 1}] and capsys.readouterr().out == ""


keys = st.sampled_from(["Epoch", "EpRet", "LossPi", "ein Wort", "ß"])
rows_of_numbers = st.lists(st.dictionaries(keys, st.floats() | st.integers(-(10**20), 10**20), min_size=1), max_size=6)


@settings(max_examples=25, deadline=None)
@given(rows=rows_of_numbers, kept=st.integers(1, 6), more=rows_of_numbers)
def test_any_rows_come_back_as_they_were_written(tmp_path_factory, rows, kept, more):
    path = tmp_path_factory.mktemp("run") / "progress.txt"
    progress = Progress(path)
    for row in rows:
        progress.add(row)
        progress.write()
    with open(path, "a") as file:
        file.write("half a li")
    progress = Progress(path, keep_rows=kept)
    for row in more:
        progress.add(row)
        progress.write()
    header, *lines = table(path.parent) or [[]]
    back = [{key: cell for key, cell in zip(header, line) if cell} for line in lines]
    assert back == [{key: repr(value) for key, value in row.items()} for row in rows[:kept] + more]
    assert all(len(line) == len(header) for line in lines)
    damaged = [path.with_name("progress.txt.damaged")] * (kept > len(rows))
    assert sorted(path.parent.iterdir()) == [path, *damaged] and bool(progress.damage) == bool(damaged)


def test_nothing_that_happens_to_standard_output_ends_a_run(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    closed = io.StringIO()
    closed.close()
    ascii_alone = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    descriptors, first = os.listdir("/proc/self/fd"), os.readlink("/proc/self/fd/1")
    for stream in (os.fdopen(writer, "w"), closed, ascii_alone, None):
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(3):
            say("ü\n")
        assert (os.listdir("/proc/self/fd"), os.readlink("/proc/self/fd/1")) == (descriptors, first)


def test_a_resumed_run_keeps_rows_a_new_one_does_not(tmp_path, capsys):
    logger = logged(tmp_path, {"Epoch": 0}, {"Epoch": 1}, {"Epoch": 2})
    logger.save_config({"first": True})
    logged(tmp_path, {"Epoch": 1, "New": 0.5}, keep_rows=1)
    assert table(tmp_path) == [["Epoch", "New"], ["0", ""], ["1", "0.5"]]
    capsys.readouterr()
    logged(tmp_path, {"Epoch": 9})
    assert "holds an earlier run; its files are now progress.txt.1 and so on" in capsys.readouterr().out
    assert table(tmp_path) == [["Epoch"], ["9"]]
    assert table(tmp_path, "progress.txt.1")[1] == ["0", ""]
    assert not (tmp_path / "config.json").exists() and "first" in (tmp_path / "config.json.1").read_text()
    logged(tmp_path)
    assert table(tmp_path, "progress.txt.2") == [["Epoch"], ["9"]] and table(tmp_path) == []
    logged(tmp_path, keep_rows=0)
    assert not (tmp_path / "progress.txt.3").exists()


@pytest.mark.parametrize("name, kept", [("p[1].txt", "p[1].txt.1"), ("run.1", "run.1.2")])
def test_a_table_of_any_name_is_kept(tmp_path, name, kept):
    for epoch in (1, 2):
        logged(tmp_path, {"Epoch": epoch}, output_fname=name)
    assert [table(tmp_path, each)[1] for each in (name, kept)] == [["2"], ["1"]]


@pytest.mark.parametrize("val", ["a text\tof\nlines", None, [1.0, 2.0], np.zeros(2), 1j, {}, np.zeros(0)], ids=repr)
def test_what_is_no_number_is_a_cell_of_text(tmp_path, val):
    logged(tmp_path, {"Loss": val, "Epoch": 1}, {"Loss": 0.5, "Epoch": 2})
    text = " ".join(str(val).split())
    assert table(tmp_path) == [["Loss", "Epoch"], [text, "1"], ["0.5", "2"]]
    logged(tmp_path, {"Loss": 1, "Epoch": 3}, keep_rows=2)
    assert table(tmp_path)[1:] == [[text, "1"], ["0.5", "2"], ["1", "3"]]


@pytest.mark.slow
def test_two_processes_do_not_write_one_folder(tmp_path):
    code = (
        "import sys\nfrom mpi_util_spinup.logx import Logger\nlogger = Logger(sys.argv[1])\n"
        "logger.log_tabular('Epoch', 1); logger.dump_tabular(); print('there', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, tmp_path]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    while other.stdout.readline() != "there\n":
        pass
    for keep_rows in (None, 1):
        with pytest.raises(UsageError, match="another run, which has not ended, writes to this folder"):
            Logger(tmp_path, keep_rows=keep_rows)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.txt"]
    other.kill()
    other.communicate()
    logger = Logger(tmp_path, keep_rows=1)
    assert Logger(tmp_path, keep_rows=1).output_dir == logger.output_dir  # of one process


def test_spinning_up_finds_the_latest_save(tmp_path):
    """Its test_policy reads iterations from the names of files with `model`, and folders with `tf1_save`, in them."""
    for _ in range(2):
        logger = Logger(tmp_path)
        logger.setup_pytorch_saver(torch.nn.Linear(2, 2))
        for itr in (None, 10):
            logger.save_state({}, itr)
        (tmp_path / "tf1_save7").mkdir()
        logger.log_tabular("Epoch", 1)
        logger.dump_tabular()
    names = [path.name for path in (tmp_path / "pyt_save").iterdir()]
    assert [int(name.split(".")[0][5:]) for name in names if len(name) > 8 and "model" in name] == [10]
    assert [int(path.name[8:]) for path in tmp_path.iterdir() if "tf1_save" in path.name and len(path.name) > 8] == [7]


def test_a_key_used_twice_in_a_row(tmp_path):
    logger = EpochLogger(tmp_path)
    logger.log_tabular("StdEpRet", 1)
    with pytest.raises(UsageError, match="'StdEpRet' is in this row already; call dump_tabular"):
        logger.log_tabular("EpRet")
    for key in ("a\tb", "a\nb", "", 3):
        with pytest.raises(UsageError, match="name of a column"):
            logger.log_tabular(key, 1)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write to .*file/run: Not a directory"):
        Logger(tmp_path / "file" / "run")


def test_without_a_folder_each_run_has_a_new_one():
    first, second = Logger(), Logger()
    assert first.output_dir != second.output_dir and "experiments" in first.output_dir


def test_samples_of_any_kind_are_copied(tmp_path):
    logger, buffer = EpochLogger(tmp_path), np.ones((2, 2))
    logger.store(X=buffer)
    logger.store(X=torch.full((3,), 2.0, requires_grad=True))
    logger.store(X=3)
    logger.store(X=[4.0, 5.0])
    buffer[:] = -1
    everything = [1.0] * 4 + [2.0] * 3 + [3.0, 4.0, 5.0]
    assert np.allclose(logger.get_stats("X"), (np.mean(everything), np.std(everything)))
    with pytest.raises(UsageError, match="store: 'X' takes real numbers"):
        logger.store(X="word")


@pytest.mark.slow_if(n=1)
@pytest.mark.parametrize("n, way", [(1, "recovers"), (2, "stays")])
def test_a_full_disk_does_not_end_the_program(run_ranks, tmp_path, n, way):
    done = run_ranks("full_disk.py", n, tmp_path, way, status=int(way == "stays"))
    failed = [line for line in done.out.splitlines() if line.startswith("cannot write")]
    assert [line.split(":")[0] for line in failed] == [
        "cannot write a row",
        *["cannot write the state and the models"] * 2,
    ]
    assert all(f": {tmp_path}" in line and "File too large" in line for line in failed)
    assert done.out.count("is done") == n and "Traceback" not in done.err
    if way == "recovers":
        assert table(tmp_path)[0] == ["Epoch", "AverageRet", "StdRet", "New"]
        assert [line[0] for line in table(tmp_path)[1:]] == ["1", "2", "3", "4"]
        assert pickle.loads((tmp_path / "vars.pkl").read_bytes()) == {"i": 4} and done.err == ""
    else:
        assert done.err.count("Logger: cannot write a row") == 1 and "the state and the models" in done.err
        assert len(load_weights(tmp_path / "pyt_save" / "weights.npz")) == 2


@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_a_row_that_is_torn_or_missing_is_named(tmp_path, capsys, where):
    logged(tmp_path, *({"Epoch": i, "Loss": i / 7} for i in (1, 2, 3, 4)))
    path = tmp_path / "progress.txt"
    lines = path.read_text().split("\n")
    torn = "\n".join([*lines[:where], lines[where][:1] + "\0" * 20, *lines[where + 1 :]])
    lost = {0: "2 of 2 rows are missing or damaged: 1, 2", 3: "1 of 3 rows are missing or damaged: 3"}
    path.write_text(torn)
    capsys.readouterr()
    rows = []
    logged(tmp_path, {"Epoch": 9, "Loss": 0}, keep_rows=3 if where == 3 else 2, show=rows.append)
    assert lost.get(where, f"1 of 2 rows are missing or damaged: {where}") in capsys.readouterr().out
    kept = {0: "", 1: "2", 2: "1", 3: "12"}[where]
    assert [row[0] for row in table(tmp_path)[1:]] == [*kept, "9"]
    assert (tmp_path / "progress.txt.damaged").read_text() == torn
    path.unlink()
    logged(tmp_path, {"Epoch": 9}, keep_rows=7)
    assert "progress.txt: 7 of 7 rows are missing or damaged: 1, 2, 3, 4, 5, ...\n" in capsys.readouterr().out
    assert table(tmp_path) == [["Epoch"], ["9"]]


# ---- the configuration


@dataclasses.dataclass
class Config:
    hidden: tuple = (64, 64)
    act: type = torch.nn.Tanh
    limit: float = float("inf")


class Holder:
    def __init__(self):
        self.own, self._private, self.me = 3, object(), self


def function(a):
    return a


def test_any_value_becomes_json(tmp_path):
    config = {
        "config": Config(),
        "function": function,
        "lambda": lambda a: a,
        "partial": functools.partial(function, 1),
        "small": np.arange(3, dtype="f4"),
        "large": np.zeros((64, 3)),
        "number": np.int64(4),
        "path": Path("a/b"),
        "set": {2, 1},
        3: Holder(),
        "lr": 1e-3,
        "long": np.longdouble(1.5),
        "module": json,
    }
    logger = Logger(tmp_path, exp_name="name")
    logger.save_config(config)
    text = (tmp_path / "config.json").read_text()
    got = json.loads(text, parse_constant=pytest.fail)
    assert got["config"] == {"hidden": [64, 64], "act": "Tanh", "limit": "inf"}
    assert (got["function"], got["exp_name"], got["module"]) == ("function", "name", "json")
    assert (got["small"], got["number"], got["path"], got["set"]) == ([0.0, 1.0, 2.0], 4, "a/b", [1, 2])
    assert got["large"] == "float64 array (64, 3)"
    assert list(got["3"].values()) == [{"own": 3, "me": "..."}]
    assert got["long"] == 1.5 and " at 0x" not in text and '    "lr":\t0.001,' in text
    logger.save_config(Config())
    assert set(json.loads((tmp_path / "config.json").read_text())) == {"hidden", "act", "limit", "exp_name"}
    logger.save_config(collections.OrderedDict(a=1))
    assert json.loads((tmp_path / "config.json").read_text())["a"] == 1
    with pytest.raises(UsageError, match="save_config takes a dict"):
        logger.save_config(5)


# ---- state and models


def test_torch_models_are_saved_whole_and_as_weights(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    net.brain = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    logger = EpochLogger(tmp_path)
    logger.setup_pytorch_saver(net)
    logger.save_state({"epoch": 1})
    logger.save_state({"epoch": 5}, itr=5)
    assert pickle.loads((tmp_path / "vars5.pkl").read_bytes()) == {"epoch": 5}
    again = torch.load(tmp_path / "pyt_save" / "model5.pt", weights_only=False)
    assert torch.equal(again[0].weight, net[0].weight)
    weights = load_weights(tmp_path / "pyt_save" / "weights.npz")
    assert set(weights) == set(net.state_dict())
    assert np.array_equal(weights["0.weight"], net[0].weight.detach().numpy()) and weights["brain"].dtype == np.float32
    assert weights["1.num_batches_tracked"] == 0 and weights["1.num_batches_tracked"].dtype == np.int64
    code = (
        "import sys; from mpi_util_spinup.logx import load_weights; "
        f"found = load_weights({str(tmp_path / 'pyt_save' / 'weights5.npz')!r}); "
        "print(found['0.weight'].shape, 'torch' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], 60).out == "(2, 3) False\n"
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    kinds = [f"pyt_save/{kind}" for itr in ("", "5") for kind in (f"model{itr}.pt", f"weights{itr}.npz")]
    assert names == sorted(["progress.txt", "vars.pkl", "vars5.pkl", *kinds])


@pytest.mark.slow
def test_what_cannot_be_pickled_is_a_warning_once(tmp_path, capsys):
    net = torch.nn.Linear(2, 2)
    net.rule = lambda: 0
    logger = Logger(tmp_path)
    logger.setup_pytorch_saver({"pi": net, "opt": torch.optim.Adam(net.parameters()), "file": np.ones(2)})
    for _ in range(2):
        logger.save_state({"env": lambda: 0})
    out = capsys.readouterr().out
    assert out.count("Warning: could not pickle state_dict") == 1
    assert out.count("Warning: could not pickle the model, only its weights are saved") == 1
    weights = load_weights(tmp_path / "pyt_save" / "weights.npz")
    assert {"pi/weight", "pi/bias", "file"} <= set(weights)
    assert not list(tmp_path.rglob(".*"))


def test_a_save_that_fails_leaves_the_last_good_one(tmp_path):
    logger = Logger(tmp_path)
    logger.save_state({"good": 1})
    logger.save_state({"bad": lambda: 0})
    assert pickle.loads((tmp_path / "vars.pkl").read_bytes()) == {"good": 1}


def test_torch_on_a_full_disk_raises_the_systems_error(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, content):
            if self.tell() > 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    monkeypatch.setattr(savers, "_save_weights", lambda *_: None)
    monkeypatch.setattr(savers, "replace_file", lambda path, write: write(Full()))
    with pytest.raises(OSError, match="No space left on device"):
        savers.save_torch(torch.nn.Linear(100, 100), tmp_path, "")


@pytest.mark.tensorflow
def test_models_of_tensorflow_on_a_full_disk(small_disk):
    done = run([sys.executable, RANKS / "full_disk_tf.py", small_disk], 120)
    assert done.status == 0 and "Traceback" not in done.err, done.err


def test_a_run_does_not_begin_on_a_full_disk(small_disk):
    logger = Logger(small_disk / "run")
    fill(small_disk)
    with pytest.raises(UsageError, match=f"^Logger: cannot write to {small_disk}/run: No space left on device$"):
        logger.save_config({"a": 1})
    assert not list((small_disk / "run").glob(".*"))


def test_a_table_that_was_removed_is_written_again(tmp_path):
    logger = logged(tmp_path / "run", {"A": 1}, {"A": 2, "B": 3})
    for i, remove in enumerate([(tmp_path / "run" / "progress.txt").unlink, lambda: shutil.rmtree(tmp_path / "run")]):
        remove()
        logger.log_tabular("A", i)
        logger.dump_tabular()
    rows = [["A", "B"], ["1", ""], ["2", "3"], ["0", ""], ["1", ""]]
    assert table(tmp_path / "run") == rows
    resumed = Logger(tmp_path / "run", keep_rows=3)
    (tmp_path / "run" / "progress.txt").unlink()
    resumed.sync()
    assert table(tmp_path / "run") == rows[:4]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 broken"])
def test_weights_that_cannot_be_loaded(tmp_path, content):
    path = tmp_path / "model.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot load weights from .*model\.npz"):
        load_weights(path)
    np.savez(path, objects=np.array([{}], object))
    with pytest.raises(UsageError, match="cannot load weights"):
        load_weights(path)
