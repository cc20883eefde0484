"""Needs vLLM, which has its own environment; `make test-vllm` runs these."""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.policy import (
    ArchitectureError,
    Completion,
    EngineBusyError,
    GenerationRequest,
    ModelError,
    NotEnoughMemoryError,
    RequestError,
    ScoreRequest,
    TorchEngine,
    models,
)
from shoal.policy.turns import join_turns
from shoal.policy.vllm.engine import VllmEngine, VllmError
from shoal.proofs.commitments import compare_chunks, split_chunks
from support.turns import GIVEN, Turns, play

Directory = Callable[..., Path]
EOS = (2, 40)
MODEL = "llama-32"  # a head size that vLLM has kernels for, and a tied head
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM has its own environment")


def make_requests(seed: int = 0) -> list[GenerationRequest]:
    rng = random.Random(seed)
    requests = []
    for _ in range(10):
        prompt = tuple(rng.randrange(3, 64) for _ in range(rng.randrange(1, 20)))
        requests += [GenerationRequest(prompt, rng.getrandbits(64), rng.randint(1, 70)) for _ in range(4)]
    rng.shuffle(requests)
    return requests


def score_requests(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> list[ScoreRequest]:
    return [
        ScoreRequest(request.prompt_tokens, tuple(completion.tokens), request.seed)
        for request, completion in zip(requests, completions, strict=True)
    ]


def worst_mantissa(completions: Sequence[Completion], states: Sequence[torch.Tensor]) -> float:
    differences = [
        difference
        for completion, rows in zip(completions, states, strict=True)
        for difference in compare_chunks(completion.proofs, split_chunks(rows))
    ]
    assert max(difference.exponent_mismatches for difference in differences) <= 4
    return max(difference.mantissa_mean for difference in differences)


@pytest.fixture(scope="module")
def engine(model_directory: Directory) -> VllmEngine:
    return VllmEngine(model_directory(MODEL), eos_token_ids=EOS, max_batch=8)


@pytest.fixture
def torch_engine(model_directory: Directory) -> TorchEngine:
    return TorchEngine(model_directory(MODEL), eos_token_ids=EOS)


@pytest.mark.slow
@needs_vllm
def test_both_engines_take_the_same_tokens(
    engine: VllmEngine, torch_engine: TorchEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = make_requests()
    ours, embedded = engine.generate(requests, temperature=0.9), torch_engine.generate(requests, temperature=0.9)
    same = sum(a.tokens == b.tokens for a, b in zip(ours, embedded, strict=True))
    with capsys.disabled():
        tokens = sum(len(completion.tokens) for completion in embedded)
        print(f"\n{same} of {len(requests)} completions the same on both engines, {tokens} tokens")
    assert same >= len(requests) - 1, "rounding ties aside"
    assert {completion.finish_reason for completion in ours} == {"stop", "length"}
    for left, right in zip(ours, embedded, strict=True):
        if left.tokens == right.tokens:
            assert left.finish_reason == right.finish_reason
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)
            assert len(left.proofs) == len(right.proofs)


@pytest.mark.slow
@needs_vllm
def test_each_engine_accepts_what_the_other_made(engine: VllmEngine, torch_engine: TorchEngine) -> None:
    requests = make_requests(1)
    for maker, scorer in ((engine, torch_engine), (torch_engine, engine), (engine, engine)):
        completions = maker.generate(requests, temperature=1.0)
        scored = scorer.score(score_requests(requests, completions), temperature=1.0)
        for completion, score in zip(completions, scored, strict=True):
            assert score.margins.max() <= 1e-3
            torch.testing.assert_close(score.logprobs, torch.tensor(completion.logprobs), atol=1e-3, rtol=0)
        assert worst_mantissa(completions, [score.states for score in scored]) < 8


@pytest.mark.slow
@needs_vllm
def test_a_cheat_on_vllm_is_seen(engine: VllmEngine, torch_engine: TorchEngine, model_directory: Directory) -> None:
    requests = [GenerationRequest((5, 6, 7), seed, 40) for seed in range(8)]
    torch_engine.load(model_directory(MODEL, seed=1))
    stale = torch_engine.generate(requests, temperature=1.0)
    scored = engine.score(score_requests(requests, stale), temperature=1.0)
    assert max(float(score.margins.max()) for score in scored) > 1.0


@pytest.mark.slow
@needs_vllm
def test_a_swap_changes_outputs_to_exactly_those_of_the_new_version(
    engine: VllmEngine, model_directory: Directory
) -> None:
    requests = make_requests(2)
    first = engine.generate(requests, temperature=1.0)
    engine.load(model_directory(MODEL, seed=1))
    second = engine.generate(requests, temperature=1.0)
    embedded = TorchEngine(model_directory(MODEL, seed=1), eos_token_ids=EOS).generate(requests, temperature=1.0)
    engine.load(model_directory(MODEL))
    assert sum(a.tokens == b.tokens for a, b in zip(second, embedded, strict=True)) >= len(requests) - 1
    assert [entry.tokens for entry in second] != [entry.tokens for entry in first]
    assert [entry.tokens for entry in engine.generate(requests, temperature=1.0)] == [entry.tokens for entry in first]


@pytest.mark.slow
@needs_vllm
def test_bad_weights_and_requests_are_refused_and_change_nothing(
    engine: VllmEngine, model_directory: Directory
) -> None:
    request = GenerationRequest((5, 6), 1, 20)
    before = engine.generate([request], temperature=1.0)
    with pytest.raises(ArchitectureError):
        engine.load(model_directory("qwen3"))
    with pytest.raises(RequestError):
        engine.generate([GenerationRequest((5,) * 250, 1, 20)], temperature=1.0)
    assert engine.generate([request], temperature=1.0) == before


@pytest.mark.slow
@needs_vllm
def test_an_interrupted_call_leaves_the_engine_usable(engine: VllmEngine) -> None:
    requests = make_requests(3)
    expected = engine.generate(requests, temperature=1.0)

    def interrupt(generated: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests, temperature=1.0, on_progress=interrupt)
    assert engine.generate(requests, temperature=1.0) == expected


@pytest.mark.slow
@needs_vllm
def test_a_model_that_vllm_has_no_kernels_for_is_refused_at_once(model_directory: Directory) -> None:
    code = (
        "import sys; from pathlib import Path; from shoal.policy.vllm.engine import VllmEngine, VllmError\n"
        "try: VllmEngine(Path(sys.argv[1]), eos_token_ids=())\n"
        "except VllmError as error: print('refused:', error)"
    )  # vLLM starts once per process
    command = [sys.executable, "-c", code, str(model_directory("llama"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "refused: vLLM cannot run the model" in result.stdout
    assert "head_dim=12" in result.stdout


def test_a_missing_vllm_is_named(model_directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(VllmError, match="not installed"):
        VllmEngine(model_directory(MODEL), eos_token_ids=EOS)


def test_an_unknown_version_is_refused(model_directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.__version__ = "0.99.1"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(VllmError, match=r"0\.99\.1 is not supported\. Supported: 0\.32\.x"):
        VllmEngine(model_directory(MODEL), eos_token_ids=EOS)


@pytest.fixture
def _supported_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were installed: what is refused before it starts needs nothing of it."""
    module: Any = ModuleType("vllm")
    module.__version__ = "0.32.0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.usefixtures("_supported_vllm")
def test_too_little_memory_is_refused_with_the_plan_before_vllm_starts(
    model_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setattr(models, "available_bytes", lambda device: 2 << 30)
    with pytest.raises(
        NotEnoughMemoryError, match=r"weights 0 MiB, staging 0 MiB, cache 3,072 MiB, available 2,048 MiB"
    ):
        VllmEngine(model_directory(MODEL), eos_token_ids=EOS)


@pytest.mark.usefixtures("_supported_vllm")
def test_an_end_token_that_the_model_does_not_know_is_refused(model_directory: Directory) -> None:
    with pytest.raises(ModelError, match="tokenizer does not fit"):
        VllmEngine(model_directory(MODEL), eos_token_ids=(64,))


@pytest.mark.slow
@needs_vllm
def test_requests_enter_while_others_run_and_leave_when_they_end(
    engine: VllmEngine, torch_engine: TorchEngine, model_directory: Directory
) -> None:
    requests = make_requests(4)[:10]
    expected = {at: one.tokens for at, one in enumerate(torch_engine.generate(requests, temperature=1.0))}
    at_of: dict[int, int] = {}
    ended: dict[int, list[int]] = {}
    with engine.open(temperature=1.0, max_tokens=128) as stream:
        for at, request in enumerate(requests):
            (number,) = stream.submit([request])
            at_of[number] = at
            ended.update((at_of[done], completion.tokens) for done, completion in stream.step())
        with pytest.raises(EngineBusyError):
            engine.load(model_directory(MODEL, seed=1))
        dropped = next(number for number, at in at_of.items() if at not in ended)
        stream.cancel([dropped])
        while stream.unfinished:
            ended.update((at_of[done], completion.tokens) for done, completion in stream.step())
    assert sorted([*ended, at_of[dropped]]) == list(range(10))
    assert sum(tokens != expected[at] for at, tokens in ended.items()) <= 1, "rounding ties aside"


@pytest.mark.slow
@needs_vllm
def test_turns_are_what_a_prefill_of_the_whole_row_says_in_both_engines(
    engine: VllmEngine, torch_engine: TorchEngine
) -> None:
    played = [Turns((5, 6, 4 + seed % 3), seed, 60) for seed in range(12)]
    with engine.open(temperature=1.0, max_tokens=256) as stream:
        play(stream, played)
    assert max(len(one.turns) for one in played) == len(GIVEN) + 1
    requests = [ScoreRequest(one.prompt, tuple(one.output), one.seed, tuple(one.lengths)) for one in played]
    for scorer in (engine, torch_engine):
        for one, scored in zip(played, scorer.score(requests, temperature=1.0), strict=True):
            joined = join_turns(one.turns)
            assert len(joined.logprobs) == sum(one.lengths[::2]) == len(scored.margins)
            assert float(scored.margins.max()) < 1e-2
            torch.testing.assert_close(torch.tensor(joined.logprobs), scored.logprobs, atol=1e-3, rtol=0)
            differences = compare_chunks(joined.proofs, split_chunks(scored.states))
            assert max(found.exponent_mismatches for found in differences) <= 4


@pytest.mark.slow
@needs_vllm
def test_a_later_turn_finds_what_was_before_it_in_the_cache(engine: VllmEngine) -> None:
    one, before = Turns(tuple(3 + number % 60 for number in range(140)), 2, 8), engine.reused_tokens
    with engine.open(temperature=1.0, max_tokens=256) as stream:
        play(stream, [one])
    assert len(one.turns) == len(GIVEN) + 1
    assert engine.reused_tokens - before >= 128 * len(GIVEN), "a block of vLLM's on a CPU, at each later turn"


@pytest.mark.slow
@needs_vllm
def test_honest_episodes_on_vllm_are_replayed_and_audited_without_a_finding() -> None:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "detection.py"
    # vLLM starts once per process
    done = subprocess.run(
        [sys.executable, str(script), "--vllm", "16"], capture_output=True, text=True, timeout=900, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["honest_episodes"], found["honest_rejected"]) == (16, 0), done.stderr[-2000:]
    assert found["turns"] > 2 * 16
