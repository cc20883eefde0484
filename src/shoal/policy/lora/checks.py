"""Whether the adapter that a run file asks for fits its model, before anything is made or trained."""

from pathlib import Path

from shoal.config import LoraConfig, ModelConfig
from shoal.policy.architecture import meta_model
from shoal.policy.directory import read_config, resolve_adapter
from shoal.policy.lora.files import base_digest_of, factor_shapes, read_factors, read_settings
from shoal.policy.lora.targets import LoraError, target_names
from shoal.policy.weights import base_digest


def check_lora(model: ModelConfig, base: Path) -> Path | None:
    """The PEFT directory that the run starts from, if there is one; refuses what cannot be trained."""
    start, lora = resolve_adapter(model.path), model.adapter
    if lora is None:
        if start is not None:
            found = read_settings(start)
            raise LoraError(
                f"{model.path} is an adapter, and model.lora.rank is 0.",
                hint=f"Set model.lora.rank to {found.rank} and model.lora.alpha to {found.alpha:g} to go on with it, "
                "or merge it into its base.",
            )
        return None
    skeleton = meta_model(read_config(base))
    shapes = factor_shapes(skeleton, target_names(skeleton, lora), lora.rank)
    if start is not None:
        check_start(start, lora, base)
        read_factors(start, shapes)
    return start


def check_start(start: Path, lora: LoraConfig, base: Path) -> None:
    """Refuse an adapter of another kind than the run trains, or of another base."""
    found = read_settings(start)
    for name in ("rank", "alpha"):
        if getattr(found, name) != getattr(lora, name):
            raise LoraError(
                f"The adapter in {start} has {name} {getattr(found, name):g}, model.lora.{name} is {getattr(lora, name):g}.",
                hint=f"Set model.lora.{name} to {getattr(found, name):g}, or start from the base.",
            )
    if expected := base_digest_of(start):
        check_base(base, expected, f"the adapter in {start} was trained on")


def check_base(base: Path, expected: str, whose: str) -> None:
    """Refuse a base whose numbers are not those that an adapter belongs to."""
    found = base_digest(base)
    if found != expected:
        raise LoraError(
            f"The weights in {base} have the digest {found[:16]}…, not {expected[:16]}… of the base that {whose}.",
            hint="An adapter means nothing on another base: use the same files, unchanged.",
        )
