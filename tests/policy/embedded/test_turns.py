"""The turns of an episode in the embedded engine: the same tokens and proofs as a prefill of the whole row gives."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.policy import TorchEngine
from shoal.policy.embedded.attention import Step
from shoal.policy.engine import Completion, RequestError, ScoreRequest
from shoal.policy.turns import join_turns
from shoal.proofs import compare_chunks, split_chunks
from support.tiny_models import EOS, save_model
from support.turns import GIVEN, Turns, play


def samples(**options: bool) -> list[Turns]:
    return [Turns((5, 6, 4 + seed % 3), seed, 60, **options) for seed in range(9)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    # Several end tokens, so that turns end at different lengths and inside chunks.
    ends = [EOS, *range(10, 16)]
    return TorchEngine(save_model("llama", tmp_path_factory.mktemp("model")), eos_token_ids=ends)


@pytest.mark.parametrize("uses_cache", [True, False])
def test_turns_are_what_one_prefill_of_the_whole_row_says(engine: TorchEngine, uses_cache: bool) -> None:
    played = samples(uses_cache=uses_cache)
    with engine.open(temperature=0.8, max_tokens=256, rows=4) as stream:
        play(stream, played)
    assert max(len(one.turns) for one in played) == len(GIVEN) + 1
    requests = [ScoreRequest(one.prompt, tuple(one.output), one.seed, tuple(one.lengths)) for one in played]
    for one, scored in zip(played, engine.score(requests, temperature=0.8), strict=True):
        joined = join_turns(one.turns)
        assert len(joined.logprobs) == sum(one.lengths[::2]) == len(scored.margins)
        assert float(scored.margins.max()) < 1e-3
        torch.testing.assert_close(torch.tensor(joined.logprobs), scored.logprobs, atol=1e-4, rtol=0)
        chunks = split_chunks(scored.states)
        assert len(joined.proofs) == len(chunks)
        assert max(found.exponent_mismatches for found in compare_chunks(joined.proofs, chunks)) <= 8


def test_company_and_cache_change_no_token(engine: TorchEngine) -> None:
    found = []
    for rows, uses_cache in ((9, True), (1, True), (2, False)):
        played = samples(uses_cache=uses_cache)
        with engine.open(temperature=0.8, max_tokens=256, rows=rows) as stream:
            play(stream, played)
        found.append([(one.output, one.lengths) for one in played])
    assert found[0] == found[1] == found[2]


def test_a_later_turn_reads_only_new_tokens(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Turns((5, 6, 4), 2, 60)
    read: list[int] = []
    with engine.open(temperature=0.8, max_tokens=256, rows=1) as stream:
        (number,) = stream.submit([one.request()])
        ended: list[tuple[int, Completion]] = []
        while not ended:
            ended = stream.step()
        assert ended[0][0] == number
        assert one.take(ended[0][1])
        run: Callable[..., torch.Tensor] = engine._runner.run  # type: ignore[attr-defined]  # a transformer's

        def counted(ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
            read.append(ids.numel())
            return run(ids, positions, step)

        monkeypatch.setattr(engine._runner, "run", counted)
        stream.submit([one.request()])
        stream.step()
    assert read[0] == 1 + len(GIVEN[0]), "the end token of the turn, which was never fed, and what was given"


def test_a_sample_does_not_go_on_with_other_weights(engine: TorchEngine, tmp_path: Path) -> None:
    one = Turns((5, 6, 4), 2, 60)
    with engine.open(temperature=0.8, max_tokens=256, rows=2) as stream:
        stream.submit([one.request()])
        ended: list[tuple[int, Completion]] = []
        while not ended:
            ended = stream.step()
        assert one.take(ended[0][1])
        engine.load(save_model("llama", tmp_path))
        with pytest.raises(RequestError, match="other weights"):
            stream.submit([one.request()])
