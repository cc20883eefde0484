"""The embedded engine on a base: what PEFT computes, several versions side by side, and never the bare base by mistake."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.config import LoraConfig
from shoal.policy import EngineBusyError, GenerationRequest, ScoreRequest, TorchEngine, WeightsNotLoadedError
from shoal.policy.architecture import meta_model
from shoal.policy.directory import ModelError, read_config
from shoal.policy.engine import generate_all
from shoal.policy.engines import choose_numerics, policy_engine
from shoal.policy.lora.files import as_factors, factor_shapes, merge, read_factors, read_settings, write_adapter
from shoal.policy.lora.targets import LoraError, target_names
from shoal.policy.models import build_model
from support.tiny_models import EOS, save_model

VECTORS = Path(__file__).parent / "vectors"
GREEDY = 1e-4
"""A temperature at which the noise decides nothing."""


def engine_on(base: Path, lora: LoraConfig | None = None) -> TorchEngine:
    return TorchEngine(base, eos_token_ids=[], lora=lora or read_settings(VECTORS / "adapter"))


def sampled(engine: TorchEngine, seed: int = 7) -> list[list[int]]:
    requests = [GenerationRequest((3, 4, 5), seed + number, 16) for number in range(4)]
    return [completion.tokens for completion in engine.generate(requests, temperature=1.0)]


def random_adapter(base: Path, output: Path, lora: LoraConfig, seed: int = 0, std: float = 0.2) -> Path:
    skeleton = meta_model(read_config(base))
    shapes = factor_shapes(skeleton, target_names(skeleton, lora), lora.rank)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * std for name, shape in shapes.items()}
    write_adapter(output, tensors, lora, base=str(base))
    return output


def test_greedy_tokens_are_those_of_peft() -> None:
    engine, batch = engine_on(VECTORS / "base"), load_file(VECTORS / "batch.safetensors")
    engine.load(VECTORS / "adapter")
    prompts = [tuple(row[:6].tolist()) for row in batch["ids"]]
    made = engine.generate([GenerationRequest(prompt, 1, 12) for prompt in prompts], temperature=GREEDY)
    assert [completion.tokens for completion in made] == [row[6:].tolist() for row in batch["greedy"]]


def test_scores_are_those_of_peft() -> None:
    engine, batch = engine_on(VECTORS / "base"), load_file(VECTORS / "batch.safetensors")
    engine.load(VECTORS / "adapter")
    rows = [tuple(row.tolist()) for row in batch["ids"]]
    scored = engine.score([ScoreRequest(row[:6], row[6:], 1) for row in rows], temperature=1.0)
    logprobs = torch.log_softmax(batch["logits"][:, :-1], dim=-1).gather(2, batch["ids"][:, 1:, None])[:, 5:, 0]
    torch.testing.assert_close(torch.stack([row.logprobs for row in scored]), logprobs, atol=1e-5, rtol=1e-5)


def test_the_class_says_that_there_is_an_adapter() -> None:
    assert engine_on(VECTORS / "base").numerics_class == "torch/float32/cpu+lora"
    assert choose_numerics("torch", ["torch/float32/cpu+lora"], ["cpu"]).dtype == "float32"


def test_an_engine_on_a_base_serves_nothing_before_an_adapter() -> None:
    engine = engine_on(VECTORS / "base")
    with pytest.raises(WeightsNotLoadedError):
        sampled(engine)
    with pytest.raises(LoraError, match="no factor of an adapted layer"):
        engine.load(VECTORS / "base")
    with pytest.raises(WeightsNotLoadedError):
        sampled(engine)


def test_a_base_without_weights_is_refused(tmp_path: Path) -> None:
    shutil.copyfile(VECTORS / "base" / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match="no safetensors"):
        engine_on(tmp_path)


def test_versions_stay_resident_and_a_swap_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora, base = LoraConfig(rank=1, target_modules=("q_proj",)), VECTORS / "base"
    first, second = (random_adapter(base, tmp_path / str(seed), lora, seed, 2.0) for seed in (1, 2))
    engine = engine_on(base, lora)
    engine.load(first)
    before = sampled(engine)
    engine.load(second)
    assert sampled(engine) != before

    def fail(*_: object) -> None:
        raise AssertionError("read or tried again")

    monkeypatch.setattr("shoal.policy.lora.resident.read_factors", fail)
    monkeypatch.setattr("shoal.policy.embedded.engine.use_exact_products", fail)
    engine.load(first)
    assert sampled(engine) == before


def test_many_versions_stay_within_their_memory(tmp_path: Path) -> None:
    lora, base = LoraConfig(rank=8), VECTORS / "base"
    engine = engine_on(base, lora)
    for seed in range(6):
        engine.load(random_adapter(base, tmp_path / str(seed), lora, seed))
    assert engine._adapters is not None
    assert len(engine._adapters) == 2


def test_a_rewritten_directory_is_read_again(tmp_path: Path) -> None:
    lora, base = LoraConfig(rank=2), VECTORS / "base"
    engine = engine_on(base, lora)
    engine.load(random_adapter(base, tmp_path / "a", lora, 1))
    before = sampled(engine)
    shutil.rmtree(tmp_path / "a")
    engine.load(random_adapter(base, tmp_path / "a", lora, 2))
    assert sampled(engine) != before


@pytest.mark.parametrize(
    ("rank", "std", "reason"), [(4, 0.05, "rank is 4"), (2, float("nan"), "not finite")], ids=["rank", "nan"]
)
def test_a_refused_adapter_leaves_the_old_one(tmp_path: Path, rank: int, std: float, reason: str) -> None:
    lora, base = LoraConfig(rank=2), VECTORS / "base"
    engine = engine_on(base, lora)
    engine.load(random_adapter(base, tmp_path / "a", lora))
    before = sampled(engine)
    with pytest.raises(LoraError, match=reason):
        engine.load(random_adapter(base, tmp_path / "b", LoraConfig(rank=rank), std=std))
    assert sampled(engine) == before


def test_a_swap_waits_for_running_requests(tmp_path: Path) -> None:
    lora, base = LoraConfig(rank=2), VECTORS / "base"
    first, second = (random_adapter(base, tmp_path / str(seed), lora, seed) for seed in (1, 2))
    engine = engine_on(base, lora)
    engine.load(first)
    with engine.open(temperature=1.0, max_tokens=32) as stream:
        stream.submit([GenerationRequest((3, 4), 1, 4)])
        stream.step()
        with pytest.raises(EngineBusyError):
            engine.load(second)


def test_an_open_stream_uses_nothing_of_the_old_adapter(tmp_path: Path) -> None:
    lora, base = LoraConfig(rank=2), VECTORS / "base"
    first, second = (random_adapter(base, tmp_path / str(seed), lora, seed, 1.0) for seed in (1, 2))
    request = [GenerationRequest((3, 4, 5, 6), 1, 12)]

    def alone(adapter: Path) -> list[int]:
        engine = engine_on(base, lora)
        engine.load(adapter)
        return engine.generate(request, temperature=1.0)[0].tokens

    engine = engine_on(base, lora)
    engine.load(first)
    with engine.open(temperature=1.0, max_tokens=32) as stream:
        found = []
        for adapter in (first, second, first):
            engine.load(adapter)
            found.append(generate_all(stream, request, None)[0].tokens)
    assert found == [alone(first), alone(second), alone(first)]
    assert found[0] != found[1]


@pytest.mark.parametrize("family", ["llama-biased", "qwen2", "qwen3", "mistral", "gemma3", "granite", "gpt-neox"])
def test_every_family_computes_what_the_merged_model_computes(family: str, tmp_path: Path) -> None:
    base, lora = save_model(family, tmp_path / "base"), LoraConfig(rank=3, alpha=6)
    adapter = random_adapter(base, tmp_path / "adapter", lora, std=0.1)
    merged = build_model(base)
    names = target_names(merged, lora)
    shapes = factor_shapes(merged, names, lora.rank)
    merge(merged, as_factors(read_factors(adapter, shapes), names, lora.scale))
    engine = policy_engine("torch", adapter, [EOS])
    tokens = tuple(torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(0)).tolist())
    [scored] = engine.score([ScoreRequest(tokens[:4], tokens[4:], 1)], temperature=1.0)
    logits = merged(input_ids=torch.tensor([tokens])).logits[0, 3:-1].float()
    expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[4:])[:, None])[:, 0]
    torch.testing.assert_close(scored.logprobs, expected, atol=2e-3, rtol=1e-3)


def test_bf16_computes_the_adapter_in_its_own_type(tmp_path: Path) -> None:
    base, lora = save_model("llama", tmp_path / "base"), LoraConfig(rank=3)
    engine = TorchEngine(base, eos_token_ids=[EOS], dtype="bfloat16", lora=lora)
    engine.load(random_adapter(base, tmp_path / "adapter", lora, std=0.05))
    assert engine.numerics_class == "torch/bfloat16/cpu+lora"
    assert len(sampled(engine)) == 4


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    base = Path(shutil.copytree(VECTORS / "base", tmp_path / "base"))
    lora, tensors = read_settings(VECTORS / "adapter"), load_file(VECTORS / "adapter" / "adapter_model.safetensors")
    write_adapter(tmp_path / "adapter", tensors, lora, base=str(base), base_digest="00" * 32)
    save_file(load_file(VECTORS / "base" / "model.safetensors"), base / "model.safetensors", {"format": "pt"})
    shutil.copyfile(save_model("llama", tmp_path / "other") / "tokenizer.json", base / "tokenizer.json")
    with pytest.raises(LoraError, match="not 0000000000000000… of the base that the adapter"):
        policy_engine("torch", tmp_path / "adapter", [])
