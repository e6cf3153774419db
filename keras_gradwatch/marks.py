"""Which rows of a history a finding marks, and what the column ``findings`` says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from keras_gradwatch.records import FINDINGS, Finding, Int64Array, TensorInfo

BoolArray = npt.NDArray[np.bool_]

#: What a finding is on when no layer is to blame.
PSEUDO_LAYERS = ("data", "labels", "loss", "sample_weight")


def marked_tensors(finding: Finding, tensors: Sequence[TensorInfo]) -> BoolArray:
    """Weights and inputs whose rows a finding marks.

    Those it names; if it names none, those of its layer; and if it is on the loss or the data alone, as ``stalled`` and
    ``oscillating`` are, every weight: then it is about the run as a whole.

    Args:
        finding: what was found.
        tensors: weights and inputs of the model.

    Returns:
        Shape ``[V]``, True where marked; nowhere if the finding names nothing that is among the tensors.
    """
    named = set(finding.tensors) or {finding.tensor} - {""}
    if named:
        return np.array([info.tensor in named for info in tensors], np.bool_)
    if finding.layer in PSEUDO_LAYERS:
        return np.array([info.role == "weight" for info in tensors], np.bool_)
    return np.array([info.layer == finding.layer for info in tensors], np.bool_)


def finding_column(
    findings: Sequence[Finding], step: Int64Array, place: Int64Array, tensors: Sequence[TensorInfo]
) -> Any:
    """The names of the findings that hold for each row, comma-joined, most alarming first; empty when healthy.

    Args:
        findings: all findings of the run.
        step: shape ``[rows]``.
        place: shape ``[rows]``, which of the tensors a row is about.
        tensors: weights and inputs of the model.

    Returns:
        A pandas array of strings, shape ``[rows]``.
    """
    names = dict.fromkeys(finding.finding for finding in findings)
    labels = [""]
    codes = np.zeros(len(step), np.int64)  # index into labels
    for name in sorted(names, key=_order):
        active = np.zeros(len(step), np.bool_)
        for finding in findings:
            if finding.finding == name:
                span = (finding.first_step <= step) & (step <= finding.last_step)
                active |= span & marked_tensors(finding, tensors).take(place)
        # Each combination of names met so far is followed by one that has this name as well.
        before = np.unique(codes[active])
        followed_by = np.zeros(len(labels), np.int64)
        followed_by[before] = len(labels) + np.arange(len(before))
        codes[active] = followed_by[codes[active]]
        labels += [f"{labels[code]},{name}" if labels[code] else name for code in before]
    return pd.array(labels, dtype="str").take(codes)


def with_findings(frame: pd.DataFrame, findings: Sequence[Finding]) -> pd.DataFrame:
    """The rows of a history with their ``findings`` column as these findings have it.

    Args:
        frame: columns ``step, role, layer, tensor`` and more.
        findings: all findings of the run.

    Returns:
        A frame with a new column ``findings``.
    """
    identity = pd.MultiIndex.from_arrays([frame[name].astype("str") for name in ("role", "layer", "tensor")])
    place, distinct = identity.factorize()
    tensors = [
        TensorInfo(layer=layer, tensor=tensor, role="input" if role == "input" else "weight", depth=0, shape=())
        for role, layer, tensor in distinct
    ]
    column = finding_column(findings, frame["step"].to_numpy(), place.astype(np.int64), tensors)
    return frame.assign(findings=column)


def _order(name: str) -> int:
    return FINDINGS.index(name) if name in FINDINGS else len(FINDINGS)
