import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.policy import TorchEngine, prefixes, scoring
from shoal.policy.batching import length_batches
from shoal.policy.embedded.attention import Step
from shoal.policy.embedded.runner import ModelRunner
from shoal.policy.engine import RequestError, ScoreRequest
from shoal.proofs.sampling import token_margins
from support.tiny_models import EOS, RUNNABLE, save_model


@given(st.lists(st.integers(1, 50)), st.integers(1, 120))
def test_batches_hold_everything_once_and_stay_within_the_limit(lengths: list[int], token_limit: int) -> None:
    batches = list(length_batches(dict(enumerate(lengths)), token_limit=token_limit))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= token_limit


def test_neighbours_have_similar_lengths() -> None:
    assert list(length_batches({"a": 9, "b": 1, "c": 8, "d": 2}, token_limit=18)) == [["a", "c"], ["d", "b"]]


def test_samples_with_the_same_tokens_are_scored_by_their_own_seeds(tmp_path: Path) -> None:
    engine = TorchEngine(save_model("llama", tmp_path), eos_token_ids=[EOS])
    outputs = [(7, 8, 9), (7, 8, 9), (4,), (7, 8, 9), (4, 5)]
    requests = [ScoreRequest((5, 6), output, seed) for seed, output in enumerate(outputs)]
    requests.append(ScoreRequest((6, 6), (7, 8, 9), 0))
    together = engine.score(requests, temperature=0.7)
    for request, scored in zip(requests, together, strict=True):
        (alone,) = engine.score([request], temperature=0.7)
        torch.testing.assert_close(scored.margins, alone.margins, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.logprobs, alone.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.states, alone.states, atol=1e-2, rtol=2e-2)
    assert not torch.equal(together[0].margins, together[1].margins), "other seeds, other margins"


def test_tokens_are_fed_once_however_many_samples_hold_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(save_model("llama", tmp_path), eos_token_ids=[EOS])
    fed: list[int] = []
    run = ModelRunner.run

    def counted(runner: ModelRunner, ids_BS: torch.Tensor, positions_BS: torch.Tensor, step: Step) -> torch.Tensor:
        fed.append(ids_BS.numel())
        return run(runner, ids_BS, positions_BS, step)

    monkeypatch.setattr(ModelRunner, "run", counted)
    engine.score([ScoreRequest((5, 6), (7, 8, 9), seed) for seed in range(16)], temperature=1.0)
    assert sum(fed) == len((5, 6)) + len((7, 8))


def test_a_common_prefix_is_fed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(save_model("llama", tmp_path), eos_token_ids=[EOS])
    fed: list[int] = []
    run = ModelRunner.run

    def counted(runner: ModelRunner, ids_BS: torch.Tensor, positions_BS: torch.Tensor, step: Step) -> torch.Tensor:
        fed.append(ids_BS.numel())
        return run(runner, ids_BS, positions_BS, step)

    monkeypatch.setattr(ModelRunner, "run", counted)
    outputs = [(7, 8, 9, 10, last) for last in range(11, 15)] + [(7, 8, 6, 11)]
    engine.score([ScoreRequest((5, 6), output, 3) for output in outputs], temperature=1.0)
    assert sum(fed) == len((5, 6)) + len((7, 8, 9, 10, 6))


@pytest.mark.parametrize("name", RUNNABLE)
def test_outputs_that_share_prefixes_are_scored_like_each_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rng = TorchEngine(save_model(name, tmp_path), eos_token_ids=[EOS]), random.Random(0)
    common = [rng.randrange(3, 60) for _ in range(30)]
    outputs = [(*common[: rng.randrange(30)], *(rng.randrange(3, 60) for _ in range(4))) for _ in range(12)]
    requests = [ScoreRequest((5, 6, 7)[: 1 + seed % 3], output, seed) for seed, output in enumerate(outputs)]
    assert any(not tree.is_path for tree in prefixes.merged([request.output_tokens[:-1] for request in requests[::3]]))
    together = engine.score(requests, temperature=0.8)
    monkeypatch.setattr(prefixes, "LARGEST_TREE", 0)
    for scored, alone in zip(together, engine.score(requests, temperature=0.8), strict=True):
        torch.testing.assert_close(scored.margins, alone.margins, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.logprobs, alone.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored.states, alone.states, atol=1e-2, rtol=2e-2)


def test_logits_are_scored_in_chunks_like_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(save_model("llama", tmp_path), eos_token_ids=[EOS])
    requests = [ScoreRequest((5, 6), (7, 8, 9, 10)[: 2 + seed % 3], seed) for seed in range(9)]
    whole = engine.score(requests, temperature=1.0)
    monkeypatch.setattr(scoring, "LOGITS_CHUNK", 2 * engine.vocab_size)
    for chunked, once in zip(engine.score(requests, temperature=1.0), whole, strict=True):
        torch.testing.assert_close(chunked.margins, once.margins, atol=1e-5, rtol=0)
        torch.testing.assert_close(chunked.logprobs, once.logprobs, atol=1e-5, rtol=0)


def test_given_tokens_are_read_and_not_scored(tmp_path: Path) -> None:
    """What an environment gave has no score, changes the ones after it, and does not shift the noise."""
    engine = TorchEngine(save_model("llama", tmp_path), eos_token_ids=[EOS])
    output, lengths, sampled = (7, 8, 9, 10, 11, 12, 13), (2, 3, 2), [0, 1, 5, 6]
    whole, parts, other = engine.score(
        [
            ScoreRequest((5, 6), output, 3),
            ScoreRequest((5, 6), output, 3, lengths),
            ScoreRequest((5, 6), (7, 8, 9, 10, 4, 12, 13), 3, lengths),
        ],
        temperature=0.7,
    )
    torch.testing.assert_close(parts.logprobs, whole.logprobs[sampled])
    torch.testing.assert_close(parts.states, whole.states[sampled])
    torch.testing.assert_close(parts.margins[:2], whole.margins[:2])
    assert not torch.allclose(parts.margins[2:], whole.margins[[5, 6]]), "the noise counts sampled tokens"
    assert not torch.allclose(parts.logprobs[2:], other.logprobs[2:]), "given tokens are attended to"
    logits = engine._runner.logits(parts.states.float())
    seeds, index = torch.full((4,), 3), torch.arange(4)
    margins, _, _ = token_margins(logits, seeds, index, torch.tensor([7, 8, 12, 13]), 0.7)
    torch.testing.assert_close(parts.margins, margins, atol=2e-2, rtol=0)


@pytest.mark.parametrize("lengths", [(2, 3), (8,), (3, 0, 4)])
def test_segments_that_do_not_fit_the_output_are_refused(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    engine = TorchEngine(save_model("llama", tmp_path), eos_token_ids=[EOS])
    with pytest.raises(RequestError, match="Request 0 has"):
        engine.score([ScoreRequest((5,), (1, 2, 3, 4, 5, 6, 7), 0, lengths)], temperature=1.0)
