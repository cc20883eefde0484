import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.policy import (
    ArchitectureError,
    Completion,
    EngineBusyError,
    GenerationRequest,
    ModelError,
    RequestError,
    ScoreRequest,
    Stream,
    TorchEngine,
    WeightsNotLoadedError,
)
from shoal.proofs.commitments import CHUNK_TOKENS, build_proofs, compare_chunks, split_chunks
from shoal.proofs.sampling import choose_tokens
from support.tiny_models import EOS, RUNNABLE, VOCAB_SIZE

Directory = Callable[..., Path]


def make_engine(directory: Path, *, eos: Sequence[int] = (EOS,), max_batch: int = 16) -> TorchEngine:
    return TorchEngine(directory, eos_token_ids=eos, max_batch=max_batch, prefill_tokens=64)


def make_requests(prompts: int, samples: int = 3, *, seed: int = 0, longest: int = 40) -> list[GenerationRequest]:
    rng = random.Random(seed)
    requests = []
    for _ in range(prompts):
        prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20)))
        requests += [GenerationRequest(prompt, rng.getrandbits(64), rng.randint(1, longest)) for _ in range(samples)]
    rng.shuffle(requests)
    return requests


def score_requests(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> list[ScoreRequest]:
    return [
        ScoreRequest(request.prompt_tokens, tuple(completion.tokens), request.seed)
        for request, completion in zip(requests, completions, strict=True)
    ]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("name", RUNNABLE)
def test_scoring_confirms_what_was_generated(model_directory: Directory, name: str) -> None:
    engine = make_engine(model_directory(name))
    requests = make_requests(8)
    completions = engine.generate(requests, temperature=0.9)
    for completion, scored in zip(
        completions, engine.score(score_requests(requests, completions), temperature=0.9), strict=True
    ):
        assert scored.margins.max() <= 1e-3
        torch.testing.assert_close(scored.logprobs, torch.tensor(completion.logprobs), atol=1e-3, rtol=0)
        assert scored.states.dtype == torch.bfloat16
        assert scored.states.shape == (len(completion.tokens), 48)


def test_half_precision_loses_only_by_rounding(model_directory: Directory) -> None:
    engine = TorchEngine(model_directory("qwen3"), eos_token_ids=(), dtype="bfloat16")
    requests = make_requests(4)
    completions = engine.generate(requests, temperature=1.0)
    scored = engine.score(score_requests(requests, completions), temperature=1.0)
    assert max(float(score.margins.max()) for score in scored) < 0.5
    assert engine.numerics_class == "torch/bfloat16/cpu"


def test_tokens_are_those_of_a_plain_loop_over_the_model(model_directory: Directory) -> None:
    directory = model_directory("qwen3")
    request = GenerationRequest((5, 9, 33, 7), seed=(1 << 64) - 3, max_new_tokens=12)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = list(request.prompt_tokens)
    with torch.no_grad():
        for position in range(12):
            logits = model(torch.tensor([tokens])).logits[:, -1]
            chosen, _ = choose_tokens(logits, torch.tensor([-3]), torch.tensor([position]), 1.0)
            tokens.append(int(chosen))
    completion = make_engine(directory, eos=()).generate([request], temperature=1.0)[0]
    assert completion.tokens == tokens[4:]


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    requests = make_requests(6)
    together = tokens_of(engine.generate(requests, temperature=1.0))
    alone = [engine.generate([request], temperature=1.0)[0].tokens for request in requests]
    assert together == alone


def test_rows_leave_and_enter_when_there_are_more_requests_than_rows(model_directory: Directory) -> None:
    requests = make_requests(10, samples=4)
    wide = make_engine(model_directory("llama"), max_batch=64).generate(requests, temperature=1.0)
    for rows in (1, 3, 8):
        narrow = make_engine(model_directory("llama"), max_batch=rows).generate(requests, temperature=1.0)
        assert tokens_of(narrow) == tokens_of(wide)


def test_a_completion_ends_with_the_end_token_or_at_its_limit(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"), eos=(EOS, 40, 41))
    requests = make_requests(20)
    completions = engine.generate(requests, temperature=1.0)
    for request, completion in zip(requests, completions, strict=True):
        stopped = completion.tokens[-1] in (EOS, 40, 41)
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.tokens) == request.max_new_tokens
        assert not {EOS, 40, 41} & set(completion.tokens[:-1])
        assert len(completion.logprobs) == len(completion.tokens)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_one_new_token_comes_from_the_prefill_alone(model_directory: Directory) -> None:
    engine = make_engine(model_directory("qwen2"), max_batch=2)
    completions = engine.generate([GenerationRequest((9,), seed, 1) for seed in range(5)], temperature=1.0)
    assert [len(completion.tokens) for completion in completions] == [1] * 5


def test_equal_prompts_are_prefilled_once(model_directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_directory("llama"), max_batch=2, eos=())
    prefilled: list[int] = []
    prefill: Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]
    prefill = engine._runner.prefill  # type: ignore[attr-defined]  # a transformer's

    def counting(ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        prefilled.append(ids.shape[0])
        return prefill(ids)

    monkeypatch.setattr(engine._runner, "prefill", counting)
    requests = [
        GenerationRequest((4, 5, 6 + prompt), 7 * prompt + sample, 3) for sample in range(5) for prompt in (0, 1)
    ]
    completions = engine.generate(requests, temperature=1.0)
    assert sum(prefilled) == 2
    engine.score(score_requests(requests, completions), temperature=1.0)
    assert sum(prefilled) == 4


def test_commitments_match_the_states_that_scoring_sees(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"), eos=(), max_batch=3)
    requests = [GenerationRequest((7, 8), seed, new) for seed, new in ((1, 1), (2, 31), (3, 32), (4, 33), (5, 100))]
    completions = engine.generate(requests, temperature=1.0)
    for completion, scored in zip(
        completions, engine.score(score_requests(requests, completions), temperature=1.0), strict=True
    ):
        chunks = split_chunks(scored.states)
        assert len(completion.proofs) == len(chunks) == -(-len(completion.tokens) // CHUNK_TOKENS)
        for difference in compare_chunks(completion.proofs, chunks):
            assert difference.exponent_mismatches <= 2
            assert difference.mantissa_mean < 2
        other = [chunk.flip(0).flip(1) for chunk in chunks]
        assert build_proofs(other) != completion.proofs


def test_progress_counts_every_token(model_directory: Directory) -> None:
    heard: list[int] = []
    completions = make_engine(model_directory("llama")).generate(
        make_requests(4), temperature=1.0, on_progress=heard.append
    )
    assert heard == sorted(heard)
    assert heard[-1] == sum(len(completion.tokens) for completion in completions)


def test_an_interrupted_call_leaves_the_engine_usable(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    requests = make_requests(4)
    expected = tokens_of(engine.generate(requests, temperature=1.0))

    def interrupt(generated: int) -> None:
        if generated > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests, temperature=1.0, on_progress=interrupt)
    assert tokens_of(engine.generate(requests, temperature=1.0)) == expected


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_loading_another_version_changes_outputs_to_exactly_its_own(model_directory: Directory, name: str) -> None:
    requests = make_requests(5)
    engine = make_engine(model_directory(name))
    first = tokens_of(engine.generate(requests, temperature=1.0))
    engine.load(model_directory(name, seed=1))
    second = engine.generate(requests, temperature=1.0)
    fresh = make_engine(model_directory(name, seed=1)).generate(requests, temperature=1.0)
    assert second == fresh
    assert tokens_of(second) != first
    engine.load(model_directory(name))
    assert tokens_of(engine.generate(requests, temperature=1.0)) == first


def test_loading_keeps_every_tensor_where_it_is(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    before = {name: tensor.data_ptr() for name, tensor in engine._runner.model.named_parameters()}
    engine.load(model_directory("llama", seed=1))
    assert {name: tensor.data_ptr() for name, tensor in engine._runner.model.named_parameters()} == before


def test_a_refused_version_leaves_the_old_one(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    requests = make_requests(2)
    before = engine.generate(requests, temperature=1.0)
    with pytest.raises(ArchitectureError, match="does not have"):
        engine.load(model_directory("qwen3"))
    assert engine.generate(requests, temperature=1.0) == before


def test_an_engine_without_weights_waits_for_a_version(model_directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_directory("llama") / "config.json").read_text())
    engine = make_engine(tmp_path)
    request = GenerationRequest((5,), 0, 4)
    with pytest.raises(WeightsNotLoadedError):
        engine.generate([request], temperature=1.0)
    engine.load(model_directory("llama"))
    assert engine.generate([request], temperature=1.0) == make_engine(model_directory("llama")).generate(
        [request], temperature=1.0
    )


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (GenerationRequest((), 0, 4), "no tokens"),
        (GenerationRequest((3, VOCAB_SIZE), 0, 4), "vocabulary ends at 63"),
        (GenerationRequest((3, -1), 0, 4), "token -1"),
        (GenerationRequest((3,) * 250, 0, 7), "needs 257 positions; the model has 256"),
        (GenerationRequest((3,), 0, 0), "0 new tokens"),
        (GenerationRequest((3,), 1 << 64, 4), "unsigned 64-bit"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    model_directory: Directory, request_: GenerationRequest, why: str
) -> None:
    engine = make_engine(model_directory("llama"))
    with pytest.raises(RequestError, match=why):
        engine.generate([GenerationRequest((3,), 0, 4), request_], temperature=1.0)


def test_scoring_refuses_what_was_never_generated(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    for request in (ScoreRequest((3,), (), 0), ScoreRequest((3,), (VOCAB_SIZE,), 0), ScoreRequest((3,), (3,) * 256, 0)):
        with pytest.raises(RequestError):
            engine.score([request], temperature=1.0)
    with pytest.raises(RequestError, match="Temperature"):
        engine.score([], temperature=0.0)


def test_another_token_has_a_margin(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    request = GenerationRequest((5, 6, 7), 11, 20)
    tokens = engine.generate([request], temperature=1.0)[0].tokens
    tokens[3] = (tokens[3] + 1) % VOCAB_SIZE
    margins = engine.score([ScoreRequest((5, 6, 7), tuple(tokens), 11)], temperature=1.0)[0].margins
    assert margins[:3].max() == 0
    assert margins[3] > 0


def test_nothing_in_nothing_out(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    assert engine.generate([], temperature=1.0) == []
    assert engine.score([], temperature=1.0) == []


@pytest.mark.parametrize(("name", "why"), [("gemma2", "softcap"), ("mamba", "layers without attention")])
def test_architectures_that_would_run_wrong_are_refused(model_directory: Directory, name: str, why: str) -> None:
    with pytest.raises(ArchitectureError, match=why):
        make_engine(model_directory(name))


def test_an_end_token_outside_of_the_vocabulary_is_refused(model_directory: Directory) -> None:
    with pytest.raises(ModelError, match="tokenizer does not fit"):
        make_engine(model_directory("llama"), eos=(VOCAB_SIZE,))


def drain(stream: Stream, ended: dict[int, Completion]) -> dict[int, Completion]:
    while stream.unfinished:
        ended.update(stream.step())
    return ended


def test_requests_enter_while_others_run_and_leave_when_they_end(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"), eos=(), max_batch=2)
    first, second, third = [GenerationRequest((7, 8), seed, new) for seed, new in ((1, 9), (2, 2), (3, 3))]
    expected = tokens_of(engine.generate([first, second, third], temperature=1.0))
    ended: dict[int, Completion] = {}
    with engine.open(temperature=1.0, max_tokens=64) as stream:
        one, two = stream.submit([first, second])
        ended.update(stream.step())
        assert list(ended) == [two], "the short one leaves, the long one stays"
        assert stream.unfinished == 1
        (three,) = stream.submit([third])
        order = list(drain(stream, ended))
        assert stream.generated == 14
    assert order == [two, three, one]
    assert tokens_of([ended[number] for number in (one, two, three)]) == expected


def test_a_stream_made_of_random_arrivals_gives_the_completions_of_single_calls(model_directory: Directory) -> None:
    engine = make_engine(model_directory("qwen3"), max_batch=5)
    requests = make_requests(12)
    expected = engine.generate(requests, temperature=0.8)
    rng, waiting = random.Random(3), [*range(len(requests))]
    rng.shuffle(waiting)
    index_of: dict[int, int] = {}
    ended: dict[int, Completion] = {}
    with engine.open(temperature=0.8, max_tokens=128) as stream:
        while waiting or stream.unfinished:
            count = rng.randrange(4)
            part, waiting = waiting[:count], waiting[count:]
            index_of.update(zip(stream.submit([requests[at] for at in part]), part, strict=True))
            ended.update(stream.step())
    found = {index_of[number]: completion for number, completion in ended.items()}
    assert [found[at].tokens for at in range(len(requests))] == tokens_of(expected)
    assert [len(found[at].proofs) for at in range(len(requests))] == [len(one.proofs) for one in expected]


def test_cancelled_requests_leave_their_rows_and_never_end(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"), eos=(), max_batch=3)
    requests = [GenerationRequest((7, 8), seed, 40) for seed in range(6)]
    expected = tokens_of(engine.generate(requests, temperature=1.0))
    with engine.open(temperature=1.0, max_tokens=64) as stream:
        numbers = stream.submit(requests)
        for _ in range(35):  # past the first chunk
            assert not stream.step()
        stream.cancel([numbers[0], numbers[4], 1000])
        assert stream.unfinished == 4
        ended = drain(stream, {})
    assert sorted(ended) == [numbers[at] for at in (1, 2, 3, 5)]
    assert tokens_of([ended[numbers[at]] for at in (1, 2, 3, 5)]) == [expected[at] for at in (1, 2, 3, 5)]


def test_weights_are_not_replaced_under_a_running_request(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"), eos=())
    with engine.open(temperature=1.0, max_tokens=64) as stream:
        numbers = stream.submit([GenerationRequest((7, 8), 1, 5)])
        stream.step()
        with pytest.raises(EngineBusyError, match="1 requests still run"):
            engine.load(model_directory("llama", seed=1))
        stream.cancel(numbers)
        engine.load(model_directory("llama", seed=1))


def test_a_prompt_of_the_old_weights_is_not_used_with_new_ones(model_directory: Directory) -> None:
    """The stream keeps the prefill of its last prompt for requests that follow, but not over a swap."""
    request = GenerationRequest((7, 8, 9, 10), 1, 12)
    engine = make_engine(model_directory("llama"))
    with engine.open(temperature=1.0, max_tokens=64) as stream:
        stream.submit([request])
        drain(stream, {})
        engine.load(model_directory("llama", seed=1))
        (number,) = stream.submit([request])
        swapped = drain(stream, {})[number]
    fresh = make_engine(model_directory("llama", seed=1)).generate([request], temperature=1.0)[0]
    assert swapped == fresh


def test_an_engine_has_one_open_stream(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    with engine.open(temperature=1.0, max_tokens=64), pytest.raises(EngineBusyError, match="open stream"):
        engine.generate([GenerationRequest((5,), 0, 4)], temperature=1.0)
    assert engine.generate([GenerationRequest((5,), 0, 4)], temperature=1.0)


def test_a_stream_refuses_what_does_not_fit_and_takes_none_of_it(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"))
    with engine.open(temperature=1.0, max_tokens=64, rows=2) as stream:
        assert stream.rows == 2
        with pytest.raises(RequestError, match="needs 65 positions"):
            stream.submit([GenerationRequest((5,), 0, 4), GenerationRequest((5,), 0, 64)])
        assert stream.unfinished == 0


def test_the_cache_of_a_stream_does_not_grow_with_what_waits(model_directory: Directory) -> None:
    engine = make_engine(model_directory("llama"), eos=(), max_batch=4)
    with engine.open(temperature=1.0, max_tokens=64) as stream:
        stream.step()
        cache = engine._cache
        stream.submit([GenerationRequest((5, seed % 60), seed, 2) for seed in range(200)])
        assert len(drain(stream, {})) == 200
        assert engine._cache is cache
        assert cache is not None
        assert cache.rows == 4
