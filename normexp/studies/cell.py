"""A cell made ready: its parts built, probed and named, before anything is trained or written."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from normexp.batching.sizes import Sizes
from normexp.build import NetworkBuilder, build_data, build_network, build_norm
from normexp.checks.causality import refusal_of
from normexp.checks.coverage import check_coverage
from normexp.checks.probing import probe_batch
from normexp.checks.traits import PROBE_SAMPLES, Traits, measure_traits
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.records.identity import canonical, cell_id, source_digest

logger = logging.getLogger(__name__)

GROUPS = ("norm", "model", "data", "optim")


@dataclass(frozen=True)
class Cell:
    """Everything about a training but its seed, built and checked."""

    cfg: DictConfig
    id: str
    identity: dict[str, Any]  # canonical config, the content of the id's hash
    record: dict[str, Any]  # plain values that go into result.json
    sizes: Sizes
    data: Data
    build: NetworkBuilder
    traits: Traits
    num_parameters: int
    num_steps: int

    @property
    def title(self) -> str:
        return f"{self.record['norm']} on {self.record['data']}"

    @property
    def study_dir(self) -> Path:
        return Path(self.cfg.runs_dir) / self.cfg.study

    @property
    def directory(self) -> Path:
        return self.study_dir / self.id


def prepare_cell(cfg: DictConfig, choices: Mapping[str, str]) -> Cell:
    """Builds and probes what `cfg` asks for; a user's mistake is raised here, before any work.

    Args:
        choices: the name chosen in each config group, for the record.
    """
    sizes = Sizes(cfg.batch_size, cfg.micro_batch_size, cfg.norm_batch_size)
    data = build_data(cfg)
    num_steps = count_steps(cfg, data)
    norm = build_norm(cfg, sizes)
    build = build_network(cfg, norm, data)
    network = build(cfg.seed)
    traits = measure_traits(network, data, sizes)
    if not traits.mixes_samples:
        norm.norm_batch_size = None  # nothing to split: every size is the same training
    identity = canonical(_identity(cfg, data), mixes_samples=traits.mixes_samples)
    return Cell(
        cfg=cfg,
        id=cell_id(identity),
        identity=identity,
        record=_record(cfg, choices, identity, traits),
        sizes=sizes,
        data=data,
        build=build,
        traits=traits,
        num_parameters=sum(p.numel() for p in network.parameters()),
        num_steps=num_steps,
    )


def count_steps(cfg: DictConfig, data: Data) -> int:
    """Optimizer steps of the whole training."""
    num_samples = len(data.train)
    rounding = math.floor if cfg.drop_last else math.ceil
    steps = rounding(num_samples / cfg.batch_size)
    if steps == 0:
        raise UserError(
            f"batch_size={cfg.batch_size} is more than the {num_samples} training samples of "
            f"data={data.name}; try batch_size={num_samples} or drop_last=false"
        )
    if cfg.drop_last and num_samples % cfg.batch_size:
        left_out = num_samples % cfg.batch_size
        logger.info("drop_last leaves out %d of %d samples an epoch", left_out, num_samples)
    return steps * cfg.epochs


def _identity(cfg: DictConfig, data: Data) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    config = {str(key): value for key, value in plain.items()}
    for group in ("norm", "model", "data"):
        digest = _source_digest_of(config[group]["_target_"])
        if digest is not None:
            config[group]["source_digest"] = digest
    config["data"]["digest"] = data.digest
    return config


def _source_digest_of(target: str) -> str | None:
    """Digest of the user's own file that a target comes from; None for installed packages."""
    try:
        file = inspect.getsourcefile(get_object(target))
    except TypeError:  # built in
        return None
    return None if file is None else source_digest(Path(file))


def _record(
    cfg: DictConfig, choices: Mapping[str, str], identity: dict[str, Any], traits: Traits
) -> dict[str, Any]:
    sizes = ("batch_size", "micro_batch_size", "norm_batch_size")
    kept = ("epochs", "lr", "lr_rule", "eps", "max_grad_norm", "drop_last")
    return {
        **{group: choices[group] for group in GROUPS},
        **{size: cfg[size] for size in sizes},
        **{key: cfg[key] for key in kept},
        "precision": cfg.trainer.precision,
        "mixes_samples": traits.mixes_samples,
        "identity": identity,
    }
