"""Saves a session and a Keras model on a disk of 800 kB that is full for a while: full_disk_tf.py DISK."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from mpi_util_spinup.logx import Logger, load_weights, restore_tf_graph

tf1 = tf.compat.v1
disk = Path(sys.argv[1])


def fill(leave):
    """Takes all but that many bytes."""
    with open(disk / "others", "wb", buffering=0) as file:
        try:
            while file.write(bytes(500)):
                pass
        except OSError:
            os.truncate(file.fileno(), file.tell() - leave)


def check(logger, name, leave):
    """Saves, then fails to save on a full disk, then saves again."""
    logger.save_state({})
    before = {path: path.read_bytes() for path in (logger._folder / name).rglob("*") if path.is_file()}
    assert before and not logger.unsaved
    fill(leave)
    logger.save_state({})
    (reason,) = logger.unsaved.values()
    assert f": {logger.output_dir}" in reason and reason.endswith("No space left on device"), reason
    assert all(path.read_bytes() == content for path, content in before.items())
    assert not [path for path in logger._folder.rglob(".*")]
    (disk / "others").unlink()
    logger.save_state({})
    assert not logger.unsaved


net = tf.keras.Sequential([tf.keras.layers.Dense(100, name="out")])
net(np.ones((1, 300), "f4"))
logger = Logger(disk / "keras")
logger.setup_tf_saver(net)
check(logger, "keras_save", 50_000)
saved = load_weights(disk / "keras" / "keras_save" / "weights.npz").values()
assert all(np.array_equal(a, b) for a, b in zip(saved, net.get_weights(), strict=True))

for leave in (0, 5_000, 60_000):
    with tf.Graph().as_default(), tf1.Session() as sess:
        x = tf1.placeholder(tf.float32, (None, 150))
        pi = tf.matmul(x, tf1.get_variable("w", initializer=np.eye(150, 100, dtype="f4")))
        sess.run(tf1.global_variables_initializer())
        logger = Logger(disk / str(leave))
        logger.setup_tf_saver(sess, inputs={"x": x}, outputs={"pi": pi})
        check(logger, "tf1_save", leave)
    with tf.Graph().as_default(), tf1.Session() as sess:
        assert set(restore_tf_graph(sess, disk / str(leave) / "tf1_save")) == {"x", "pi"}
    shutil.rmtree(disk / str(leave))

with tf.Graph().as_default(), tf1.Session() as sess:  # what is no failure of the disk is reported as it is
    x = tf1.placeholder(tf.float32, (None, 2))
    pi = tf.matmul(x, tf1.get_variable("w", initializer=np.eye(2, dtype="f4")))
    logger = Logger(disk / "unset")
    logger.setup_tf_saver(sess, inputs={"x": x}, outputs={"pi": pi})
    try:
        raise SystemExit(f"saved: {logger.save_state({})}")
    except tf.errors.FailedPreconditionError:
        pass
