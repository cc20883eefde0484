"""Copies of a run's data that lie beside its ledger, each compared with what vouches for it: published files with the digest that
is their name, checkpoints and an exported policy with the weights that the ledger records. A copy that was changed is named, also
where the repetition does not use it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

from torch import Tensor

from shoal.broadcast import WireTensor
from shoal.broadcast.manifest import digest_weights
from shoal.broadcast.wire import tensor_entry
from shoal.config import LoraConfig
from shoal.errors import ShoalError
from shoal.files import digest_file
from shoal.policy.weights import WireCopy, as_wire, unique_tensors
from shoal.reproduction.evidence import Evidence
from shoal.rundir import checkpoint_path, checkpoint_steps, checkpoints_of
from shoal.training.disks import missing_parts, part_sizes
from shoal.training.export import load_factors, load_model

PUBLISHED = ("manifests", "shards")


def changed_copies(evidence: Evidence, base: Path) -> Iterator[str]:
    yield from _published(evidence.directory.origin)
    yield from _checkpoints(evidence, base)
    yield from _exported(evidence, base)


def _published(origin: Path) -> Iterator[str]:
    for folder in PUBLISHED:
        for path in sorted((origin / folder).glob("[0-9a-f]*")):
            if path.is_file() and digest_file(path) != path.name:
                yield f"{path.relative_to(origin.parent)} was changed: its name is the digest that it had"


def _checkpoints(evidence: Evidence, base: Path) -> Iterator[str]:
    checkpoints = checkpoints_of(evidence.directory.trainer)
    for version in checkpoint_steps(checkpoints):
        recorded = evidence.history.weights.get(version)
        place, lora = checkpoint_path(checkpoints, version), evidence.config.model.adapter
        found = _digest(place, base, lora) if _has_all_bytes(place) else ""
        if recorded is not None and found != recorded:
            yield f"the checkpoint of version {version} {_why(found)}"


def _has_all_bytes(checkpoint: Path) -> bool:
    """Reading the weights alone would not notice a file that was cut off behind them, in the optimiser's state."""
    try:
        sizes = part_sizes(checkpoint)
    except (OSError, ValueError, EOFError, UnpicklingError, AttributeError):
        return False
    return not missing_parts(checkpoint, sizes, list(sizes))


def _exported(evidence: Evidence, base: Path) -> Iterator[str]:
    """The policy beside the evidence, which is what others use; an adapter that was merged has no digest in the ledger."""
    place, lora = evidence.directory.root.parent, evidence.config.model.adapter
    published = "adapter_model.safetensors" if lora is not None else "*.safetensors"
    is_export = evidence.directory.root.name == "evidence" and any(place.glob(published))
    if is_export and (found := _digest(place, base, lora)) not in evidence.history.weights.values():
        yield f"the exported policy {_why(found)}"


def _digest(place: Path, base: Path, lora: LoraConfig | None) -> str:
    """Empty if it cannot be read."""
    try:
        return digest_weights(map(tensor_entry, weights_at(place, base, lora)[1]))
    except ShoalError:
        return ""


def weights_at(place: Path, base: Path, lora: LoraConfig | None) -> tuple[Mapping[str, Tensor], Sequence[WireTensor]]:
    """What a checkpoint or a directory with safetensors holds, as it is and as it was published."""
    if lora is not None:
        factors = load_factors(place, base, lora)
        return factors, [as_wire(name, factor) for name, factor in factors.items()]
    model = load_model(place, base)
    return unique_tensors(model), WireCopy(model).take(here=True)


def _why(found: str) -> str:
    return "is not one that the ledger records" if found else "was damaged and cannot be read"
