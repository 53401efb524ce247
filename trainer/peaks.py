"""What GPUs can do at most: the denominator of MFU. Pure; imports nothing.

Dense matrix products, no sparsity: the tensor cores for bfloat16 and TF32, and for float32 the
ordinary ones. By the name that CUDA gives the whole device: a slice of one (MIG), or another one,
has no entry, and no MFU.

Sources: NVIDIA's data sheets of A100 (June 2021), H100 (2024: SXM and NVL) and its PCIe version
(PB-11133), H200, HGX B200 and HGX B300; where they give bfloat16 or TF32 with sparsity, half of
it. The bfloat16 numbers up to B200 are those of torchtitan's `get_peak_flops`; TF32's on H100 and
H200 is that of NVIDIA's H100 white paper.
"""

from __future__ import annotations

_A100 = {"bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12}
_H100 = {"bfloat16": 989e12, "tf32": 494.7e12, "float32": 67e12}
_H100_NVL = {"bfloat16": 835e12, "tf32": 417.5e12, "float32": 60e12}
_H100_PCIE = {"bfloat16": 756e12, "tf32": 378e12, "float32": 51e12}
_BLACKWELL = {"bfloat16": 2250e12, "tf32": 1125e12, "float32": 75e12}

PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H200": _H100,
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA B200": _BLACKWELL,
    "NVIDIA B300 SXM6 AC": _BLACKWELL,
}
"""Device -> precision of the computation -> operations per second."""


def peak_flops(device: str, precision: str) -> float | None:
    """Operations per second of a device; None where it is not known.

    Args:
        device: as CUDA names it.
        precision: `TrainConfig.precision`; "tf32" where float32's products are computed in that.
    """
    return PEAKS.get(device, {}).get(precision)
