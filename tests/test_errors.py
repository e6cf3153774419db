import pickle

import pytest

from keras_gradwatch.errors import GradientCheckError, GradientError, NonFiniteGradientError
from keras_gradwatch.records import CheckResult, Finding

FINDING = Finding(
    finding="mismatch",
    layer="scale_1",
    first_step=1,
    last_step=3,
    value=0.1,
    limit=3e-7,
    message="its backward is wrong",
)
RESULT = CheckResult(tensors=(), checks=(), loss=0.5)


@pytest.mark.parametrize("error_class", [GradientCheckError, NonFiniteGradientError])
def test_one_except_catches_them_all(error_class: type[GradientError]) -> None:
    """Every error of the package is a GradientError."""
    with pytest.raises(GradientError, match="dense/kernel"):
        raise error_class("dense/kernel: NaN in 3 of 12 elements")


@pytest.mark.parametrize("error_class", [GradientError, GradientCheckError, NonFiniteGradientError])
def test_error_carries_finding_and_result(error_class: type[GradientError]) -> None:
    """What raised the error can be read from it; without a source both are None."""
    error = error_class("stopped", finding=FINDING, result=RESULT)
    assert error.finding is FINDING
    assert error.result is RESULT
    assert error_class("stopped").finding is None
    assert error_class("stopped").result is None


def test_error_survives_pickling() -> None:
    """An error raised in a worker process arrives whole."""
    error = pickle.loads(pickle.dumps(GradientCheckError("stopped", finding=FINDING, result=RESULT)))
    assert type(error) is GradientCheckError
    assert str(error) == "stopped"
    assert error.finding == FINDING
    assert error.result == RESULT
