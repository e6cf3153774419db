"""One adapter per backend. Nothing outside this folder knows which one runs."""

from __future__ import annotations

from typing import Any


def program_backend() -> Any:
    """The module that traces losses and gradients for the running Keras backend.

    Raises:
        NotImplementedError: the backend is not supported yet.
    """
    import keras

    name = keras.backend.backend()
    if name == "tensorflow":
        from keras_gradwatch.backends import tensorflow_program

        return tensorflow_program
    raise NotImplementedError(
        f"Keras runs on the {name!r} backend; gradient checks need 'tensorflow'. "
        "Set KERAS_BACKEND=tensorflow before importing keras."
    )
