"""The TensorFlow backend: Keras models and tf.function, on the CPU or a GPU.

Read `nets` first. Import TensorFlow from `setup` only.
"""

from policies.tf.nets import PolicyNet, ValueNet

__all__ = ["PolicyNet", "ValueNet"]
