"""A Wide & Deep model that TensorFlow trained becomes a bundle."""

from recspec.tf_import.wide_deep import import_tf
