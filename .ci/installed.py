"""Run by .ci/package in an environment that has the package, its extra ``report`` and no backend."""

import importlib.metadata
import importlib.resources
import importlib.util
from pathlib import Path

import numpy as np

import keras_gradwatch
from keras_gradwatch.files import read_history, write_history
from keras_gradwatch.history import History
from keras_gradwatch.records import STATISTICS, StepRecord, TensorInfo
from keras_gradwatch.report import write_report

REQUIRED = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Keywords", "Classifier")

package = importlib.resources.files("keras_gradwatch")
assert "site-packages" in str(package), package
for name in ("py.typed", "report.html"):
    assert package.joinpath(name).is_file(), f"{name} is missing"
metadata = importlib.metadata.metadata("keras-gradwatch")
assert [name for name in REQUIRED if name not in metadata] == []
assert metadata["Version"] == keras_gradwatch.__version__
assert importlib.util.find_spec("tensorflow") is None, "this environment should have no backend"

kernel = TensorInfo(layer="dense", tensor="dense/kernel", role="weight", depth=0, shape=(2, 2))
history = History([kernel], {"model": "installed"})
for step in (1, 2, 3):
    numbers = np.array([[0.1, 0.1, 0.1, 0.0, 0.0, 1.0, 1e-3]])
    assert numbers.shape[1] == len(STATISTICS)
    history.append(StepRecord(step=step, epoch=0, loss=1 / step, statistics=numbers, connected=np.ones(1, bool)))
write_history(history.to_frame(), "run.csv")
page = write_report(read_history("run.csv"), Path("run.html")).read_text(encoding="utf-8")
assert "dense" in page
print(f"{keras_gradwatch.__version__} from {package}: a report of {len(page):,} bytes")
