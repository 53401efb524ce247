"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step` (0-based): linear warm-up to `lr`, then a cosine to `min_lr_ratio *
    lr`.

    Source: Loshchilov and Hutter, SGDR, 2017.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    share = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (
        1 + math.cos(math.pi * progress)
    )
    return config.lr * share
