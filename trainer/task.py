"""What is learned: a model, its loss and its data. Two ways in.

`CausalLM` is the built-in task: a Hugging Face causal language model on text. `CustomTask` brings
any `nn.Module` with its own loss and dataset. The driver calls `prepare`, which checks everything
that can be wrong and leaves a `PreparedTask`; that crosses to the workers, which build from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config import TrainConfig
from trainer.data.config import DataConfig
from trainer.errors import ConfigError
from trainer.models.hf import ModelConfig, build_on_meta, check_tensor_parallel, weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.data import SampleSource
    from trainer.models.init import WeightSource


class PreparedTask(Protocol):
    """A checked task, as it crosses to the workers. All workers call its methods with the same
    arguments."""

    @property
    def info(self) -> Mapping[str, Any]:
        """Facts for the run's records (token counts, vocabulary, …), JSON values."""
        ...

    def warm_up(self) -> None:
        """Does what makes `build` quick later; every worker calls it when it starts."""
        ...

    def build(self, seed: int) -> tuple[nn.Module, WeightSource]:
        """The model with its parameters on the meta device, and where their values come from."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """Sum of the losses of a batch (a scalar with gradient, in nats) and the number of targets
        in it."""
        ...

    def train_data(self) -> SampleSource:
        """The samples to learn from."""
        ...

    def eval_data(self) -> SampleSource | None:
        """The held-out samples, if any."""
        ...


class Task(Protocol):
    """What a user passes as `TrainConfig.task`."""

    def prepare(self, train: TrainConfig, cache_dir: str) -> PreparedTask:
        """Checks the task and makes its data ready. The driver calls it once, before anything
        starts.

        Args:
            train: the settings of the run.
            cache_dir: a directory that all nodes see, for prepared data.

        Raises:
            ConfigError: naming the field, the value and the fix.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CausalLM:
    """Next-token prediction on text with a Hugging Face model."""

    data: DataConfig
    """Where the text is and how it becomes tokens."""
    seq_len: int
    """Tokens in a sample."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Which model; a small Llama unless said otherwise."""

    def prepare(self, train: TrainConfig, cache_dir: str) -> PreparedCausalLM:
        """See Task."""
        from trainer.data import TokenDataset
        from trainer.data.prepare import prepare

        if self.seq_len < 1:
            raise ConfigError("train.task.seq_len", self.seq_len, "no tokens", "Use 1 or more")
        if self.model.pretrained and self.model.path is None:
            raise ConfigError(
                "train.task.model.pretrained", True, "there is no path", "Set model.path"
            )
        config = self.model.resolve(self.data.vocab_size if self.data.tokenizer is None else 0)
        data = prepare(self.data, cache_dir)
        config = self.model.resolve(data.vocab_size)
        model = build_on_meta(config)
        check_tensor_parallel(config, model, train.parallel.tensor, self.seq_len)
        pretrained = self.model.path if self.model.pretrained else None
        weights(config, model, train.seed, pretrained)
        # Raises where there is too little text for one sample.
        TokenDataset(data.train, self.seq_len)
        return PreparedCausalLM(
            config=config,
            seq_len=self.seq_len,
            train_path=data.train,
            eval_path=data.val,
            pretrained=pretrained,
            info={
                "tokenizer": data.tokenizer,
                "vocab_size": data.vocab_size,
                "train_tokens": data.train_tokens,
                "val_tokens": data.val_tokens,
                "train_path": data.train,
                "val_path": data.val,
                "parameters": sum(param.numel() for param in model.parameters()),
                "model": json.loads(json.dumps(config, default=str)),
            },
        )


