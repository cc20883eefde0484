"""Samples of a decode batch share rows until they differ: what is arranged, and that it changes no completion."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.policy import GenerationRequest, TorchEngine
from shoal.policy.embedded.decode_batch import DecodeBatch
from shoal.policy.embedded.family import RowCache
from shoal.policy.embedded.samples import Arrangement, arrange
from shoal.policy.engine import Completion
from support.tiny_models import save_model
from support.turns import Turns, play

PROMPT = (7, 8, 9)


def arranged(tokens: Sequence[int], rows: Sequence[int], staying: Sequence[int]) -> Arrangement:
    return arrange(*(np.array(values, dtype=np.int64) for values in (tokens, rows, staying)))


def test_samples_of_one_row_that_agree_stay_together() -> None:
    found = arranged([5, 5, 6, 5], [0, 0, 1, 0], [0, 1, 2, 3])
    assert found.rows == 2
    assert found.order_S.tolist() == [0, 2, 1, 3]
    assert found.row_S.tolist() == [0, 1, 0, 0]
    assert not found.to_rows.size


def test_a_sample_that_parts_gets_a_copy_of_its_row() -> None:
    found = arranged([5, 5, 6], [0, 0, 0], [0, 1, 2])
    assert found.rows == 2
    assert found.order_S.tolist() == [0, 2, 1]
    assert (found.to_rows.tolist(), found.from_rows.tolist()) == ([1], [0])


def test_the_followers_of_a_sample_that_leaves_keep_its_row() -> None:
    found = arranged([5, 7, 5], [0, 1, 0], [1, 2])
    assert found.order_S.tolist() == [2, 1]
    assert found.row_S.tolist() == [0, 1]
    assert not found.to_rows.size


def test_the_last_row_takes_the_place_of_one_that_is_gone() -> None:
    found = arranged([5, 6, 7], [0, 1, 2], [1, 2])
    assert found.rows == 2
    assert sorted(zip(found.to_rows.tolist(), found.from_rows.tolist(), strict=True)) == [(0, 2)]


def test_equal_tokens_in_different_rows_do_not_share() -> None:
    assert arranged([5, 5], [0, 1], [0, 1]).rows == 2


def test_nobody_stays() -> None:
    found = arranged([5, 5], [0, 0], [])
    assert found.rows == found.order_S.size == found.to_rows.size == 0


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_every_sample_reads_what_its_row_held(states: list[tuple[int, int, bool]]) -> None:
    rows = [row for row, _, _ in states]
    tokens = [token for _, token, _ in states]
    staying = [place for place, (_, _, stays) in enumerate(states) if stays]
    found = arranged(tokens, rows, staying)
    held = np.arange(16)
    assert not set(found.to_rows.tolist()) & set(found.from_rows.tolist())
    held[found.to_rows] = held[found.from_rows]
    assert sorted(found.order_S.tolist()) == staying
    assert found.row_S[: found.rows].tolist() == list(range(found.rows))
    assert found.rows == len({(rows[place], tokens[place]) for place in staying})
    for place, row in zip(found.order_S.tolist(), found.row_S.tolist(), strict=True):
        assert held[row] == rows[place]
        assert tokens[place] == tokens[found.order_S[row]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return TorchEngine(save_model("llama", tmp_path_factory.mktemp("model")), eos_token_ids=())


def group(seeds: Sequence[int], *, prompt: tuple[int, ...] = PROMPT, longest: int = 40) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, seed, longest) for seed in seeds]


def completed(stream: DecodeBatch, numbers: Sequence[int]) -> list[Completion]:
    ended: dict[int, Completion] = {}
    while stream.unfinished:
        ended.update(stream.step())
    return [ended[number] for number in numbers]


@pytest.fixture
def computed(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each decoding step."""
    counts: list[int] = []
    runner = engine._runner
    decode = runner.decode

    def counting(tokens: torch.Tensor, positions: torch.Tensor, cache: RowCache, longest: int) -> torch.Tensor:
        counts.append(tokens.shape[0])
        return decode(tokens, positions, cache, longest)

    monkeypatch.setattr(runner, "decode", counting)
    return counts


