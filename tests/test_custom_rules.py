"""Rules of one's own, as the documentation shows them."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_gradwatch import GradWatch, rules
from keras_gradwatch.rules import DEFAULT_RULES

PAGE = (Path(__file__).parents[1] / "docs" / "findings.md").read_text(encoding="utf-8")


def snippet() -> str:
    found = re.search(r"## Your own rules.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def fit(watch: GradWatch, *, scale: float) -> keras.Model:
    keras.utils.set_random_seed(1)
    data = np.random.default_rng(0).standard_normal((32, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="only")], name="net")
    model.layers[0].kernel.assign(np.full((3, 2), scale))
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.fit(data, data[:, :2], batch_size=8, epochs=3, verbose=0, callbacks=[watch])
    return model


def test_the_rule_of_the_documentation_works() -> None:
    """The snippet runs as it stands: quiet on small weights, and a large one is found, named and stops training."""
    for scale, expected in ((1.0, []), (200.0, [("heavy", "only", "net/only/kernel")])):
        names: dict[str, Any] = {}
        exec(snippet(), names)
        watch = names["watch"]
        watch.verbose = 0
        model = fit(watch, scale=scale)
        found = watch.findings[watch.findings["finding"] == "heavy"]
        assert list(found[["finding", "layer", "tensor"]].itertuples(index=False, name=None)) == expected
        assert model.stop_training == bool(expected)
    assert "a norm above 100" in found["message"].item()


def test_the_snippet_is_ten_lines_of_code() -> None:
    """What one must write fits ten lines."""
    assert len([line for line in snippet().splitlines() if line.strip()]) <= 10


def test_built_in_rules_have_the_names_of_the_documentation() -> None:
    """Every default rule is a public class of keras_gradwatch.rules, and in the table."""
    table = re.findall(r"^\|.*?\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {type(rule).__name__ for rule in DEFAULT_RULES} <= set(table)
    assert all(getattr(rules, type(rule).__name__) is type(rule) for rule in DEFAULT_RULES)


def test_a_threshold_moves_with_the_rule_object() -> None:
    """The same run explodes for a rule whose limit is absurdly low, and not for the rule as it is."""
    counts = []
    for own in ([rules.Exploding(blowout=1e-9)], [rules.Exploding()]):
        watch = GradWatch(rules=own, check_freq=None, verbose=0)
        fit(watch, scale=1.0)
        counts.append(len(watch.findings))
    assert counts == [1, 0]
