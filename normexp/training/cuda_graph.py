"""An optimizer step as a CUDA graph: recorded once, then replayed by a single launch.

A step of a small network is some hundred short kernels, and launching each takes the CPU longer
than running it takes the GPU. A graph keeps all of a step's launches, with the addresses of their
tensors and every Python number as it was. Only tensors that are copied into it can change: the
batch, the dropout keys and the learning rates. All randomness of a step follows from these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normexp.batching.replicas import Batch, Replicas

log = logging.getLogger(__name__)

Run = Callable[[Batch, "Tensor | None"], Tensor]  # a step from its batch and dropout keys
NOT_RECORDED = "cuda_graph=true: steps run as they are, since %s"
WARM_UP = 2  # steps before the recording: they create the optimizer's state and choose kernels


class CudaGraph:
    """The kernels that `function` launches, to be launched again; it does not run meanwhile."""

    device = "cuda"
    stream: torch.cuda.Stream | None = None

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # Data of the next batches may be prepared by other threads meanwhile.
        with torch.cuda.graph(
            self.graph, stream=self.side_stream(), capture_error_mode="thread_local"
        ):
            self.output = function()

    @classmethod
    def side_stream(cls) -> torch.cuda.Stream:
        cls.stream = cls.stream or torch.cuda.Stream()
        return cls.stream

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
    """Runs the first steps as they are, records the next one, and replays it from then on.

    The recording is used only if its replay ends with the same bits as the step itself; otherwise
    a line says why it is not. Batches of another shape, such as the short last one of an epoch, run
    as they are.

    Attributes:
        why_not: why steps are no longer recorded; None as long as they are.
        num_replayed: steps so far.
    """

    def __init__(self, replicas: Replicas, optimizer: Optimizer) -> None:
        self.replicas = replicas
        self.optimizer = optimizer
        self.why_not: str | None = None
        self.num_replayed = 0
        self._num_warm = 0
        self._recording: _Recording | None = None
        device = next(replicas.parameters()).device
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]

    def start_chunk(self) -> None:
        """Drops the recording if callbacks have moved or frozen tensors since it was made."""
        if self._recording is not None and self._recording.places != self._places():
            self._recording, self._num_warm = None, 0

    def take(self, run: Run, batch: Batch, keys: Tensor | None) -> Tensor:
        """Takes a step; returns the losses (S,)."""
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        if self._recording is None and self.why_not is None and self._num_warm == WARM_UP:
            return self._record(run, batch, keys)
        if self._recording is not None and self._recording.fits(batch):
            if self._recording.settings == self._settings():
                self.num_replayed += 1
                return self._recording.replay(batch, keys)
            self._give_up("something besides the learning rate changes in the optimizer")
        self._num_warm += 1
        return self._run(run, batch, keys)

    def _run(self, run: Run, batch: Batch, keys: Tensor | None) -> Tensor:
        with CudaGraph.warming_up(), self._rates_in_place():
            return run(batch, keys)

    def _record(self, run: Run, batch: Batch, keys: Tensor | None) -> Tensor:
        """Takes this step as it is; then records it, and compares its replay."""
        before, places = self._state(), self._places()
        losses = self._run(run, batch, keys)
        after, gradients = self._state(), self._gradients()
        if places != self._places():
            self._give_up("a step replaces tensors instead of writing to them")
            return losses
        self._write(before)
        try:
            with self._rates_in_place(is_recording=True):
                recording = _Recording(run, batch, keys, self.replicas)
            self._write(before)
            replayed = recording.replay(batch, keys)
            found = [replayed, *self._state(), *self._gradients().values()]
            if not _same_bits(found, [losses, *after, *gradients.values()]):
                self._give_up("a replay does not end as the step itself")
        except Exception as error:  # of torch, of CUDA, or of a norm that reads a value
            self._give_up(str(error).splitlines()[0] if str(error) else type(error).__name__)
        torch.clear_autocast_cache()  # its weights may lie in the graph's memory
        if self.why_not is None:
            recording.places, recording.settings = places, self._settings()
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
    def _rates_in_place(self, *, is_recording: bool = False) -> Iterator[None]:
        """Gives the optimizer its rates as tensors, which a graph can read.

        Steps that run as they are get them too: rates in float64 round in another way, and a
        resumed training, whose first steps run as they are, would end with other bits.
        """
        groups = self.optimizer.param_groups
        own = [
            {name: group[name] for name in ("lr", "capturable") if name in group}
            for group in groups
        ]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if is_recording and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)

    def _settings(self) -> list[dict[str, Any]]:
        """What a recording keeps of the optimizer's groups."""
        changing = ("params", "lr", "initial_lr")
        return [
            {name: value for name, value in group.items() if name not in changing}
            for group in self.optimizer.param_groups
        ]

    def _tensors(self) -> list[Tensor]:
        """All that a step writes to and the next one reads."""
        states = self.optimizer.state.values()
        of_optimizer = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        return [*self.replicas.parameters(), *self.replicas.buffers(), *of_optimizer]

    def _places(self) -> list[Any]:
        """What a recording keeps of the networks: addresses, what is trained, and the modes."""
        addresses = [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors()]
        return [*addresses, *(module.training for module in self.replicas.modules())]

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
        places, settings: those of the `RecordedStep` for which it holds.
    """

    places: list[Any]
    settings: list[dict[str, Any]]

    def __init__(self, run: Run, batch: Batch, keys: Tensor | None, replicas: Replicas) -> None:
        self.batch = {name: value.clone() for name, value in batch.items()}
        self.keys = None if keys is None else keys.clone()
        self.graph = CudaGraph(lambda: run(self.batch, self.keys))
        self.gradients = {p: p.grad for p in replicas.parameters()}

    def fits(self, batch: Batch) -> bool:
        shapes, own = (
            {name: value.shape for name, value in one.items()} for one in (batch, self.batch)
        )
        return shapes == own

    def replay(self, batch: Batch, keys: Tensor | None) -> Tensor:
        for name, value in self.batch.items():
            value.copy_(batch[name])
        if self.keys is not None and keys is not None:
            self.keys.copy_(keys)
        losses = self.graph.replay()
        for parameter, gradient in self.gradients.items():  # a step as it is has its own
            parameter.grad = gradient
        return losses.clone()


def _same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    """True if all values are equal, NaN to NaN."""
    return all(
        torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    )


def why_not_recorded(replicas: Replicas, optimizer: Optimizer, chunk: int) -> str | None:
    """What keeps steps from being recorded, as far as that is known before the first one.

    Only code of torch and of this package is known to keep its state in tensors.
    """
    if next(replicas.parameters()).device.type != CudaGraph.device:
        return "they run on a CPU"
    if chunk == 1:
        return "chunk=1, or a callback acts on batches"
    if replicas.has_foreign_draws:
        return "a module draws from torch's global generator"
    for part in (optimizer, *replicas.modules()):
        if type(part).__module__.partition(".")[0] not in ("torch", "normexp"):
            return f"{type(part).__name__} is neither of torch nor of normexp"
    for module in replicas.modules():
        if module._forward_pre_hooks or module._forward_hooks or module._backward_hooks:
            return f"{type(module).__name__} has hooks"
    return None