@dataclass(frozen=True, kw_only=True)
class PreparedCausalLM:
    """A causal language model and its token files. Implements PreparedTask."""

    config: Mapping[str, Any]
    """The complete transformers configuration."""
    seq_len: int
    """Tokens in a sample."""
    train_path: str
    """Token set to learn from."""
    eval_path: str
    """Token set held out."""
    pretrained: str | None
    """Directory of the initial weights; None: seeded ones."""
    info: Mapping[str, Any]
    """Facts for the run's records."""

    def warm_up(self) -> None:
        """See PreparedTask. Imports transformers and the model's code."""
        build_on_meta(self.config)

    def build(self, seed: int) -> tuple[nn.Module, WeightSource]:
        """See PreparedTask."""
        model = build_on_meta(self.config)
        return model, weights(self.config, model, seed, self.pretrained)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Cross-entropy summed over all targets; `batch` is int64 of shape (samples, seq_len +
        1)."""
        from torch.nn.functional import cross_entropy

        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss, targets.numel()

    def train_data(self) -> SampleSource:
        """See PreparedTask."""
        from trainer.data import TokenDataset

        return TokenDataset(self.train_path, self.seq_len)

    def eval_data(self) -> SampleSource | None:
        """See PreparedTask. None where the held-out text is shorter than one sample."""
        from trainer.data import TokenDataset, TokenSet

        if len(TokenSet.open(self.eval_path)) <= self.seq_len:
            return None
        return TokenDataset(self.eval_path, self.seq_len)


@dataclass(frozen=True, kw_only=True)
class CustomTask:
    """Any `nn.Module` with its own loss and dataset. Implements Task and PreparedTask.

    The functions and datasets cross to the workers by Ray's serialisation.
    """

    build_model: Callable[[], nn.Module]
    """Makes the whole model on the CPU; it is called with torch's generator seeded by `train.seed`,
    on every worker, so it must draw its random numbers from torch alone."""
    loss_function: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
    """(model, batch) -> (sum of the losses, number of terms in the sum). The gradient is divided by
    the global number of terms."""
    dataset: Any
    """Samples to learn from: `__len__` and `__getitem__`, collated as `torch.utils.data` does."""
    eval_dataset: Any = None
    """Held-out samples of the same kind."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the run's records, JSON values."""

    def prepare(self, train: TrainConfig, cache_dir: str) -> CustomTask:
        """See Task."""
        if len(self.dataset) == 0:
            raise ConfigError(
                "train.task.dataset", "0 samples", "it is empty", "Give at least one sample"
            )
        model, _ = self.build(train.seed)
        if train.parallel.tensor > 1:
            raise ConfigError(
                "train.parallel.tensor",
                train.parallel.tensor,
                "a custom model has no tensor-parallel plan",
                "Use tensor = 1 and a larger shard degree",
            )
        for name, param in model.named_parameters():
            if param.requires_grad and str(param.dtype) != "torch.float32":
                raise ConfigError(
                    "train.task.build_model",
                    name,
                    f"it is {param.dtype}; trainable parameters are kept in float32",
                    "Return a float32 model and set train.precision for the computation",
                )
        stateful = [n for n, m in model.named_modules() if getattr(m, "track_running_stats", False)]
        if stateful:
            raise ConfigError(
                "train.task.build_model",
                stateful[0],
                "it keeps running statistics, which are neither healed nor saved",
                "Use track_running_stats=False, or a normalisation without statistics",
            )
        _check_json(self.info)
        if not any(param.requires_grad for param in model.parameters()):
            raise ConfigError(
                "train.task.build_model",
                type(model).__name__,
                "no trainable parameters",
                "Return a model with some",
            )
        return self

    def warm_up(self) -> None:
        """See PreparedTask. There is nothing to do: what the task needs came with it."""

    def build(self, seed: int) -> tuple[nn.Module, WeightSource]:
        """See PreparedTask. The whole model passes through host memory once."""
        import torch

        from trainer.models.init import FullWeights

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build_model()
        full = {name: param.detach().clone() for name, param in model.named_parameters()}
        _move_parameters_to_meta(model)
        return model, FullWeights(full)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """See PreparedTask."""
        return self.loss_function(model, batch)

    def train_data(self) -> SampleSource:
        """See PreparedTask."""
        from trainer.data import MapDataset

        return MapDataset(self.dataset)

    def eval_data(self) -> SampleSource | None:
        """See PreparedTask."""
        from trainer.data import MapDataset

        return None if self.eval_dataset is None else MapDataset(self.eval_dataset)


def _check_json(info: Mapping[str, Any]) -> None:
    """It goes into every checkpoint, which holds no pickle."""
    try:
        json.dumps(dict(info), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "train.task.info", info, f"not JSON: {error}", "Keep numbers, texts and lists in it"
        ) from error


def _move_parameters_to_meta(model: nn.Module) -> None:
    """Leaves buffers where they are, and tied parameters tied."""
    from torch import nn

    moved: dict[int, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, moved.setdefault(id(param), meta))


def default_cache_dir(storage_path: str) -> str:
    """Where prepared data goes when the user names no place: beside the runs, so that all nodes see
    it."""
    return str(Path(storage_path) / ".data")
