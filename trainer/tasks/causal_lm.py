"""`CausalLM`, the built-in task: next-token prediction on text with a Hugging Face model."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainer.config import TrainConfig
from trainer.data.config import DataConfig
from trainer.errors import ConfigError, StorageNotSeenError, TrainerError, check_types
from trainer.models.causal import check_causal
from trainer.models.computes import check_sizes
from trainer.models.family import HUGGING_FACE, ModelFamily, family_of
from trainer.models.hf import (
    ModelConfig,
    check_positions,
    head_size,
    keep_rotations,
    one_text_each,
    recorded,
    text_configuration,
)
from trainer.parallel.check import (
    check_compiled_tensor,
    check_same_blocks,
    check_tensor_parallel,
)
from trainer.parallel.context.precision import check_kernel
from trainer.parallel.context.trial import check_ring

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.data import SampleSource
    from trainer.data.token_batch import TokenBatch
    from trainer.models.chunked_head import Entropy
    from trainer.models.init import WeightSource
    from trainer.parallel.compiled import Compile

log = logging.getLogger(__name__)

_Own = TypeVar("_Own", bound="PreparedCausalLM")

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json",
    "vocab.txt",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CausalLM:
    """Next-token prediction on text with a Hugging Face model."""

    data: DataConfig
    """Where the text is and how it becomes tokens."""
    seq_len: int
    """Tokens in a sample, no more than the model has positions."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Which model; unless said otherwise a Llama of transformers' own defaults, 7B."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at once; the others' are computed before or after. It changes the
    order of a sum, and so the last bits. None: all tokens of a micro-batch."""
    texts: Literal["joined", "apart"] = "joined"
    """Of a sample with several: `joined`, a token sees all before it; `apart`, those of its own
    text, and positions begin anew with each."""

    def __post_init__(self) -> None:
        check_types(self, "train.task")

    def prepare(self, train: TrainConfig, cache_dir: str) -> PreparedCausalLM:
        """See Task."""
        from trainer.data import TokenDataset
        from trainer.data.prepare import prepare
        from trainer.data.tokens import TokenSet

        text, vocab_size = self._text(), self.vocab_size()
        pretrained = self.model.path if self.model.pretrained else None
        self.check(vocab_size)
        config, family, model = self.plan_model(train, vocab_size)
        family.weights(config, model, train.seed, pretrained)
        data = prepare(text, cache_dir)  # hours: what can be wrong has been looked at
        if data.vocab_size != vocab_size:  # of a tokenizer that was trained
            config, family, model = self.plan_model(train, data.vocab_size)
        # Raises where there is too little text for one sample.
        TokenDataset(data.train, self.seq_len)
        if text.holdout > 0 and data.val_tokens <= self.seq_len:
            self._tell_of_no_evaluation(train, data.val_tokens)
        return PreparedCausalLM(
            config=config,
            seq_len=self.seq_len,
            loss_chunk=self.loss_chunk,
            compile=train.compile,
            train_path=data.train,
            eval_path=data.val,
            pretrained=pretrained,
            end_id=self._end_id(data.tokenizer, text.tokenizer),
            family=family,
            info={
                "tokenizer": data.tokenizer,
                "tokenizer_from": text.tokenizer,
                "vocab_size": data.vocab_size,
                "texts": self.texts,
                "train_tokens": data.train_tokens,
                "val_tokens": data.val_tokens,
                "train_sha256": TokenSet.open(data.train).sha256,
                "file_tokens": text.file_tokens,
                "train_path": data.train,
                "val_path": data.val,
                "parameters": sum(param.numel() for param in model.parameters()),
                "model": recorded(config),
                "pretrained": pretrained,
            },
        )

    def _tell_of_no_evaluation(self, train: TrainConfig, tokens: int) -> None:
        """The user wants `tokens` held out, which are no sample.

        Raises:
            ConfigError: and evaluations of them.
        """
        refusal = ConfigError(
            "train.eval_every",
            train.eval_every,
            f"{tokens} tokens are held out, {self.seq_len + 1} needed for one sample: nothing can "
            "be evaluated",
            "Use a larger train.task.data.holdout or a shorter train.task.seq_len; holdout=0 where "
            "no evaluation is wanted",
        )
        if train.eval_every is not None:
            raise refusal
        log.warning("%s", refusal)

    def vocab_size(self) -> int:
        """Tokens of the tokenizer that is given; the most that one to train may have.

        Raises:
            ConfigError: the given one cannot be loaded, or there is none beside pretrained weights.
        """
        from trainer.data.tokenizer import load_tokenizer, vocab_size_of

        text = self._text()
        if text.tokenizer is None:
            return text.vocab_size
        return vocab_size_of(load_tokenizer(text.tokenizer))

    def check(self, vocab_size: int) -> None:
        """Checks what can be known before the data are read.

        Args:
            vocab_size: tokens that the data use, as far as that is known.

        Raises:
            ConfigError: a setting that cannot work.
        """
        if self.seq_len < 1:
            raise ConfigError("train.task.seq_len", self.seq_len, "no tokens", "Use 1 or more")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ConfigError(
                "train.task.loss_chunk", self.loss_chunk, "no tokens", "Use 1 or more, or None"
            )
        if self.model.pretrained and self.model.path is None:
            raise ConfigError(
                "train.task.model.pretrained", True, "there is no path", "Set model.path"
            )
        config = self.model.resolve(vocab_size, self._end_id_of_trained())
        self.model.check_settings(config)
        check_positions(config, self.seq_len)
        check_causal(config, self.seq_len)
        if self.loss_chunk is not None:
            from trainer.models.chunked_head import check_chunks

            check_chunks(config, self.loss_chunk, self.seq_len)

    def plan_model(
        self, train: TrainConfig, vocab_size: int
    ) -> tuple[dict[str, Any], ModelFamily, nn.Module]:
        """The model's complete configuration, its family, and the model on the meta device.

        Args:
            train: the settings of the run.
            vocab_size: tokens that the data use.

        Raises:
            ConfigError: the layout does not go with the model, or that has nothing to learn.
        """
        config = self.model.resolve(vocab_size, self._end_id_of_trained())
        family = family_of(config["model_type"])
        model = family.build_on_meta(config)
        check_sizes(config, model)
        parallel = train.parallel
        check_tensor_parallel(config, model, parallel.tensor, self.seq_len // parallel.context)
        check_compiled_tensor(train.compile, train.recompute, parallel.tensor)
        check_same_blocks(config, parallel.dims.fsdp)
        if self.texts == "apart" or parallel.context > 1:
            check_ring(config, parallel.context)
        return config, family, model

    def check_gpu(self, train: TrainConfig) -> None:
        """Raises ConfigError where a GPU has no kernel for this attention."""
        if self.texts == "apart" or train.parallel.context > 1:
            config = text_configuration(self.model.resolve(0))
            check_kernel("cuda", train.precision, head_size(config))

    def _end_id(self, tokenizer: str, given: str | None) -> int | None:
        """The token that ends each text, where they are apart.

        Args:
            tokenizer: path of the one that made the tokens.
            given: where the user had it from, if anywhere.
        """
        if self.texts == "joined":
            return None
        from trainer.data.tokenizer import end_of_text_id, load_tokenizer

        return end_of_text_id(load_tokenizer(tokenizer), given)

    def _end_id_of_trained(self) -> int | None:
        """The end of a text in the tokenizer that is trained for this task, if one is."""
        from trainer.data.tokenizer import END_OF_TEXT_ID

        given = self.data.tokenizer is not None or self.model.pretrained
        return None if given else END_OF_TEXT_ID

    def _text(self) -> DataConfig:
        """The data, with the tokenizer of a pretrained model: to its weights, the numbers of
        another one mean nothing."""
        if not self.model.pretrained or self.model.path is None or self.data.tokenizer is not None:
            return self.data
        directory = self.model.directory()
        if not any((directory / name).exists() for name in _TOKENIZER_FILES):
            raise ConfigError(
                "train.task.data.tokenizer",
                None,
                f"the pretrained model in {self.model.path} has no tokenizer beside it",
                "Name the tokenizer that the model was trained with",
            )
        return replace(self.data, tokenizer=self.model.path)


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
    loss_chunk: int | None = None
    """See `CausalLM.loss_chunk`."""
    compile: Compile = "off"
    """See `TrainConfig.compile`."""
    end_id: int | None = None
    """The token that ends each text, where a sample's texts are apart; None: they are joined."""
    info: Mapping[str, Any]
    """Facts for the run's records."""
    family: ModelFamily = HUGGING_FACE
    """What the workers must know of the architecture; found on the driver, it comes with the
    task."""

    @classmethod
    def without_text(cls: type[_Own], train: TrainConfig, vocab_size: int) -> _Own:
        """The task of a run as its workers get it, for those that bring their own samples.

        Args:
            train: the settings of the run; its task is a `CausalLM`.
            vocab_size: tokens that the data would use, as far as that is known.
        """
        task: CausalLM = train.task
        config, family, _ = task.plan_model(train, vocab_size)
        return cls(
            config=config,
            seq_len=task.seq_len,
            loss_chunk=task.loss_chunk,
            compile=train.compile,
            train_path="",
            eval_path="",
            pretrained=None,
            end_id=0 if task.texts == "apart" else None,  # no text ends, but attention is that one
            family=family,
            info={"model": recorded(config)},
        )

    def warm_up(self) -> None:
        """See PreparedTask. Imports transformers and the model's code, and looks at the files of
        tokens."""
        self.family.build_on_meta(self.config)
        with suppress(TrainerError, OSError):  # it comes again where samples are needed
            self.open_tokens()

    @property
    def token_files(self) -> tuple[str, ...]:
        """All that `open_tokens` looks at."""
        from trainer.data.index import INDEX_NAME, file_name
        from trainer.data.tokens import open_once

        return tuple(
            os.path.join(path, name)
            for path in (self.train_path, self.eval_path)
            for name in (INDEX_NAME, *map(file_name, range(len(open_once(path).index.files))))
        )

    def open_tokens(self) -> None:
        """Looks at the files of tokens; once they are well, never again in this process. A worker
        calls it before it has a part in a replica.

        Raises:
            StorageNotSeenError: this machine does not see them, or cannot read them.
            TokensCorruptError: they are not those that were written.
        """
        from trainer.data.index import TokensCorruptError

        try:
            self.train_data()
            self.eval_data()
        except (TokensCorruptError, OSError) as error:
            was_read = isinstance(error, TokensCorruptError) and os.path.exists(error.file)
            if was_read and not isinstance(error.__cause__, OSError):
                raise
            raise StorageNotSeenError(
                "train.task.data",
                self.train_path,
                f"the tokens cannot be read on machine {platform.node()}: {error}",
                "Mount them at this path on all machines, or use a train.task.data.cache_dir that "
                "all of them see",
            ) from error

    def build(self, seed: int) -> tuple[nn.Module, WeightSource]:
        """See PreparedTask."""
        model = self.family.build_on_meta(self.config)
        if self.loss_chunk is not None:
            from trainer.models.chunked_head import chunk_head

            chunk_head(model, self.loss_chunk, _entropy(self.compile))
        if self.end_id is not None:
            from trainer.parallel.context.attention import put_ring_in
            from trainer.parallel.context.ring import Ring

            put_ring_in(model, Ring())
        source = self.family.weights(self.config, model, seed, self.pretrained)
        keep_rotations(model)
        return model, source

    def flops_per_token(self, model: nn.Module) -> dict[str, float]:
        """See PreparedTask."""
        from trainer.models.flops import flops_of_transformer

        apart = self.end_id is not None
        return flops_of_transformer(model, self.config, self.seq_len, apart=apart)

    def loss(self, model: nn.Module, batch: torch.Tensor | TokenBatch) -> tuple[torch.Tensor, int]:
        """Cross-entropy summed over all targets; `batch` is int64 of shape (samples, seq_len + 1),
        or what a worker has of it.

        In training, the router's auxiliary loss of this micro-batch is added for each target, where
        the configuration asks for it. It depends on the micro-batch alone, so it is the same at any
        number of replicas.
        """
        from trainer.data.token_batch import TokenBatch
        from trainer.models.chunked_head import with_losses

        part = batch if isinstance(batch, TokenBatch) else TokenBatch.of(batch)
        targets, given = part.targets, {"input_ids": part.inputs, "use_cache": False}
        if part.positions is not None:
            from trainer.parallel.context.attention import tell_documents

            given["position_ids"] = part.positions
            tell_documents(model, part.documents)
        with one_text_each():
            if self.loss_chunk is None:
                output = model(**given)
                loss = _entropy(self.compile)(output.logits.flatten(0, 1), targets.flatten())
            else:
                output = with_losses(model, targets, **given)
                loss = output.logits
        if model.training and self.router_coefficient:
            loss = loss + self.router_coefficient * targets.numel() * output.aux_loss
        return loss, targets.numel()

    @property
    def router_coefficient(self) -> float:
        """Weight of the auxiliary loss; 0 where the configuration does not ask for it."""
        asked = self.config.get("output_router_logits")
        return (self.config.get("router_aux_loss_coef") or 0.0) if asked else 0.0

    def train_data(self) -> SampleSource:
        """See PreparedTask."""
        return self._samples(self.train_path)

    def eval_data(self) -> SampleSource | None:
        """See PreparedTask. None where the held-out text is shorter than one sample."""
        from trainer.data.tokens import open_once

        if len(open_once(self.eval_path)) <= self.seq_len:
            return None
        return self._samples(self.eval_path)

    def _samples(self, path: str) -> SampleSource:
        from trainer.data import TextDataset, TokenDataset

        if self.end_id is None:
            return TokenDataset(path, self.seq_len)
        return TextDataset(path, self.seq_len, self.end_id)


@cache
def _entropy(compile: Compile) -> Entropy:
    """The cross-entropy of a model whose blocks are compiled so; one in a process, as a model that
    is built anew finds what is compiled. Not compiled, it writes logits in float32, their softmax
    and its gradient to memory and reads them again: an eighth of a step of 1B on an H200."""
    from trainer.models.chunked_head import sum_entropy
    from trainer.parallel.compiled import compile_function

    if compile == "off":
        return sum_entropy
    return compile_function("the loss", sum_entropy, required=compile == "require")
