"""Compatibility with ONNX, where the packages are installed: the norm as a file for inference."""

from __future__ import annotations

import importlib
import importlib.util
import io
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import nn

from normexp.checks.card import PASSED, Finding, failed, skipped
from normexp.checks.probing import first_line
from normexp.checks.subject import Shape, Subject, relative_change, show, values

PACKAGES = ("onnx", "onnxscript")  # the format and its evaluator; what torch exports with
CLOSE = 1e-4  # of float32


def exports_to_onnx(subject: Subject) -> Finding:
    """torch.onnx.export in evaluation, and the exported graph computes what the norm does."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return skipped(f"{package} is not installed")
    shape = subject.largest
    norm = subject.trained(shape).eval()
    try:
        graph = _export(norm, shape)
    except Exception as error:  # of the exporter, any kind
        return failed(f"{_reason(error)}, {show(shape)}")
    x = values(shape, seed=1)  # not what it was traced with, which a graph may hold as a constant
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(graph)
    (out,) = evaluator.run(None, {graph.graph.input[0].name: x.numpy()})
    with torch.no_grad():
        change = relative_change(norm(x), torch.from_numpy(out))
    if change > CLOSE:
        return failed(f"exported outputs differ by {change:.2g}, {show(shape)}")
    return PASSED


def _export(norm: nn.Module, shape: Shape) -> Any:
    """The model's protocol buffer. What the exporter prints on its way is dropped."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        program = torch.onnx.export(norm, (values(shape),), dynamo=True, verbose=False)
    assert program is not None
    return program.model_proto


def _reason(error: BaseException) -> str:
    """What the exporter's long message goes back to, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error) if isinstance(error, Exception) else type(error).__name__