def equal(left: Sequence[Completion], right: Sequence[Completion]) -> bool:
    """Tokens exactly; log-probabilities up to the rounding of another number of rows, which a low temperature multiplies."""
    return all(
        one.tokens == other.tokens
        and np.allclose(one.logprobs, other.logprobs, atol=1e-3)
        and len(one.proofs) == len(other.proofs)
        for one, other in zip(left, right, strict=True)
    )


def test_samples_with_one_seed_are_computed_once(engine: TorchEngine, computed: list[int]) -> None:
    made = engine.generate(group([3] * 6), temperature=1.0)
    assert computed == [1] * 39
    assert all(one == made[0] for one in made)
    assert equal(made[:1], engine.generate(group([3]), temperature=1.0))


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
def test_shared_rows_give_what_each_sample_gives_alone(
    engine: TorchEngine, computed: list[int], temperature: float
) -> None:
    requests = [*group(range(8)), *group(range(8), prompt=(9, 8)), *group([1, 1, 2], prompt=(4,), longest=33)]
    made = engine.generate(requests, temperature=temperature)
    together = sum(computed)
    alone = [engine.generate([request], temperature=temperature)[0] for request in requests]
    assert equal(made, alone)
    assert together < sum(computed) - together, "samples with a common beginning cost as much as alone"


def test_a_leader_that_ends_or_is_cancelled_leaves_its_row_to_the_others(engine: TorchEngine) -> None:
    requests = [GenerationRequest(PROMPT, 3, longest) for longest in (5, 9, 1, 40, 40)]
    alone = [engine.generate([request], temperature=0.05)[0] for request in requests]
    with engine.open(temperature=0.05, max_tokens=64) as stream:
        numbers = stream.submit(requests)
        ended: dict[int, Completion] = {}
        for _ in range(12):
            ended.update(stream.step())
        stream.cancel([numbers[3]])
        while stream.unfinished:
            ended.update(stream.step())
    assert sorted(ended) == [numbers[at] for at in (0, 1, 2, 4)]
    assert equal([ended[number] for number in sorted(ended)], [alone[at] for at in (0, 1, 2, 4)])


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_samples_and_not_rows_are_limited(engine: TorchEngine, computed: list[int], rows: int) -> None:
    requests = group([seed // 2 for seed in range(9)], longest=12)
    alone = [engine.generate([request], temperature=0.1)[0] for request in requests]
    computed.clear()
    with engine.open(temperature=0.1, max_tokens=64, rows=rows) as stream:
        numbers = stream.submit(requests)
        made = completed(stream, numbers)
    assert equal(made, alone)
    assert max(computed) <= rows


def test_a_sample_that_enters_later_does_not_join_a_row_that_has_gone_on(engine: TorchEngine) -> None:
    requests = group([3, 3], longest=20)
    with engine.open(temperature=1.0, max_tokens=64, rows=8) as stream:
        (first,) = stream.submit(requests[:1])
        stream.step()
        stream.step()
        (second,) = stream.submit(requests[1:])
        one, other = completed(stream, [first, second])
    assert equal([one], [other])


def test_turns_of_samples_that_were_equal_keep_rows_of_their_own(tmp_path: Path) -> None:
    engine = TorchEngine(save_model("llama", tmp_path), eos_token_ids=range(10, 30))
    make: Callable[[], list[Turns]] = lambda: [Turns((5, 6, 4), seed // 2, 60) for seed in range(8)]  # noqa: E731
    found = []
    for rows in (8, 1):
        played = make()
        with engine.open(temperature=0.3, max_tokens=256, rows=rows) as stream:
            play(stream, played)
        found.append([(one.output, one.lengths) for one in played])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1], "one seed, one sample"
    assert max(len(lengths) for _, lengths in found[0]) > 2
