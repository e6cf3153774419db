"""Every backend says the same: the figures of this one against those kept in ``backend_figures.json``."""

import json

import numpy as np
import pytest
from backend_figures import FILE, MODELS, figures

KEPT = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_gets_the_same_answer(name: str) -> None:
    """Same weights and batch: same loss and norms to 1e-5, same verdict per tensor, same culprits and findings."""
    found, kept = figures(name), KEPT[name]
    assert list(found) == list(kept)
    assert (found["verdicts"], found["culprits"], found["findings"]) == (
        kept["verdicts"], kept["culprits"], kept["findings"],
    )  # fmt: skip
    np.testing.assert_allclose(found["loss"], kept["loss"], rtol=1e-5)
    for kind in ("norms", "weights"):
        assert list(found[kind]) == list(kept[kind])
        for tensor, value in kept[kind].items():
            # A gradient that is zero by mathematics is rounding noise, different everywhere.
            noise = 1e-6 * max(kept[kind].values()) if found["verdicts"][tensor] == "zero" else 0.0
            np.testing.assert_allclose(found[kind][tensor], value, rtol=1e-5, atol=noise, err_msg=f"{kind} {tensor}")
