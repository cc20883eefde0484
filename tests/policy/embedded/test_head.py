"""Logits of bf16 engines are sums of exact products in float32, whatever the size of the head."""

from pathlib import Path

import pytest
import torch

from shoal.policy import TorchEngine
from shoal.policy.embedded import head
from shoal.policy.engine import ScoreRequest
from support.tiny_run import save_policy


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 7, 300])
def test_blocks_of_the_head_give_the_products_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, bias: bool
) -> None:
    monkeypatch.setattr(head, "BLOCK_VALUES", 64)
    generator = torch.Generator().manual_seed(vocabulary)
    states, weight = torch.randn(5, 24, generator=generator).bfloat16(), torch.randn(vocabulary, 24).bfloat16()
    added = torch.randn(vocabulary).bfloat16() if bias else None
    expected = states.double() @ weight.double().t() + (0 if added is None else added.double())
    products = head.wide_products(states, weight, added)
    assert products.dtype == torch.float32
    torch.testing.assert_close(products.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_bf16_engine_does_not_round_its_logits(tmp_path: Path) -> None:
    directory = save_policy(tmp_path / "model", seed=1)
    narrow = TorchEngine(directory, eos_token_ids=[0], dtype="bfloat16")
    request = ScoreRequest((3, 4, 5), (6, 7, 8, 9), 11)
    (scored,) = narrow.score([request], temperature=1.0)
    logits = narrow._runner.logits(scored.states)
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).any()
    claimed = torch.log_softmax(logits, -1).gather(-1, torch.tensor(request.output_tokens)[:, None]).squeeze(-1)
    torch.testing.assert_close(scored.logprobs, claimed)
