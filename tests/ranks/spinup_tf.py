"""Models of TensorFlow: a session saved and restored, as Spinning Up's tools do it, and a Keras model."""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from mpi_util import UsageError
from mpi_util_spinup.logx import EpochLogger, load_weights, restore_tf_graph

tf1 = tf.compat.v1
folder = Path(sys.argv[2])
logger = EpochLogger(folder)

with tf.Graph().as_default(), tf1.Session() as sess:
    x = tf1.placeholder(tf.float32, (None, 3), name="x")
    w = tf1.get_variable("w", initializer=np.arange(6, dtype="f4").reshape(3, 2))
    pi = tf.matmul(x, w)
    sess.run(tf1.global_variables_initializer())
    logger.setup_tf_saver(sess, inputs={"x": x}, outputs={"pi": pi})
    logger.save_state({})
    sess.run(w.assign(w + 1))
    logger.save_state({})  # takes the place of the first
    logger.save_state({}, itr=7)
    expected = sess.run(pi, {x: np.eye(3)})
for name in ("tf1_save", "tf1_save7"):
    with tf.Graph().as_default(), tf1.Session() as sess:
        model = restore_tf_graph(sess, folder / name)
        assert set(model) == {"x", "pi"}
        assert np.array_equal(sess.run(model["pi"], {model["x"]: np.eye(3)}), expected)
    (folder / name / "model_info.json").unlink()  # as Spinning Up itself leaves it
    with tf.Graph().as_default(), tf1.Session() as sess:
        try:
            raise SystemExit(f"unpickled: {restore_tf_graph(sess, folder / name)}")
        except UsageError as error:
            assert "model_info.pkl is a pickle" in str(error)
        assert set(restore_tf_graph(sess, folder / name, trust=True)) == {"x", "pi"}
assert np.array_equal(load_weights(folder / "tf1_save" / "weights.npz")["w"], expected)
assert not [p for p in folder.iterdir() if p.name.startswith(".")]

net = tf.keras.Sequential([tf.keras.layers.Dense(2, name="out")])
net(np.ones((1, 3), "f4"))
logger = EpochLogger(folder / "keras")
logger.setup_tf_saver(net)
logger.save_state({"itr": 1})
logger.store(Loss=tf.constant(1.5), VVals=net(np.zeros((2, 3), "f4")))
logger.log_tabular("Loss", average_only=True)
logger.log_tabular("VVals")
logger.log_tabular("LossPi", tf.constant(0.5))
logger.dump_tabular()
assert (folder / "keras" / "progress.txt").read_text().split("\n")[1] == "1.5\t0.0\t0.0\t0.5"
again = tf.keras.models.load_model(folder / "keras" / "keras_save" / "model.keras")
assert np.array_equal(again(np.eye(3)), net(np.eye(3)))
weights = load_weights(folder / "keras" / "keras_save" / "weights.npz")
kernel, bias = (next(a for name, a in weights.items() if name.endswith(end)) for end in ("kernel", "bias"))
assert np.array_equal(kernel, net.get_weights()[0]) and np.array_equal(bias, net.get_weights()[1])
