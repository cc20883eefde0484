"""Packed bins give the logits of unpacked sequences, for several architectures; others fall back or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from shoal.training import World
from shoal.training.model.layouts import UnsupportedModelError, choose_layout
from shoal.training.model.model import PolicyModel, load_policy
from shoal.training.packing.bins import build_packed, build_padded
from shoal.training.packing.packing import group_by_prompt
from support.allocations import LargestResult

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
PACKABLE = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "mistral with a window": MistralConfig(**SMALL, sliding_window=3),
    "granite, scaled logits": GraniteConfig(**SMALL, logits_scaling=4.0),
    "phi, biased head": PhiConfig(**SMALL),
    "gpt-neox": GPTNeoXConfig(**SMALL),
    "cohere, scaled logits": CohereConfig(**SMALL, logit_scale=0.25),
    "gpt2, learned positions": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=64),
}
PADDED = {
    "gemma2, soft-capped attention": Gemma2Config(
        **SMALL, head_dim=4, query_pre_attn_scalar=4, attn_logit_softcapping=2.0, final_logit_softcapping=2.0
    ),
    "gpt-oss, attention sinks": GptOssConfig(**SMALL, head_dim=4, num_local_experts=2, num_experts_per_tok=1),
    "mamba, no attention": MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4),
}
PROMPTS = [[1, 2, 3, 4, 5]] * 3 + [[7, 8]] * 2 + [[9]]
OUTPUTS = [[10, 11, 12, 13, 14, 15, 16], [20], [21, 22, 23], [30, 31, 32, 33], [34, 35], [36, 37, 38, 39, 1, 2, 3, 4]]


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def unpacked_logprobs(model: Any, temperature: float) -> torch.Tensor:
    values = []
    for prompt, output in zip(PROMPTS, OUTPUTS, strict=True):
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits / temperature, -1)
        values.append(table.gather(1, torch.tensor(output)[:, None])[:, 0])
    return torch.cat(values)


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_bin_equals_unpacked_sequences(name: str) -> None:
    model = build(PACKABLE[name])
    truth = unpacked_logprobs(model, 0.8)
    policy = PolicyModel(model, temperature=0.8)
    choose_layout(policy, World())
    assert policy.packed
    prompt_groups = group_by_prompt(PROMPTS, OUTPUTS, 1000)
    with torch.no_grad():
        logprobs, _, _ = policy(build_packed(prompt_groups, PROMPTS, OUTPUTS))
    torch.testing.assert_close(logprobs, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PADDED)
def test_architecture_that_cannot_be_packed_runs_in_padded_rows(name: str) -> None:
    model = build(PADDED[name])
    model.set_attn_implementation("eager")
    truth = unpacked_logprobs(model, 0.8)
    policy = PolicyModel(model, temperature=0.8)
    choose_layout(policy, World())
    assert not policy.packed
    prompt_groups = group_by_prompt(PROMPTS, OUTPUTS, 1000, share=False)
    with torch.no_grad():
        logprobs, _, _ = policy(build_padded(prompt_groups, PROMPTS, OUTPUTS))
    torch.testing.assert_close(logprobs, truth, atol=1e-5, rtol=1e-5)


def test_model_whose_head_is_not_understood_is_refused() -> None:
    model = build(LlamaConfig(**SMALL))
    own: Callable[..., Any] = model.forward

    def doubled(*arguments: Any, **settings: Any) -> Any:
        output = own(*arguments, **settings)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        choose_layout(PolicyModel(model, temperature=1.0), World())


def test_dropout_is_off(tmp_path: Path) -> None:
    build(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5)).save_pretrained(
        tmp_path
    )
    policy = load_policy(tmp_path, temperature=1.0, world=World()).train()
    prompt_groups = group_by_prompt(PROMPTS, OUTPUTS, 1000)
    packed = build_packed(prompt_groups, PROMPTS, OUTPUTS)
    assert torch.equal(policy(packed)[0], policy(packed)[0])


def test_a_long_bin_needs_no_mask_over_its_positions() -> None:
    policy = PolicyModel(build(LlamaConfig(**SMALL)), temperature=1.0)
    prompts = [[number % 40, 1, 2] for number in range(60)]
    outputs = [[3 + number % 30] * (20 + number % 20) for number in range(60)]
    packed = build_packed(group_by_prompt(prompts, outputs, 10_000), prompts, outputs)
    positions = packed.input_ids.numel()
    assert positions > 1500
    with LargestResult() as largest:
        torch.autograd.backward(policy(packed)[0].sum())
    assert largest.elements < positions**2 / 10


@pytest.mark.parametrize("packed", [True, False])
def test_tokens_of_an_environment_are_attended_to_and_have_exactly_no_gradient(packed: bool) -> None:
    model = build(LlamaConfig(**SMALL))
    policy = PolicyModel(model, temperature=0.8)
    prompts, outputs, lengths = [[1, 2, 3]] * 2, [[10, 11, 12, 13, 14, 15], [20, 21]], [[2, 3, 1], [2]]
    groups = group_by_prompt(prompts, outputs, 1000, share=packed)
    make = build_packed if packed else build_padded
    policy.set_layout("packed" if packed else "eager")
    chosen = make(groups, prompts, outputs, lengths)
    assert chosen.target_N.tolist() == [10, 11, 15, 20, 21]
    states: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    model.base_model.register_forward_hook(keep)
    logprobs, _, _ = policy(chosen)
    torch.autograd.backward(logprobs.sum())
    gradient = states[0].grad
    assert gradient is not None
    given = torch.ones(gradient.flatten(0, 1).shape[0], dtype=torch.bool)
    given[chosen.source_N] = False
    assert given.any()
    assert torch.count_nonzero(gradient.flatten(0, 1)[given]) == 0
    changed, _, _ = policy(make(groups, prompts, [[10, 11, 12, 5, 14, 15], [20, 21]], lengths))
    assert torch.equal(changed[:2], logprobs[:2])
    assert changed[2] != logprobs[2]


BEGINNINGS = {
    "equal completions": [[10, 11, 12, 13], [10, 11, 12, 13], [20, 21], [20, 21]],
    "one is the beginning of another": [[10, 11, 12, 13, 14], [10, 11], [10], [10, 11, 12]],
    "shared beginnings": [[10, 11, 12, 13, 14, 15], [10, 11, 12, 3, 4], [10, 11, 2], [7, 11, 12, 13]],
    "equal but for the last token": [[10, 11, 12], [10, 11, 13], [10, 11, 14]],
    "single tokens": [[10], [10], [11]],
}


@pytest.mark.parametrize("outputs", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("name", ["llama", "mistral with a window", "gpt2, learned positions"])
def test_beginnings_that_completions_share_are_computed_once_with_the_same_gradient(
    name: str, outputs: list[list[int]]
) -> None:
    prompts = [[1, 2, 3, 4]] * len(outputs) + [[5, 6]]
    outputs = [*outputs, outputs[0]]
    weights = torch.arange(1.0, 1.0 + sum(map(len, outputs)))
    found = []
    for layout in ("packed", "eager"):
        policy = PolicyModel(build(PACKABLE[name]), temperature=0.8)
        policy.set_layout(layout)
        make = build_packed if layout == "packed" else build_padded
        chosen = make(group_by_prompt(prompts, outputs, 1000, share=policy.packed), prompts, outputs)
        order = torch.argsort(chosen.member_N, stable=True)
        logprobs_N = policy(chosen)[0][order]
        assert chosen.target_N[order].tolist() == [token for output in outputs for token in output]
        (logprobs_N * weights).sum().backward()
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        found.append((logprobs_N.detach(), gradients, chosen))
    (ours, our_gradients, packed), (theirs, their_gradients, _) = found
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    # Rounding scales with the largest terms: entries that cancel out have errors of the same size.
    largest = max(float(gradient.abs().max()) for gradient in their_gradients)
    torch.testing.assert_close(our_gradients, their_gradients, atol=1e-4 * largest, rtol=0.0)
    of_first = {tuple(output[:end]) for output in outputs[:-1] for end in range(1, len(output))}
    assert packed.input_ids.numel() == 4 + len(of_first) + 2 + len(outputs[0]) - 1
