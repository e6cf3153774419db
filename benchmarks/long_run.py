"""Feeds the history and both file sinks a million steps of ten tensors: memory and time per step must not grow.

    python benchmarks/long_run.py [steps]

Training itself is left out, so that all that is measured is what keeping the rows costs. Times are those of the
processor, which other programs on the machine disturb less than those of the clock.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from keras_gradwatch.history import History, read_history
from keras_gradwatch.records import STATISTICS, StepRecord, TensorInfo
from keras_gradwatch.sinks import CSVSink, ParquetSink, SinkSet

TENSORS = 10
WINDOWS = 10


def resident_mib() -> float:
    """Memory the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(steps: int) -> None:
    names = [f"dense_{index}" for index in range(TENSORS)]
    tensors = tuple(
        TensorInfo(layer=name, tensor=f"{name}/kernel", role="weight", depth=depth, shape=(8, 8))
        for depth, name in enumerate(names)
    )
    statistics = np.random.default_rng(0).random((1000, TENSORS, len(STATISTICS)))
    connected = np.ones(TENSORS, np.bool_)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {steps:,} steps of {TENSORS}")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "run.parquet", Path(folder) / "run.csv"]
        history = History(tensors, {})
        sinks = SinkSet([ParquetSink(paths[0]), CSVSink(paths[1])])
        sinks.open(tensors, {})
        for window in range(WINDOWS):
            start = time.process_time()
            first, last = window * steps // WINDOWS, (window + 1) * steps // WINDOWS
            for step in range(first + 1, last + 1):
                record = StepRecord(
                    step=step, epoch=window, loss=0.5, statistics=statistics[step % 1000], connected=connected
                )
                history.append(record)
                sinks.write(record)
            sinks.sum_up({"notes": []})
            micros = (time.process_time() - start) / (last - first) * 1e6
            print(f"to step {last:>9,}: {micros:6.1f} µs a step, {resident_mib():6.0f} MiB", flush=True)
        start = time.process_time()
        sinks.close()
        print(f"closed in {time.process_time() - start:.1f} s, {resident_mib():.0f} MiB", flush=True)
        del history
        for path in paths:
            start = time.process_time()
            frame = read_history(path)
            size = path.stat().st_size / 2**20
            assert len(frame) == steps * TENSORS, (path.name, len(frame))
            assert frame["step"].is_monotonic_increasing, path.name
            print(f"{path.name}: {len(frame):,} rows, {size:.0f} MiB, read in {time.process_time() - start:.1f} s")
            del frame
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, reading included")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
