"""Copies of a run's data that lie beside its ledger, each compared with what vouches for it: published files with the digest that
is their name, checkpoints and an exported policy with the weights that the ledger records. A copy that was changed is named, also
where the repetition does not use it.
"""

from collections.abc import Iterator
from pathlib import Path

from shoal.broadcast.manifest import digest_weights
from shoal.broadcast.wire import tensor_entry
from shoal.errors import ShoalError
from shoal.files import digest_file
from shoal.policy.weights import WireCopy
from shoal.reproduction.evidence import Evidence
from shoal.rundir import checkpoint_path, checkpoint_steps, checkpoints_of
from shoal.training.export import load_model

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
        if recorded is not None and (found := weights_digest(checkpoint_path(checkpoints, version), base)) != recorded:
            yield f"the checkpoint of version {version} {_why(found)}"


def _exported(evidence: Evidence, base: Path) -> Iterator[str]:
    """The policy beside the evidence, which is what others use."""
    place = evidence.directory.root.parent
    is_export = evidence.directory.root.name == "evidence" and any(place.glob("*.safetensors"))
    if is_export and (found := weights_digest(place, base)) not in evidence.history.weights.values():
        yield f"the exported policy {_why(found)}"


def weights_digest(place: Path, base: Path) -> str:
    """Of a checkpoint or of a directory with safetensors; empty if it cannot be read."""
    try:
        model = load_model(place, base)
    except ShoalError:
        return ""
    return digest_weights([tensor_entry(tensor) for tensor in WireCopy(model).take(here=True)])


def _why(found: str) -> str:
    return "is not one that the ledger records" if found else "was damaged and cannot be read"
