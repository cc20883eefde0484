"""The exported directory is what Transformers expects, with the published weights and a card."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from shoal.config import TrainingConfig
from shoal.policy import build_empty_model
from shoal.policy.weights import unique_tensors
from shoal.training import Group, Trainer
from shoal.training.export import ExportError, RunFacts, export_policy, latest_checkpoint, model_card
from support.tiny_models import save_llama

from .batches import VOCABULARY, make_groups

Groups = Callable[..., list[Group]]
FACTS = RunFacts(
    run_name="tiny",
    base_model="org/base",
    version=1,
    recipe_toml="[training]\nlearning_rate = 1e-3",
    task_digest="ab" * 32,
    ledger_head="cd" * 32,
    reward_curve=[(0, 0.25), (1, 0.75)],
)


@pytest.fixture
def trained(model_dir: Path, tmp_path: Path, groups: Groups) -> Trainer:
    trainer = Trainer(
        TrainingConfig(learning_rate=1e-2, kl_beta=0.0, device="cpu"),
        model_dir,
        work_dir=tmp_path / "work",
        temperature=1.0,
        seed=0,
    )
    trainer.train_step(groups(0))
    trainer.save()
    trainer.close()
    return trainer


def test_exported_checkpoint_has_the_published_weights(trained: Trainer, model_dir: Path, tmp_path: Path) -> None:
    output = export_policy(latest_checkpoint(tmp_path / "work"), model_dir, tmp_path / "out" / "policy", FACTS)
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype="auto").state_dict()
    for tensor in trained.wire_tensors():
        assert loaded[tensor.name].dtype == torch.bfloat16
        assert loaded[tensor.name].view(torch.uint8).numpy().tobytes() == bytes(tensor.data)
    again = export_policy(output, model_dir, tmp_path / "again", FACTS)
    assert (again / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


def test_card_tells_recipe_data_curves_and_ledger(trained: Trainer, model_dir: Path, tmp_path: Path) -> None:
    output = export_policy(latest_checkpoint(tmp_path / "work", 1), model_dir, tmp_path / "policy", FACTS)
    card = (output / "README.md").read_text()
    for text in ("base_model", "learning_rate = 1e-3", "ab" * 32, "cd" * 32, "0.250 → 0.750", "curves.png"):
        assert text in card
    assert (output / "curves.png").stat().st_size > 1000


def test_companion_files_go_along(trained: Trainer, model_dir: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in model_dir.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("x")
    output = export_policy(latest_checkpoint(tmp_path / "work"), base, tmp_path / "policy", FACTS)
    assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= {file.name for file in output.iterdir()}


def test_nothing_to_export_or_nowhere_to_put_it_says_so(trained: Trainer, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no checkpoint"):
        latest_checkpoint(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="step 7"):
        latest_checkpoint(tmp_path / "work", 7)
    with pytest.raises(ExportError, match="not empty"):
        export_policy(latest_checkpoint(tmp_path / "work"), model_dir, tmp_path / "work", FACTS)
    with pytest.raises(ExportError, match="neither"):
        export_policy(tmp_path, model_dir, tmp_path / "policy", FACTS)


def test_card_without_curves_has_no_picture() -> None:
    assert "![" not in model_card(RunFacts(run_name="r", base_model="bundled", version=0))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM has its own environment; `make test-vllm`")
def test_vllm_serves_the_export(tmp_path: Path) -> None:
    """A policy with a head size that vLLM has kernels for: same greedy tokens as Transformers."""
    import vllm

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1}
    save_llama(tmp_path / "base", VOCABULARY, **shape, bos_token_id=None, eos_token_id=None)
    trainer = Trainer(
        TrainingConfig(kl_beta=0.0, device="cpu"), tmp_path / "base", work_dir=tmp_path / "run", temperature=1.0, seed=0
    )
    trainer.train_step(make_groups(0))
    trainer.save()
    trainer.close()
    output = export_policy(latest_checkpoint(tmp_path / "run"), tmp_path / "base", tmp_path / "out", FACTS)
    prompts = [[1, 2, 3], [7, 8]]
    settings = vllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    limits = {"max_model_len": 64, "gpu_memory_utilization": 0.2}  # on a CPU build: of the host's memory
    server = vllm.LLM(str(output), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **limits)
    served = server.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False)
    model = LlamaForCausalLM.from_pretrained(output, dtype=torch.float32)
    for prompt, answer in zip(prompts, served, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert list(answer.outputs[0].token_ids) == expected.tolist()


def test_integer_buffers_are_exported_bit_for_bit(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_counter(*arguments: Any) -> Any:
        model = build_empty_model(*arguments)
        model.register_buffer("count", torch.tensor(0))
        return model

    monkeypatch.setattr("shoal.training.export.build_empty_model", with_counter)
    model = with_counter(model_dir, "float32")
    model.count.fill_(100_003)
    source = tmp_path / "published"
    source.mkdir()
    save_file({name: tensor.detach() for name, tensor in unique_tensors(model).items()}, source / "model.safetensors")
    output = export_policy(source, model_dir, tmp_path / "policy", FACTS)
    exported = load_file(output / "model.safetensors")["count"]
    assert (exported.dtype, exported.item()) == (torch.int64, 100_003)
