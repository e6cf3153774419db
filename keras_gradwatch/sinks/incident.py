"""``IncidentSink``: a folder for each incident, from which the step can be run again."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from keras_gradwatch.records import Finding

#: Findings that are about one step, which can be run again.
FINDINGS_OF_A_STEP = ("nonfinite", "mismatch", "exploding")


class Incident(Protocol):
    """A step as it was before it ran, and what came of it."""

    @property
    def step(self) -> int:
        """Its number."""
        ...

    @property
    def num_bytes(self) -> int:
        """About how much :meth:`write` writes."""
        ...

    def write(self, folder: Path) -> None:
        """Write everything needed to run the step again into an empty folder."""
        ...


class IncidentSink:
    """Writes what is needed to run a step again when it first goes wrong: model, weights, batch, seeds, optimizers.

    Each incident is a folder of plain files that appears whole or not at all; ``replay_incident(folder)`` or
    ``keras-gradwatch replay FOLDER`` runs the step again. The state is copied on the device before every tracked step,
    as long as there is room for an incident: that is the price of this sink.

    Args:
        folder: where the incidents go; it is made when there is none.
        max_incidents: folders it may hold, those of earlier runs included.
        max_bytes: bytes it may hold, those of earlier runs included. An incident takes about twice the size of weights
            and optimizer, and the batch.
        findings: names of the findings that are incidents.

    Raises:
        ValueError: ``max_incidents`` or ``max_bytes`` is below 1.

    Example:
        ``GradWatch(sinks=(IncidentSink("incidents/"),))``
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, max_incidents: int = 3, max_bytes: int = 1_000_000_000,
        findings: Sequence[str] = FINDINGS_OF_A_STEP,
    ) -> None:  # fmt: skip
        if max_incidents < 1 or max_bytes < 1:
            raise ValueError(
                f"Received max_incidents={max_incidents}, max_bytes={max_bytes}. Expected at least 1 of each. "
                "Leave them out if in doubt, or leave out the sink."
            )
        self.folder, self.max_incidents, self.max_bytes = Path(folder), int(max_incidents), int(max_bytes)
        self.findings = tuple(findings)

    def open(self, tensors: Any, attributes: Any) -> None:
        """Make sure that the folder can be written to.

        Raises:
            OSError: it cannot.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()

    def __call__(self, finding: Finding) -> None:
        """Nothing: what is written comes with the incident."""

    def wants_incidents(self) -> bool:
        """Whether there is room for another one."""
        return len(self._incidents()) < self.max_incidents

    def incident(self, finding: Finding, incident: Incident) -> None:
        """Write the incident, if the finding is of a kind asked for and there is room.

        Raises:
            OSError: the disk is full, or the folder may not be written to. Nothing is left behind.
        """
        if finding.finding not in self.findings or not self.wants_incidents():
            return
        if self._bytes() + incident.num_bytes > self.max_bytes:
            raise OSError(
                f"an incident of about {incident.num_bytes:,} bytes does not fit into max_bytes={self.max_bytes:,}"
            )
        unfinished = self.folder / f".{uuid.uuid4().hex}"
        unfinished.mkdir(parents=True)
        try:
            incident.write(unfinished)
            os.replace(unfinished, self._free_name(f"{finding.finding}-step-{incident.step}"))
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _incidents(self) -> list[Path]:
        return [path.parent for path in self.folder.glob("[!.]*/incident.json")]

    def _bytes(self) -> int:
        return sum(file.stat().st_size for path in self._incidents() for file in path.iterdir() if file.is_file())

    def _free_name(self, name: str) -> Path:
        names = (self.folder / (f"{name}-{count}" if count else name) for count in range(1 + self.max_incidents))
        return next(path for path in names if not path.exists())
