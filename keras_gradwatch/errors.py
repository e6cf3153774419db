"""Exceptions that a caller may want to catch. Bad arguments raise ``TypeError`` or ``ValueError`` instead."""

from __future__ import annotations

from keras_gradwatch.records import CheckResult, Finding


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
