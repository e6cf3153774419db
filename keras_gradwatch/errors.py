"""Exceptions that a caller may want to catch. Bad arguments raise ``TypeError`` or ``ValueError`` instead."""

from __future__ import annotations

import re

from keras_gradwatch.records import CheckResult, Finding


def gist(error: BaseException) -> str:
    r"""Type of an error and what went wrong, in one line of at most 300 characters.

    Keras puts a line in front that says where, a blank one, and what went wrong in bold (seen in Keras 3.15).

    Example:
        >>> gist(ValueError("Exception encountered when calling LSTM.call().\n\nThe batch sizes differ.\n"))
        'ValueError in LSTM.call(): The batch sizes differ.'
    """
    plain = re.sub(r"\x1b\[\d*m", "", str(error))
    where, what = "", [line.strip() for line in plain.splitlines() if line.strip()]
    if len(what) > 1 and (found := re.match(r"Exception encountered when calling (.*)\.$", what[0])):
        where, what = f" in {found[1]}", what[1:]
    return f"{type(error).__name__}{where}{': ' if what else ''}{what[0] if what else ''}"[:300]


class GradientError(Exception):
    """Something is wrong with the gradients, and the user asked to be stopped by it.

    Attributes:
        finding: the finding that raised it, ``None`` when it did not come from training.
        result: the gradient check behind it, ``None`` when there was none.

    Example:
        >>> try:
        ...     raise GradientCheckError("dense/kernel: analytic 1.1, numeric 1.0")
        ... except GradientError as error:
        ...     print(error, error.finding)
        dense/kernel: analytic 1.1, numeric 1.0 None
    """

    def __init__(self, message: str, *, finding: Finding | None = None, result: CheckResult | None = None) -> None:
        super().__init__(message)
        self.finding = finding
        self.result = result


class GradientCheckError(GradientError):
    """A backward pass disagrees with the slope of its forward pass."""


class NonFiniteGradientError(GradientError):
    """A loss or gradient became NaN or infinite."""
