"""An optimizer step as a CUDA graph: recorded once, then replayed by a single launch.

A step of a small network is some hundred short kernels, and launching each takes the CPU longer
than running it takes the GPU. A graph keeps all of a step's launches, with the addresses of their
tensors and every Python number as it was. From outside only tensors that are copied into it change:
the batch, the dropout keys and the learning rates, from which all randomness of a step follows.
What the step itself changes, it changes in place (`RecordedStep._tensors`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normexp.batching.replicas import Batch, Replicas
from normexp.errors import one_line

log = logging.getLogger(__name__)

Run = Callable[[Batch, "Tensor | None"], Tensor]  # a step from its batch and dropout keys
NOT_RECORDED = "cuda_graph=true: steps run eagerly, since %s"
# Eager steps before a recording: they create the state of the optimizer and choose kernels.
WARM_UP = 2
PLAIN = (bool, int, float, str, type(None))


class CudaGraph:
    """The kernels that `function` launches, to be launched again; it does not run meanwhile."""

    device = "cuda"  # type of the device whose steps it records; the tests have another

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        current, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
        # An old graph that is collected meanwhile would end the recording.
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(
                self.graph, pool, self.side_stream(), capture_error_mode="thread_local"
            ):
                self.output = function()
        except BaseException:
            # Before torch 2.13 its allocator would take the recording for one that still runs, and
            # fail when Lightning empties its cache at the end of the training.
            with suppress(RuntimeError):  # it has ended
                torch._C._cuda_endAllocateToPool(current.device_index, pool)
                torch._C._cuda_releasePool(current.device_index, pool)
            raise
        finally:
            gc.enable()
            torch.cuda.set_stream(current)  # torch 2.11 does not after an error

    @staticmethod
    @cache
    def side_stream() -> torch.cuda.Stream:
        return torch.cuda.Stream()  # of the one device on which a process trains

    @classmethod
    @contextmanager
    def warming_up(cls) -> Iterator[None]:
        """Runs the block on the stream that records, as torch asks for."""
        side, current = cls.side_stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.output


class RecordedStep:
    """Takes the first steps eagerly, records the next one, and replays it from then on.

    The recording is used only if its replay ends with the same values as the step itself; otherwise
    a line says why it is not. Short batches, such as the last one of an epoch, run eagerly.

    All steps, the eager ones too, get their learning rates as float32 tensors. So a resumed run,
    whose first steps are eager again, ends with the same bits.

    Args:
        batch_size: samples of a full batch.

    Attributes:
        why_not: why steps are not recorded any more; None as long as they are.
        num_replayed: steps so far.
    """

    def __init__(self, replicas: Replicas, optimizer: Optimizer, batch_size: int) -> None:
        self.replicas = replicas
        self.optimizer = optimizer
        self.batch_size = batch_size
        self.why_not: str | None = None
        self.num_replayed = 0
        self._num_warm = 0
        self._recording: _Recording | None = None
        device = next(replicas.parameters()).device
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]

    def start_chunk(self) -> None:
        """Drops a recording that holds no longer, since callbacks have changed the networks."""
        if self._recording is None or self._recording.fingerprint == self._fingerprint():
            return
        self.close()
        if (why := why_not_recorded(self.replicas, self.optimizer)) is not None:
            self._give_up(why)

    def close(self) -> None:
        """Frees the memory of the recording."""
        self._recording, self._num_warm = None, 0

    def take(self, run: Run, batch: Batch, keys: Tensor | None) -> Tensor:
        """Takes a step; returns the losses (S,)."""
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        is_full = batch["targets"].shape[1] == self.batch_size
        if self.why_not is not None or not is_full:
            return self._run(run, batch, keys)
        if self._recording is None:
            if self._num_warm == WARM_UP:
                return self._record(run, batch, keys)
            self._num_warm += 1
            return self._run(run, batch, keys)
        if self._recording.settings != self._settings():
            self._give_up("something besides the learning rate changes in the optimizer")
            return self._run(run, batch, keys)
        self.num_replayed += 1
        return self._recording.replay(batch, keys)

    def _run(self, run: Run, batch: Batch, keys: Tensor | None) -> Tensor:
        with CudaGraph.warming_up(), self._rates_as_tensors():
            return run(batch, keys)

    def _record(self, run: Run, batch: Batch, keys: Tensor | None) -> Tensor:
        """Takes this step eagerly; then records it, and compares its replay from the same start."""
        before, fingerprint = self._state(), self._fingerprint()
        losses = self._run(run, batch, keys)
        after, gradients = self._state(), self._gradients()
        if fingerprint != self._fingerprint():
            self._give_up("a step replaces tensors or changes attributes of modules")
            return losses
        self._write(before)
        try:
            with self._rates_as_tensors(is_recording=True):
                recording = _Recording(run, batch, keys, self.replicas)
            self._write(before)
            replayed = recording.replay(batch, keys)
            found = [replayed, *self._state(), *self._gradients().values()]
            if not _equal_values(found, [losses, *after, *gradients.values()]):
                self._give_up("a replay does not end as the step itself")
        except Exception as error:  # of torch, of CUDA, or of a norm that reads a value
            first = _first_of(error)
            if not isinstance(first, Exception):  # Ctrl-C, in whose place torch raises its own
                raise first from None
            self._give_up(one_line(first))
        torch.clear_autocast_cache()  # its weights may lie in the graph's memory
        if self.why_not is None:
            recording.fingerprint, recording.settings = fingerprint, self._settings()
            self._recording = recording
        else:
            self._write(after)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        return losses

    def _give_up(self, why: str) -> None:
        self.why_not, self._recording = why, None
        log.info(NOT_RECORDED, why)

    @contextmanager
    def _rates_as_tensors(self, *, is_recording: bool = False) -> Iterator[None]:
        """Inside the block the optimizer reads its rates from tensors, as a graph must."""
        groups = self.optimizer.param_groups
        names = ("lr", "capturable")
        own = [{name: group[name] for name in names if name in group} for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if is_recording and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)

    # What a recording keeps as it was, and what a step changes

    def _settings(self) -> list[dict[str, Any]]:
        """All numbers in the groups of the optimizer but the rates."""
        changing = ("params", "lr", "initial_lr")
        return [
            {name: value for name, value in group.items() if name not in changing}
            for group in self.optimizer.param_groups
        ]

    def _fingerprint(self) -> list[Any]:
        """Addresses, what is trained, and the plain attributes and hooks of every module."""
        found: list[Any] = [(t.data_ptr(), t.requires_grad) for t in self._tensors()]
        for module in self.replicas.modules():
            plain = {k: v for k, v in vars(module).items() if isinstance(v, PLAIN)}
            found.append((plain, _num_hooks(module)))
        return found

    def _tensors(self) -> list[Tensor]:
        """All that a step writes to and the next one reads."""
        states = self.optimizer.state.values()
        of_optimizer = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        return [*self.replicas.parameters(), *self.replicas.buffers(), *of_optimizer]

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {p: p.grad for p in self.replicas.parameters() if p.grad is not None}

    def _state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self._tensors()]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for tensor, value in zip(self._tensors(), values, strict=True):
            tensor.copy_(value)


class _Recording:
    """A recorded step, with the tensors from which it reads a batch and the dropout keys.

    Attributes:
        fingerprint, settings: those of the `RecordedStep` for which it holds.
    """

    fingerprint: list[Any]
    settings: list[dict[str, Any]]

    def __init__(self, run: Run, batch: Batch, keys: Tensor | None, replicas: Replicas) -> None:
        self.batch = {name: value.clone() for name, value in batch.items()}
        self.keys = None if keys is None else keys.clone()
        self.graph = CudaGraph(lambda: run(self.batch, self.keys))
        self.gradients = {p: p.grad for p in replicas.parameters()}

    def replay(self, batch: Batch, keys: Tensor | None) -> Tensor:
        for name, value in self.batch.items():
            value.copy_(batch[name])
        if self.keys is not None and keys is not None:
            self.keys.copy_(keys)
        losses = self.graph.replay()
        for parameter, gradient in self.gradients.items():  # an eager step has its own
            parameter.grad = gradient
        return losses.clone()


def _equal_values(found: list[Tensor], expected: list[Tensor]) -> bool:
    """True if all values are equal, NaN to NaN."""
    return all(
        torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    )


def _first_of(error: BaseException) -> BaseException:
    """The error that came first: torch raises another while it ends a recording."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def why_not_recorded(replicas: Replicas, optimizer: Optimizer) -> str | None:
    """What keeps steps from being recorded, as far as that can be told without trying.

    Only code of torch and of this package is known to keep its state in tensors.
    """
    if next(replicas.parameters()).device.type != CudaGraph.device:
        return "they run on a CPU"
    if replicas.has_foreign_draws:
        return "a module draws from torch's global generator"
    for part in (optimizer, *replicas.modules()):
        if type(part).__module__.partition(".")[0] not in ("torch", "normexp"):
            return f"{type(part).__name__} is neither of torch nor of normexp"
    for module in replicas.modules():
        if _num_hooks(module):
            return f"{type(module).__name__} has hooks"
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            return f"{type(optimizer).__name__} is neither fused nor capturable"
    return None


def _num_hooks(module: nn.Module) -> int:
    hooks = (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_pre_hooks, module._backward_hooks),
    )
    return sum(map(len, hooks))
