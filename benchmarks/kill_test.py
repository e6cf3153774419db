"""Kills a training run with ``kill -9`` again and again, resumes it each time, and looks at the files it leaves.

    python benchmarks/kill_test.py [kills]

A small model trains with ``ParquetSink`` and ``CSVSink`` and goes on after each kill from what it last saved, in one
stroke (the files of ``BackupAndRestore`` are broken when a kill meets them half written). After every kill both files
must be readable and hold each step once, in order; no row of a step before the last flush may be missing. The run tells
what it flushed through a pipe. Steps after the last flush are lost by design: what was saved may be newer than that, so
a resumed run can leave a gap where a kill cut the file off, and nowhere else.
"""

from __future__ import annotations

import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
import os, sys
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras, numpy as np
from keras_gradwatch import CSVSink, GradWatch, ParquetSink
folder = sys.argv[1]
keras.utils.set_random_seed(0)
generator = np.random.default_rng(0)
x, y = generator.standard_normal((256, 8), dtype="float32"), generator.standard_normal((256, 1), dtype="float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
class Telling:
    def flush(self):
        held = len(self._history)
        last = int(self._last)
        super().flush()
        if held:
            print(f"{type(self).__name__} {last}", flush=True)
    def write(self, record):
        self._last = record.step
        super().write(record)
class Parquet(Telling, ParquetSink): pass
class CSV(Telling, CSVSink): pass
sinks = [Parquet(f"{folder}/run.parquet", flush_rows=40), CSV(f"{folder}/run.csv", flush_rows=40)]
saved = f"{folder}/model.keras"
if os.path.exists(saved):
    model = keras.models.load_model(saved)

class Backup(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch % 25 == 24:
            self.model.save(f"{folder}/new.keras")
            os.replace(f"{folder}/new.keras", saved)

watch = GradWatch(sinks=sinks, verbose=0, check_freq=None)
model.fit(x, y, batch_size=8, epochs=10**6, verbose=0, callbacks=[Backup(), watch])
"""


def one_run(folder: str, patience: float) -> dict[str, int]:
    """Starts the run, kills it some seconds after it began to train, and returns the last step each sink flushed."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    while not any(line.startswith(("CSV", "Parquet")) for line in lines):
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(process.stderr.read()[-2000:] if process.stderr else "")
        lines.append(line)
    time.sleep(patience)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate()
    flushed: dict[str, int] = {}
    for line in [*lines, *out.splitlines()]:
        name, _, step = line.strip().partition(" ")
        if step:
            flushed[name] = int(step)
    return flushed


def main(kills: int) -> None:
    from keras_gradwatch import read_history

    random.seed(0)
    ends: dict[str, set[int]] = {"Parquet": set(), "CSV": set()}  # where kills cut the files off
    print(f"{platform.machine()}, {os.cpu_count()} cores; {kills} kills")
    with tempfile.TemporaryDirectory() as folder:
        for kill in range(1, kills + 1):
            flushed = one_run(folder, random.uniform(0.0, 1.5))
            told = []
            for name, file in (("Parquet", "run.parquet"), ("CSV", "run.csv")):
                frame = read_history(Path(folder) / file)
                rows = frame.groupby("step").size()
                assert frame["step"].is_monotonic_increasing, (name, "steps out of order")
                assert (rows == 4).all(), (name, "rows lost or doubled", rows[rows != 4])
                gaps = set(rows.index[:-1][rows.index.to_numpy()[1:] != rows.index.to_numpy()[:-1] + 1])
                assert rows.index[0] == 1, (name, "the first step is missing")
                assert gaps <= ends[name], (name, "steps missing where no kill cut the file off", gaps)
                assert rows.index[-1] >= flushed[name], (name, "flushed rows lost")
                ends[name].add(int(rows.index[-1]))
                told.append(f"{name}: {len(frame)} rows, flushed to step {flushed[name]}, last {rows.index[-1]}")
            print(f"kill {kill}: " + "; ".join(told), flush=True)
    print(f"{kills} of {kills}: readable, nothing flushed lost, nothing doubled")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
