"""Which engine a role computes with, on which device and in which dtype.

A worker takes the first numerics class of the run that its machine can compute, in the order in which the owner admits them;
without one it is refused before anything is downloaded. Validators and evaluators compute in float32 on the best device there is;
a validator keeps its weights as they are published.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.config import LoraConfig
from shoal.errors import ConfigError
from shoal.frames.policy import MODEL_TYPE
from shoal.policy.directory import base_of, is_adapter, read_config, resolve_model
from shoal.policy.embedded.engine import TorchEngine
from shoal.policy.engine import LORA_CLASS, Engine
from shoal.policy.lora.checks import check_start
from shoal.policy.lora.files import read_settings


class NumericsError(ConfigError):
    """The run admits no numerics class of this machine."""

    code = "numerics_class"


@dataclass(frozen=True)
class Numerics:
    device: str
    dtype: str = "float32"
    stored: str = ""
    """In which the embedded engine keeps its weights, if that is not `dtype`: they are widened layer by layer."""


def _torch_engine(
    model_files: Path,
    eos_token_ids: Sequence[int],
    numerics: Numerics,
    max_tokens: int | None,
    lora: LoraConfig | None,
) -> Engine:
    # Its cache grows with what is asked, so it needs no bound.
    return TorchEngine(
        model_files,
        eos_token_ids=eos_token_ids,
        dtype=numerics.dtype,
        device=numerics.device,
        lora=lora,
        stored=numerics.stored,
    )


def _vllm_engine(
    model_files: Path,
    eos_token_ids: Sequence[int],
    numerics: Numerics,
    max_tokens: int | None,
    lora: LoraConfig | None,
) -> Engine:
    if read_config(model_files).model_type == MODEL_TYPE:
        raise ConfigError("vLLM does not run policies of frames.", hint="Choose --engine torch.")
    from shoal.policy.vllm.engine import VllmEngine

    return VllmEngine(model_files, eos_token_ids=eos_token_ids, dtype=numerics.dtype, max_tokens=max_tokens, lora=lora)


ENGINES: dict[str, Callable[[Path, Sequence[int], Numerics, int | None, LoraConfig | None], Engine]] = {
    "torch": _torch_engine,
    "vllm": _vllm_engine,
}


def make_engine(
    kind: str,
    model_files: Path,
    eos_token_ids: Sequence[int],
    *,
    numerics: Numerics | None = None,
    max_tokens: int | None = None,
    lora: LoraConfig | None = None,
) -> Engine:
    """The engine of that name on a model directory; it has weights if the directory has them.

    With `lora` the directory is a base, and every load is that of an adapter.
    `max_tokens` bounds prompt + output for engines that reserve memory ahead; by default, what the model can do.
    """
    _check_kind(kind)
    return ENGINES[kind](model_files, eos_token_ids, numerics or Numerics(devices_here()[0]), max_tokens, lora)


def policy_engine(kind: str, policy: Path, eos_token_ids: Sequence[int], *, numerics: Numerics | None = None) -> Engine:
    """The engine of that name with the policy of a directory: a whole model, or a PEFT adapter with the base that it names."""
    if not is_adapter(policy):
        return make_engine(kind, policy, eos_token_ids, numerics=numerics)
    base, lora = resolve_model(base_of(policy)), read_settings(policy)
    check_start(policy, lora, base)
    engine = make_engine(kind, base, eos_token_ids, numerics=numerics, lora=lora)
    engine.load(policy)
    return engine


def devices_here() -> tuple[str, ...]:
    """Kinds of device, the fastest first."""
    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


def choose_numerics(kind: str, admitted: Sequence[str], devices: Sequence[str]) -> Numerics:
    """What an engine of that name should compute in, so that the run can verify it."""
    _check_kind(kind)
    possible = devices[:1] if kind == "vllm" else devices  # vLLM is built for one kind of device
    for device in possible:
        for name in admitted:
            engine, dtype, where = name.removesuffix(LORA_CLASS).split("/")
            if (engine, where) == (kind, device):
                return Numerics(device, dtype)
    raise NumericsError(
        f"This run cannot verify work of the {kind} engine on {' or '.join(possible)}: it admits {', '.join(admitted)}.",
        hint="Choose another engine with --engine, or ask the run's owner to admit it (`shoal calibrate --extend`).",
    )


def _check_kind(kind: str) -> None:
    if kind not in ENGINES:
        raise ConfigError(f"There is no engine {kind!r}.", hint=f"Known: {', '.join(ENGINES)}.")
