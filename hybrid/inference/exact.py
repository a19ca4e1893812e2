"""Where generation can be held to the trainer's bits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hybrid.models.families import head_dim
from hybrid.models.heads import output_head
from hybrid.parallel import ParallelMesh
from ops import attention_cpu, varlen_cpu
from ops.attention import key_layout


def require_exact(module: PreTrainedModel, mesh: ParallelMesh, dtype: torch.dtype, block_size: int) -> None:
    """Raise ValueError where `InferenceConfig.exact` could not keep its promise.

    It rests on three things: products of 16 rows or more give a row the same bits whatever the others are, attention's
    kernels do so by design, and both sides round log-probs alike (see ``ops.logprob``).
    """
    if mesh.tp_size > 1:
        raise ValueError(f"exact needs tp_size=1, whose products are the trainer's; tp_size is {mesh.tp_size}")
    size = head_dim(module.config.get_text_config(decoder=True))
    if size > varlen_cpu.MAX_HEAD_DIM:
        raise ValueError(f"exact needs heads of at most {varlen_cpu.MAX_HEAD_DIM} dimensions; the model's have {size}")
    if key_layout(dtype, mesh.device, block_size) != "dim":
        compiler = "with" if attention_cpu.is_available() else "without"
        raise ValueError(
            f"exact needs the compiled CPU kernels, weights in fp32 or bf16 and a kv_block_size that is a multiple of "
            f"16; here are {mesh.device.type}, {dtype} and {block_size}, {compiler} a C++ compiler"
        )
    head = output_head(module)
    if head.scale != 1 or head.softcap is not None:
        raise ValueError(f"exact is not possible for {module.config.model_type}, which scales or caps its logits")
