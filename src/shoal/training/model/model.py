"""Any Hugging Face causal LM as a policy: tokens in, log-probabilities, entropies and variances of the trained tokens out.

The backbone runs over packed bins where the architecture allows it, over padded rows elsewhere; the LM head runs in chunks.
Both are compared with the model's own logits on a few tokens before anything is trained. What is trained is fp32, all weights or an
adapter; dropout is off, so that an unchanged policy has ratio 1.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.policy.architecture import HeadLogits
from shoal.policy.weights import stored_dtype
from shoal.training.model.adapter import Adapter, freeze_and_adapt, set_factors
from shoal.training.model.attention import PACKED_ATTENTION, register
from shoal.training.model.distributed import World
from shoal.training.model.logprobs import token_logprobs
from shoal.training.model.sharding import build_for, shard
from shoal.training.packing.bins import Bin, build_packed, build_padded
from shoal.training.packing.packing import group_by_prompt

PROBE_PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
PROBE_OUTPUTS = [[6, 7, 1, 2], [3], [2, 4, 4], [5, 1]]
Layout = Literal["packed", "padded", "eager"]
"""Packed bins; padded rows with fused attention; padded rows with the model's own attention."""
FP32_TOLERANCE, BF16_TOLERANCE = 1e-3, 0.15
"""In log-probability; a wrong mask or a missed logit scale is off by far more."""


class UnsupportedModelError(ShoalError):
    """An architecture whose logits this engine does not reproduce."""

    code = "unsupported_model"
    permanent = True


class PolicyModel(nn.Module):
    """Wraps the causal LM so that a whole forward pass, LM head included, is one module call."""

    def __init__(self, model: Any, *, temperature: float) -> None:
        super().__init__()
        register()
        self.model = model
        self.temperature = temperature
        self.autocast_dtype: torch.dtype | None = None
        self.head_logits = HeadLogits.of(model.config.get_text_config())
        self._switch_off_dropout()
        self.layout: Layout = "eager"
        self.set_layout(possible_layouts(model)[0])

    @property
    def packed(self) -> bool:
        return self.layout == "packed"

    def set_layout(self, layout: Layout) -> None:
        self.model.set_attn_implementation({"packed": PACKED_ATTENTION, "padded": "sdpa", "eager": "eager"}[layout])
        self.layout = layout

    def forward(self, batch: Bin, *, own_head: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of each of the bin's N trained tokens, with the entropy and the variance of log p at its place;
        without `own_head` from the model's own logits."""
        with self._precision(batch.input_ids.device.type):
            return self._forward(batch, own_head)

    def _forward(self, batch: Bin, own_head: bool) -> tuple[Tensor, Tensor, Tensor]:
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        if not own_head:
            logits = self.model(**inputs).logits.flatten(0, 1)[batch.source_N].float()
            logprobs = torch.log_softmax(logits / self.temperature, dim=-1)
            probs, entropies = logprobs.exp(), -(logprobs.exp() * logprobs).sum(1)
            variances = (probs * (logprobs + entropies[:, None]).square()).sum(1)
            return logprobs.gather(1, batch.target_N[:, None])[:, 0], entropies, variances
        plan = {} if batch.plan is None else {"attention_plan": batch.plan}
        states_TD = self.model.base_model(**inputs, **plan).last_hidden_state.flatten(0, 1)
        head = self.model.get_output_embeddings()
        return token_logprobs(
            states_TD.index_select(0, batch.source_N),
            head.weight,
            head.bias,
            batch.target_N,
            temperature=self.temperature,
            head_logits=self.head_logits,
        )

    def _precision(self, device_type: str) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def _switch_off_dropout(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in ("attention_dropout", "dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)


def load_policy(
    directory: Path,
    *,
    temperature: float,
    world: World,
    compute_dtype: torch.dtype = torch.float32,
    trained: bool = True,
    adapter: Adapter | None = None,
    activation_checkpointing: bool = False,
) -> PolicyModel:
    """The policy of a model directory, sharded over the world, in the fastest layout that reproduces the model's own logits.

    A trained policy has fp32 parameters; a frozen one only needs the compute dtype. With an adapter that alone is trained.
    """
    model: Any = build_for(directory, world, _stored_in(directory, compute_dtype, adapter, trained=trained))
    if adapter is not None:
        freeze_and_adapt(model, adapter, torch.float32 if world.size == 1 else compute_dtype)
    policy = PolicyModel(model, temperature=temperature)
    if world.size > 1:
        shard(policy, model, directory, world, compute_dtype)
    if adapter is not None:
        set_factors(model, adapter)
    choose_layout(policy, world.device, BF16_TOLERANCE if compute_dtype == torch.bfloat16 else FP32_TOLERANCE)
    if compute_dtype != torch.float32 and world.size == 1:  # FSDP casts the gathered parameters itself
        policy.autocast_dtype = compute_dtype
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    return policy if adapter is not None else policy.requires_grad_(trained)


def _stored_in(directory: Path, compute_dtype: torch.dtype, adapter: Adapter | None, *, trained: bool) -> str:
    """The type of the parameters in memory."""
    if adapter is not None:
        return stored_dtype(directory)
    return "float32" if trained else str(compute_dtype).removeprefix("torch.")


def possible_layouts(model: Any) -> list[Layout]:
    """Fastest first. Packing needs positions to be mixed by causal or windowed attention through Transformers' interface only."""
    config = model.config.get_text_config()
    if not model._supports_sdpa or getattr(config, "attn_logit_softcapping", None):
        return ["eager"]
    kinds = set(getattr(config, "layer_types", None) or ())
    usual = kinds <= {"full_attention", "sliding_attention"} and not getattr(config, "attention_chunk_size", None)
    return ["packed", "padded", "eager"] if model._supports_attention_backend and usual else ["padded", "eager"]


@torch.no_grad()
def choose_layout(policy: PolicyModel, device: torch.device, tolerance: float = FP32_TOLERANCE) -> None:
    """The first layout that agrees with the model's own logits of plain rows; refuse a model that none reproduces."""
    everyone = range(len(PROBE_PROMPTS))
    policy.set_layout("eager")
    truth = torch.cat([_probe(policy, [number], device, own_head=False) for number in everyone])
    for layout in possible_layouts(policy.model):
        policy.set_layout(layout)
        if bool(((_probe(policy, everyone, device) - truth).abs() < tolerance).all()):
            return
    raise UnsupportedModelError(
        f"The engine does not reproduce the logits of {type(policy.model).__name__}.",
        hint="Its LM head or its position handling is of a kind that is not supported yet.",
    )


def _probe(policy: PolicyModel, chosen: Any, device: torch.device, *, own_head: bool = True) -> Tensor:
    prompts = [PROBE_PROMPTS[number] for number in chosen]
    outputs = [PROBE_OUTPUTS[number] for number in chosen]
    prompt_groups = group_by_prompt(prompts, [len(output) for output in outputs], 1 << 20, share=policy.packed)
    build = build_packed if policy.packed else build_padded
    logprobs, _, _ = policy(build(prompt_groups, prompts, outputs).to(device), own_head=own_head)
    return torch.as_tensor(logprobs)
