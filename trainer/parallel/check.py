"""Whether a model can be split over workers: checked on the driver, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.models.family import ModelFamily, family_of
from trainer.models.hf import text_configuration

if TYPE_CHECKING:
    from trainer.parallel.compiled import Compile
    from trainer.parallel.recompute import Recompute

SUPPORTED_STYLES = frozenset({"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"})
"""Entries of a transformers tensor-parallel plan that `parallel/tensor.py` carries out."""


def check_tensor_parallel(config: Mapping[str, Any], model: Any, degree: int, seq_len: int) -> None:
    """Checks that `degree` tensor ranks can share the model.

    Raises:
        ConfigError: the model has no usable plan, the plan leaves modules out, a dimension does
            not divide, or there is dropout.
    """
    if degree == 1:
        return
    family = family_of(config["model_type"])
    why = _why_not_split(model, family)
    if why:
        raise ConfigError(
            "train.parallel.tensor",
            degree,
            f"{config['model_type']} cannot be split over tensor ranks here: {why}",
            "Use tensor = 1 and a larger shard degree",
        )
    divided = {name: config[name] for name in family.divided if isinstance(config.get(name), int)}
    for name, size in {**divided, "seq_len": seq_len}.items():
        if size % degree:
            raise ConfigError(
                "train.parallel.tensor",
                degree,
                f"it does not divide {name} = {size}",
                f"Use a divisor of {size}, or change {name}",
            )
    dropped = _dropout(config)
    if dropped:
        raise ConfigError(
            "train.task.model.settings",
            ", ".join(f"{name} = {value}" for name, value in dropped.items()),
            f"{degree} tensor ranks, which draw alike, would drop the same of their different "
            "tokens and heads",
            f"Set {', '.join(dropped)} to 0, or use train.parallel.tensor = 1",
        )


def check_converted(converters: Sequence[object], model: Any, family: ModelFamily) -> None:
    """Checks that tensor ranks can share what the converters have left of a model that they could
    share: another module around it, or one more inside, has no place in the plan.

    Raises:
        ConfigError: they cannot.
    """
    if why := _why_not_split(model, family):
        raise ConfigError(
            "train.converters",
            converters,
            f"what they leave of the model cannot be split over tensor ranks: {why}",
            "Keep the modules and their names, or use train.parallel.tensor = 1",
        )


def check_compiled_tensor(
    compiled: Compile, recompute: Recompute | float | None, degree: int
) -> None:
    """Checks that torch can compile blocks that tensor ranks share.

    Where a graph takes their mesh as an input (torch 2.13; 2.11 writes it into the graph), a block
    that is computed again whole in backward saves the mesh, and behind it the state of random
    numbers of its attention: autograd takes what is in between for a tensor.

    Args:
        compiled: whether blocks are compiled.
        recompute: see `TrainConfig.recompute`.
        degree: tensor ranks.

    Raises:
        ConfigError: it cannot.
    """
    whole = not (recompute in (None, "selective") or isinstance(recompute, float))
    if compiled == "off" or degree == 1 or not whole:
        return
    import torch._functorch.config

    from trainer.parallel.compiled import MESHES_IN_GRAPHS

    if hasattr(torch._functorch.config, MESHES_IN_GRAPHS):
        raise ConfigError(
            "train.recompute",
            recompute,
            f"torch {torch.__version__} cannot compile blocks that are computed again whole and "
            f"shared by {degree} tensor ranks",
            "Use 'selective', a fraction such as 0.5, or train.compile = 'off'",
        )


def check_same_blocks(config: Mapping[str, Any], degree: int) -> None:
    """Checks that all workers go through the same blocks: they gather their parameters together.

    Args:
        config: the complete configuration.
        degree: workers that parameters are sharded over.

    Raises:
        ConfigError: each would leave out others.
    """
    for name in ("layerdrop", "decoder_layerdrop"):
        if degree > 1 and config.get(name):
            raise ConfigError(
                "train.task.model.settings",
                f"{name} = {config[name]}",
                f"each of the {degree} workers that parameters are sharded over would leave out "
                "other blocks, and gathers are of all of them",
                f"Use {name} = 0, or shard = 1 and context = 1",
            )


def _dropout(config: Mapping[str, Any]) -> dict[str, float]:
    """Settings by which a decoder drops numbers. Heads for other ends have their own, and
    layerdrop leaves out whole blocks."""
    return {
        name: value
        for name, value in text_configuration(config).to_dict().items()
        if "drop" in name
        and not name.startswith(("classifier", "summary"))
        and not name.endswith("layerdrop")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
    }


def _why_not_split(model: Any, family: ModelFamily) -> str | None:
    """What keeps the model from tensor parallelism, None where nothing does."""
    from trainer.parallel.tensor import unsplit_modules  # torch: not for every import of a task

    plan = family.tensor_plan(model)
    if not plan:
        return "transformers has no plan for it"
    unknown = sorted(set(plan.values()) - SUPPORTED_STYLES)
    if unknown:
        return f"its plan uses {', '.join(unknown)}"
    unsplit = unsplit_modules(model, family)
    if unsplit:
        return f"its plan leaves out {', '.join(unsplit[:4])}{' and others' * (len(unsplit) > 4)}"
    return None
