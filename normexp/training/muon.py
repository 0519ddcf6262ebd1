"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from normexp.errors import UserError


class MuonAdamW(Optimizer):
    """Orthogonalized momentum for parameters of two dimensions, AdamW for the others.

    Both have one learning rate and one weight decay: torch.optim.Muon scales its update to the
    root mean square of AdamW's (arXiv:2502.16982). Matrices are the weights of linear maps and,
    unlike in most recipes, of embeddings; filters of convolutions have four dimensions. Seeds train
    one by one, since a stack of matrices has three.

    Args:
        params: groups of parameters.
        momentum: of Muon, with Nesterov's correction.
        betas, eps: of AdamW.

    Raises:
        UserError: a torch without Muon.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(
                f"optim=muon needs torch 2.9 or newer, this is {torch.__version__}; try optim=adamw"
            )
        groups = list(params)
        matrices = [group | {"params": select(group, is_matrix=True)} for group in groups]
        others = [group | {"params": select(group, is_matrix=False)} for group in groups]
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts: list[Optimizer] = []
        if matrices := [group for group in matrices if group["params"]]:
            muon = torch.optim.Muon(
                matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **common
            )
            self._parts.append(muon)
        if others := [group for group in others if group["params"]]:
            self._parts.append(AdamW(others, betas=betas, eps=eps, **common))
        super().__init__([*matrices, *others], common)
        self._share()

    def _share(self) -> None:
        """Gives both parts the groups and the state of the whole, which a load replaces."""
        rest = list(self.param_groups)
        for part in self._parts:
            count = len(part.param_groups)
            for group, defaults in zip(rest[:count], part.param_groups, strict=True):
                for name, value in defaults.items():
                    group.setdefault(name, value)
            part.param_groups, rest = rest[:count], rest[count:]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))
        self._share()


def select(group: Mapping[str, Any], *, is_matrix: bool) -> list[Tensor]:
    """The parameters of a group that are matrices, or those that are not."""
    return [parameter for parameter in group["params"] if (parameter.ndim == 2) == is_matrix]
