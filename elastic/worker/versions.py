"""What a worker's bits, and the connections between workers, depend on of what is installed."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from elastic.protocol.job import Job
from elastic.protocol.messages import Versions
from elastic.protocol.versions import own_version
from trainer.te.config import TransformerEngine


def find_versions(job: Job) -> Versions:
    """Of this process, for its hello. On CPUs without CUDA's and NCCL's, as nothing uses them."""
    found = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "elastictrainer": own_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }
    if any(isinstance(one, TransformerEngine) for one in job.train.converters):
        found["transformer-engine"] = _installed("transformer-engine")
    if job.scaling.device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return tuple(found.items())


def _installed(package: str) -> str:
    """Its version. A worker that lacks what it is to use says so when it builds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
