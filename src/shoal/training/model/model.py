"""Any Hugging Face causal LM as a policy: tokens in, log-probabilities, entropies and variances of the trained tokens out.

The backbone runs over packed bins where the architecture allows it, over padded rows elsewhere; the LM head runs in chunks.
Both are compared with the model's own logits before anything is trained (`layouts.py`). What is trained is fp32, all weights or an
adapter; dropout is off, so that an unchanged policy has ratio 1.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.policy.architecture import HeadLogits, decoder_blocks
from shoal.policy.weights import stored_dtype
from shoal.training.model.adapter import Adapter, freeze_and_adapt, set_factors
from shoal.training.model.attention import register
from shoal.training.model.distributed import World
from shoal.training.model.layouts import (
    ATTENTION,
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    Layout,
    choose_layout,
    possible_layouts,
)
from shoal.training.model.logprobs import token_logprobs
from shoal.training.model.products import use_fast_products
from shoal.training.model.sharding import build_for, shard
from shoal.training.packing.bins import Bin


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

    @property
    def one_by_one(self) -> bool:
        """Whether a forward pass may hold one row only."""
        return self.layout.startswith("single")

    def set_layout(self, layout: Layout) -> None:
        self.model.set_attn_implementation(ATTENTION[layout])
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
        states_TD = self._backbone(**inputs, **plan).last_hidden_state.flatten(0, 1)
        head = self.model.get_output_embeddings()
        logprobs_U, entropies_U, variances_U = token_logprobs(
            states_TD.index_select(0, batch.source_U),
            head.weight,
            head.bias,
            batch.target_U,
            temperature=self.temperature,
            head_logits=self.head_logits,
        )
        chosen_N = batch.prediction_N
        return logprobs_U[chosen_N], entropies_U[chosen_N], variances_U[chosen_N]

    @property
    def _backbone(self) -> Any:
        """Some models do not name theirs as their class says, and then call themselves so."""
        return self.model.get_decoder() if self.model.base_model is self.model else self.model.base_model

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
    longest_row: int = 0,
) -> PolicyModel:
    """The policy of a model directory, sharded over the world, in the fastest layout that reproduces the model's own logits.

    A trained policy has fp32 parameters; a frozen one only needs the compute dtype. With an adapter that alone is trained.
    `longest_row` bounds what it will be given.
    """
    model: Any = build_for(directory, world, _stored_in(directory, compute_dtype, adapter, trained=trained))
    if adapter is not None:
        freeze_and_adapt(model, adapter, directory)
    if world.device.type == "cpu":
        use_fast_products(model, compute_dtype)
    policy = PolicyModel(model, temperature=temperature)
    if world.size > 1:
        shard(policy, model, directory, world, compute_dtype)
    if adapter is not None:
        set_factors(model, adapter)
    if compute_dtype != torch.float32:
        policy.autocast_dtype = compute_dtype
        if adapter is None:
            # What flows between layers is then the same on one rank, where the embedding is fp32, and on several, where it is not.
            model.get_input_embeddings().register_forward_hook(lambda module, inputs, states: states.to(compute_dtype))
    tolerance = BF16_TOLERANCE if compute_dtype == torch.bfloat16 else FP32_TOLERANCE
    choose_layout(policy, world, tolerance, longest_row=longest_row)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    return policy if adapter is not None else policy.requires_grad_(trained)


def _stored_in(directory: Path, compute_dtype: torch.dtype, adapter: Adapter | None, *, trained: bool) -> str:
    """The type of the parameters in memory."""
    if adapter is not None:
        return stored_dtype(directory)
    return "float32" if trained else str(compute_dtype).removeprefix("torch.")


def attention_cost(model: Any) -> float:
    """What one query costs per key that it sees, in units of one token through the rest of a layer: 2·D operations of 2·P_layer."""
    blocks = decoder_blocks(model)
    if not blocks:
        return 0.0
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    return float(2 * model.config.get_text_config().hidden_size / max(1, 2 * largest))
