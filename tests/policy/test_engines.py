from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.policy.engines import Numerics, NumericsError, choose_numerics, make_engine
from support.tiny_models import EOS, save_model

ADMITTED = ("torch/float32/cpu", "torch/bfloat16/cuda", "torch/float32/cuda", "vllm/bfloat16/cuda")


@pytest.mark.parametrize(
    ("kind", "devices", "expected"),
    [
        ("torch", ("cpu",), Numerics("cpu", "float32")),
        ("torch", ("cuda", "cpu"), Numerics("cuda", "bfloat16")),
        ("vllm", ("cuda", "cpu"), Numerics("cuda", "bfloat16")),
    ],
)
def test_the_best_device_computes_in_the_class_that_the_owner_names_first(
    kind: str, devices: tuple[str, ...], expected: Numerics
) -> None:
    assert choose_numerics(kind, ADMITTED, devices) == expected


def test_a_gpu_that_no_class_admits_leaves_the_work_to_the_processor() -> None:
    assert choose_numerics("torch", ("torch/float32/cpu",), ("cuda", "cpu")) == Numerics("cpu", "float32")


@pytest.mark.parametrize("devices", [("cpu",), ("cuda", "cpu")])
def test_an_engine_whose_numerics_nobody_calibrated_is_refused_with_what_is_admitted(
    devices: tuple[str, ...],
) -> None:
    with pytest.raises(NumericsError, match="admits torch/float32/cpu") as refused:
        choose_numerics("vllm", ("torch/float32/cpu", "vllm/float16/tpu"), devices)
    assert refused.value.code == "numerics_class"
    assert "--engine" in refused.value.hint


def test_an_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no engine 'abacus'"):
        choose_numerics("abacus", ADMITTED, ("cpu",))
    with pytest.raises(ConfigError, match="no engine 'abacus'"):
        make_engine("abacus", tmp_path, ())


def test_an_engine_computes_in_the_numerics_it_was_given(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    assert make_engine("torch", model, (EOS,)).numerics_class.startswith("torch/float32/")
    coarse = make_engine("torch", model, (EOS,), numerics=Numerics("cpu", "bfloat16"))
    assert coarse.numerics_class == "torch/bfloat16/cpu"
