"""PEFT directories: what PEFT writes is read, what Shoal cannot compute is refused, and what is written is read again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.config import LoraConfig
from shoal.errors import ShoalError
from shoal.policy.directory import base_of, resolve_adapter, resolve_model
from shoal.policy.lora.files import WEIGHTS_NAME, base_digest_of, read_factors, read_settings, write_adapter
from shoal.policy.lora.targets import LoraError
from shoal.policy.weights import base_digest, stored_dtype

VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VECTORS / "adapter", tmp_path / "adapter"))


def edit(adapter: Path, **fields: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return adapter


def shapes() -> dict[str, tuple[int, int]]:
    return {
        name: (tensor.shape[0], tensor.shape[1])
        for name, tensor in load_file(VECTORS / "adapter" / WEIGHTS_NAME).items()
    }


def test_an_adapter_of_peft_is_read() -> None:
    lora = read_settings(VECTORS / "adapter")
    assert (lora.rank, lora.alpha, len(lora.target_modules)) == (4, 10.0, 14)
    assert read_factors(VECTORS / "adapter", shapes()).keys() == shapes().keys()


def test_a_written_adapter_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes().items()}
    write_adapter(tmp_path, tensors, LoraConfig(rank=4, alpha=8), base="bundled", base_digest="ab" * 32)
    lora = read_settings(tmp_path)
    assert lora.target_modules == tuple(sorted(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")))
    again = read_factors(tmp_path, shapes())
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert base_digest_of(tmp_path) == "ab" * 32
    assert resolve_adapter(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path)) == resolve_model("bundled")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_rslora": True}, "use_rslora to True, which Shoal does not compute"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias to 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"r": "many"}, "sets r to 'many': Input should be a valid integer"),
        ({"r": 0}, "has rank 0: it adapts nothing"),
        ({"r": -4}, "sets r to -4"),
        ({"lora_alpha": 0}, "sets lora_alpha to 0"),
        ({"lora_alpha": -16}, "sets lora_alpha to -16"),
        ({"lora_alpha": float("inf")}, "sets lora_alpha to inf: Input should be a finite number"),
        ({"lora_alpha": float("nan")}, "sets lora_alpha to nan"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights to 'pissa'"),
        ({"target_modules": ".*_proj"}, "target_modules is no list of names"),
        ({"target_modules": None}, "no adapter config"),
    ],
)
def test_what_is_not_plain_lora_is_refused(adapter: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(LoraError, match=says):
        read_settings(edit(adapter, **fields))


def test_another_rank_a_foreign_and_a_missing_tensor_are_refused(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS_NAME)
    first = next(iter(tensors))
    for changed, says in (
        ({**tensors, first: torch.zeros(8, 16)}, "shape .8, 16.; the run needs .4, "),
        ({**tensors, "base_model.model.x.lora_A.weight": torch.zeros(4, 16)}, "no factor of an adapted layer"),
        ({name: tensor for name, tensor in tensors.items() if name != first}, "lacks"),
        ({**tensors, first: tensors[first].to(torch.int32)}, "no floating-point"),
        ({**tensors, first: torch.full_like(tensors[first], torch.nan)}, f"not finite in {first}"),
        ({**tensors, first: tensors[first] - torch.inf}, "not finite"),
        ({**tensors, first: tensors[first].T}, "shape"),
        ({**tensors, first: tensors[first].reshape(-1)}, "shape"),
        ({**tensors, first: tensors[first][:0]}, "shape .0, 32."),
        ({**tensors, "../../escape": torch.zeros(1)}, "no factor of an adapted layer"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, adapter / WEIGHTS_NAME)
        with pytest.raises(LoraError, match=says):
            read_factors(adapter, shapes())


def test_a_truncated_adapter_is_refused(adapter: Path) -> None:
    path = adapter / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ShoalError, match="cannot be read"):
        read_factors(adapter, shapes())


def test_the_base_is_found_beside_the_adapter_or_refused(adapter: Path) -> None:
    assert Path(base_of(VECTORS / "adapter")) == VECTORS / "base"
    for base in (None, "", str(adapter)):
        with pytest.raises(ShoalError, match="names no base model"):
            base_of(edit(adapter, base_model_name_or_path=base))


def test_a_base_is_known_by_its_numbers_not_by_its_files(tmp_path: Path) -> None:
    tensors = load_file(VECTORS / "base" / "model.safetensors")
    copy = Path(shutil.copytree(VECTORS / "base", tmp_path / "base"))
    save_file(dict(reversed(tensors.items())), copy / "model.safetensors", {"format": "pt"})
    assert base_digest(copy) == base_digest(VECTORS / "base")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, copy / "model.safetensors")
    assert base_digest(copy) != base_digest(VECTORS / "base")
    assert stored_dtype(copy) == "float32"
    assert stored_dtype(resolve_model("bundled")) == "bfloat16"
