"""What is asked of the variable-length kernel, without a GPU: a stand-in notes it and answers row by row."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from shoal.policy.architecture import causal_mask
from shoal.training.model import attention
from shoal.training.model.model import PolicyModel
from shoal.training.packing.bins import Bin, build_packed
from shoal.training.packing.packing import group_by_prompt

SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
PROMPTS = [[1, 2, 3]] * 3 + [[7, 8]]
OUTPUTS = [[10, 11, 12, 13, 14, 15, 16], [20], [21, 22, 23], [30, 31, 32, 33]]


class Kernel:
    """Notes every call, and attends within each row as the kernel does."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *places: Any, **settings: Any) -> Tensor:
        starts, _, longest, _ = places
        dtypes = {tensor.dtype for tensor in (query, key, value)}
        self.calls.append(
            {"dtypes": dtypes, "starts": starts.tolist(), "dtype": starts.dtype, "longest": longest, **settings}
        )
        before = settings["window_size"][0]
        return torch.cat([
            self._row(query[first:last], key[first:last], value[first:last], before, settings)
            for first, last in zip(starts.tolist(), starts.tolist()[1:], strict=False)
        ])  # fmt: skip

    def _row(self, query: Tensor, key: Tensor, value: Tensor, before: int, settings: dict[str, Any]) -> Tensor:
        mask = causal_mask(len(query), None if before < 0 else before + 1, query.device)
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        gqa, scale = settings["enable_gqa"], settings["scale"]
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)
        return output.transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", made)
    monkeypatch.setattr(attention, "_has_varlen", lambda device, dtype: dtype in attention.HALF)
    return made


def policy_of(config: Any) -> PolicyModel:
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config).eval(), temperature=1.0)
    policy.set_layout("packed")
    return policy


def packed_bin() -> Bin:
    return build_packed(group_by_prompt(PROMPTS, OUTPUTS, 1000), PROMPTS, OUTPUTS)


def test_one_process_in_half_precision_asks_for_the_kernel_once_per_layer(kernel: Kernel) -> None:
    """Rotary positions left the query in fp32, so the kernel was never asked."""
    policy = policy_of(LlamaConfig(**SMALL))
    policy.autocast_dtype = torch.bfloat16
    policy(packed_bin())
    assert len(kernel.calls) == 2
    for call in kernel.calls:
        assert call["dtypes"] == {torch.bfloat16}
        assert call["starts"] == [0, 9, 14, 19]
        assert (call["dtype"], call["longest"], call["window_size"]) == (torch.int32, 9, (-1, 0))


def test_the_kernel_is_asked_for_the_window(kernel: Kernel) -> None:
    policy = policy_of(MistralConfig(**SMALL, sliding_window=3))
    policy.autocast_dtype = torch.bfloat16
    policy(packed_bin())
    assert {call["window_size"] for call in kernel.calls} == {(2, 0)}


def test_fp32_does_not_ask_for_it(kernel: Kernel) -> None:
    policy_of(LlamaConfig(**SMALL))(packed_bin())
    assert kernel.calls == []


@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_the_kernel_give_what_padded_blocks_give(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    torch.manual_seed(0)
    plan = packed_bin().plan
    assert plan is not None
    query, key, value = (torch.randn(1, heads, len(plan.back_T), 8, requires_grad=True) for heads in (4, 2, 2))

    def attend() -> tuple[Tensor, ...]:
        output, _ = attention.packed_attention(
            torch.nn.Module(), query, key, value, None, attention_plan=plan, sliding_window=window
        )
        weights = torch.arange(output.numel()).view(output.shape) % 7 - 3.0
        return output, *torch.autograd.grad((output * weights).sum(), (query, key, value))

    blocks = attend()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", Kernel())
    monkeypatch.setattr(attention, "_has_varlen", lambda device, dtype: True)
    for ours, theirs in zip(attend(), blocks, strict=True):
        torch.testing.assert_close(ours, theirs)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations whose result the processor must wait for, were they on a GPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "repeat_interleave.Tensor")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        boolean = name.startswith("index.") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if boolean or name.startswith(self.NAMES):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 3])
def test_no_layer_waits_for_the_device(kernel: Kernel, window: int | None, tmp_path: Path) -> None:
    """Each layer asked for lengths and masks, twice per block. What is left does not grow with layers or blocks."""
    waits = {}
    for layers in (1, 4):
        config = MistralConfig(**{**SMALL, "num_hidden_layers": layers}, sliding_window=window)
        policy, chosen = policy_of(config), packed_bin()
        with Waits() as mode:
            torch.autograd.backward(policy(chosen)[0].sum())
        waits[layers] = mode.seen
    assert waits[4] == waits[1]


def test_the_mask_of_a_window_is_made_once_per_bin(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = causal_mask

    def counted(length: int, window: int | None, device: torch.device) -> Tensor:
        made.append(length)
        return real(length, window, device)

    monkeypatch.setattr("shoal.training.packing.bins.causal_mask", counted)
    policy = policy_of(MistralConfig(**{**SMALL, "num_hidden_layers": 4}, sliding_window=3))
    policy(packed_bin())
    assert sorted(made) == sorted(set(made))
    assert made
