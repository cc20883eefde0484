"""vLLM's own adapters; needs vLLM, which has its own environment: `make test-vllm` runs these."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.config import LoraConfig
from shoal.policy import GenerationRequest, TorchEngine, WeightsNotLoadedError
from shoal.policy.lora.targets import LoraError
from shoal.policy.vllm.adapters import VllmAdapters
from shoal.policy.vllm.engine import VllmEngine
from shoal.validation.calibration.adapters import write_typical

from .test_engine import EOS, MODEL, make_requests, needs_vllm, score_requests

Directory = Callable[..., Path]
LORA = LoraConfig(rank=4, alpha=64)
pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def engine(model_directory: Directory) -> VllmEngine:
    """vLLM starts once per process."""
    return VllmEngine(model_directory(MODEL), eos_token_ids=EOS, max_batch=8, lora=LORA)


def test_versions_replace_each_other_and_agree_with_the_embedded_engine(
    engine: VllmEngine, model_directory: Directory, tmp_path: Path
) -> None:
    base = model_directory(MODEL)
    reference = TorchEngine(base, eos_token_ids=EOS, lora=LORA)
    assert engine.numerics_class == "vllm/float32/cpu+lora"
    requests = make_requests()
    with pytest.raises(WeightsNotLoadedError):
        engine.generate(requests, temperature=1.0)
    for seed in range(3):
        adapter = write_typical(tmp_path / str(seed), base, LORA, seed)
        engine.load(adapter)
        reference.load(adapter)
        made = engine.generate(requests, temperature=1.0)
        scored = reference.score(score_requests(requests, made), temperature=1.0)
        margins = torch.cat([row.margins for row in scored])
        assert float(margins.max()) < 1e-2
        errors = [
            (torch.tensor(completion.logprobs) - row.logprobs).abs().max()
            for completion, row in zip(made, scored, strict=True)
        ]
        assert float(max(errors)) < 1e-3


def test_a_refused_adapter_leaves_the_old_one(engine: VllmEngine, model_directory: Directory, tmp_path: Path) -> None:
    base = model_directory(MODEL)
    engine.load(write_typical(tmp_path / "a", base, LORA))
    request = [GenerationRequest((3, 4, 5), 1, 12)]
    before = engine.generate(request, temperature=1.0)[0].tokens
    with pytest.raises(LoraError, match="rank is 2"):
        engine.load(write_typical(tmp_path / "b", base, LoraConfig(rank=2)))
    assert engine.generate(request, temperature=1.0)[0].tokens == before


def test_ranks_that_vllm_has_not_are_refused_or_rounded_up(model_directory: Directory) -> None:
    base = model_directory(MODEL)
    assert VllmAdapters(base, LoraConfig(rank=9)).options["max_lora_rank"] == 16
    with pytest.raises(LoraError, match="no adapters of rank 1024"):
        VllmAdapters(base, LoraConfig(rank=1024))
