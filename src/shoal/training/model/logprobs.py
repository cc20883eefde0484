"""Log-probabilities of chosen tokens, and mean and variance of what a sample would have, without the logits of the whole bin.

The LM head runs over chunks of tokens; the backward pass recomputes each chunk's logits, so memory is one chunk × vocabulary
whatever the batch. Shapes: N tokens, D model width, V vocabulary, C tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from shoal.policy.architecture import HeadLogits

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at once: 64 MB in fp32."""
PLAIN = HeadLogits()


def token_logprobs(
    states_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    temperature: float,
    head_logits: HeadLogits = PLAIN,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax(logits/T) at the targets; entropy −Σ p·log p and variance of log p of the same distribution. All fp32, the
    variance without a gradient."""
    if torch.is_autocast_enabled(states_ND.device.type):
        # Autocast is off in the backward pass of a custom function; casting here keeps both passes in the same dtype.
        dtype = torch.get_autocast_dtype(states_ND.device.type)
        states_ND, weight_VD = states_ND.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    chunk = max(1, chunk_elements // weight_VD.shape[0])
    logprobs_N, entropies_N, variances_N = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        states_ND, weight_VD, bias_V, targets_N, 1.0 / temperature, head_logits, chunk
    )
    return logprobs_N, entropies_N, variances_N


def _logits(
    states_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, head_logits: HeadLogits, scale: float
) -> Tensor:
    products_CV = torch.nn.functional.linear(states_CD, weight_VD.to(states_CD.dtype), bias_V)
    return head_logits(products_CV.float()).mul_(scale)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        states_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        scale: float,
        head_logits: HeadLogits,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_N = states_ND.new_empty(len(states_ND), dtype=torch.float32)
        entropies_N, variances_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for start in range(0, len(states_ND), chunk):
            part = slice(start, start + chunk)
            logits_CV = _logits(states_ND[part], weight_VD, bias_V, head_logits, scale)
            chosen_C = logits_CV.gather(1, targets_N[part, None])[:, 0]
            logits_CV -= (top_C := logits_CV.amax(1, keepdim=True))
            exp_CV = logits_CV.exp()
            total_C = exp_CV.sum(1)
            mean_C = torch.linalg.vecdot(exp_CV, logits_CV) / total_C
            # The largest logit is 0 here, so the difference of the two moments cancels nothing.
            square_C = torch.linalg.vecdot(exp_CV.mul_(logits_CV), logits_CV) / total_C
            variances_N[part] = (square_C - mean_C.square()).clamp_(min=0.0)
            entropies_N[part] = total_C.log() - mean_C
            logprobs_N[part] = chosen_C - top_C[:, 0] - total_C.log()
        saved = (states_ND, weight_VD, bias_V, targets_N, entropies_N)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # None is kept as None
        ctx.set_materialize_grads(False)
        ctx.settings = (scale, head_logits, chunk)  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(variances_N)
        return logprobs_N, entropies_N, variances_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        states_ND, weight_VD, bias_V, targets_N, entropies_N = ctx.saved_tensors
        scale, head_logits, chunk = ctx.settings
        grad_states_ND = torch.empty_like(states_ND)
        # A frozen head needs no gradient, which would be as large as the head.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with_bias = bias_V is not None and ctx.needs_input_grad[2]
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if with_bias else None
        for start in range(0, len(states_ND), chunk):
            part = slice(start, start + chunk)
            logits_CV = _logits(states_ND[part], weight_VD, bias_V, head_logits, scale)
            grads = tuple(None if gradient is None else gradient[part] for gradient in gradients[:2])
            grad_CV = _grad_scaled_logits(logits_CV, targets_N[part], entropies_N[part], *grads)
            grad_CV = head_logits.backward(grad_CV.mul_(scale), logits_CV, scale).to(states_ND.dtype)
            grad_states_ND[part] = grad_CV @ weight_VD.to(states_ND.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ states_ND[part]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_states_ND, grad_weight, grad_bias, None, None, None, None


def _grad_scaled_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    entropies_C: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """∂log p_t/∂z = 1_t − p ;  ∂H/∂z = −p·(log p + H)."""
    logprobs_CV = torch.log_softmax(logits_CV, dim=1)
    probs_CV = logprobs_CV.exp()
    grad_CV = torch.zeros_like(probs_CV)
    if grad_entropy_C is not None:
        grad_CV -= probs_CV * (logprobs_CV + entropies_C[:, None]) * grad_entropy_C[:, None]
    if grad_logprob_C is not None:
        grad_CV -= probs_CV * grad_logprob_C[:, None]
        grad_CV.scatter_add_(1, targets_C[:, None], grad_logprob_C[:, None])
    return grad_CV
