"""A trace as a table: kernels by class."""

from __future__ import annotations

import pytest
from torch._C._autograd import DeviceType

from benchmarks._gpu_kernels import class_of, kernel_times
from tests.unit.benchmarks.test_gpu_overlap import TO_HOST, event

NATIVE = "void at::native::"
KERNELS = {
    "products": (
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...> >(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, ...>",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "triton_tem_fused_mm_silu_3",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>",
        "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(...)",
    ),
    "loss": (
        f"{NATIVE}(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, ...>",
        f"{NATIVE}(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, ...>",
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_3",
    ),
    "compiled": (
        "triton_poi_fused_mul_silu_2",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_transpose_4",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_clone_transpose_4",
    ),
    "AdamW": (
        f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<"
        f"{NATIVE}FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<...>>",
    ),
    "copies and casts": (
        TO_HOST,
        "Memset (Device)",
        f"{NATIVE}(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<...>",
        f"{NATIVE}elementwise_kernel<128, 4, at::native::bfloat16_copy_kernel_cuda(...)>",
        f"{NATIVE}(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel",
        f"{NATIVE}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>",
    ),
    "collectives": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",),
    "sums and norms": (f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, ...>>",),
    "others": (f"{NATIVE}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",),
}


@pytest.mark.parametrize(("expected", "names"), KERNELS.items(), ids=list(KERNELS))
def test_a_kernel_s_class_is_told_by_its_name(expected: str, names: tuple[str, ...]) -> None:
    assert {class_of(name) for name in names} == {expected}


def test_a_step_s_kernels_are_added_up_by_class_and_name() -> None:
    """Those beside each other count once in what the device was busy; the host's do not count. What
    has begun first may end last."""
    found = kernel_times(
        [
            event("nvjet_a", 0, 4000),
            event("nvjet_a", 6000, 9000),
            event("triton_poi_fused_mul", 3000, 5000),
            event("aten::mm", 0, 90_000, device=DeviceType.CPU),
            event("FSDP::all_gather", 0, 90_000, annotation=True),
        ]
    )
    assert found == {
        "busy_ms": 8.0,
        "classes_ms": {"products": 7.0, "compiled": 2.0},
        "longest": [
            {"name": "nvjet_a", "ms": 7.0, "calls": 2},
            {"name": "triton_poi_fused_mul", "ms": 2.0, "calls": 1},
        ],
        "gaps": [{"ms": 1.0, "after": "triton_poi_fused_mul", "before": "nvjet_a"}],
    }
