"""What a contributor reads before it costs anything: what will be fetched, kept, run and scored here.

Everything comes from the signed descriptor, the signed head and this machine's own disk; nothing is downloaded to say it.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import RewardConfig
from shoal.errors import UnavailableError
from shoal.metrics import Report
from shoal.metrics.units import size
from shoal.observe.words import plural
from shoal.protocol.descriptor import RunDescriptor
from shoal.protocol.environments import EnvironmentReference
from shoal.tasks import TaskSet
from shoal.tasks.environments.registry import is_own as is_own_environment
from shoal.tasks.verifiers.registry import find_verifier, is_own
from shoal.tasks.verifiers.requirements import verifier_names

if TYPE_CHECKING:
    from shoal.broadcast import WeightClient


def explain_run(descriptor: RunDescriptor, report: Report) -> None:
    """Before anything is downloaded."""
    files = sum(reference.bytes for reference in (*descriptor.model_files.values(), *descriptor.task_files))
    rollouts = descriptor.rollouts
    report(f"run {descriptor.run_id}, key {descriptor.run_key[:12]}…, protocol {descriptor.protocol}")
    report(
        f"will fetch {plural(len(descriptor.model_files), 'model file')} and the tasks ({size(files)}), then the policy's "
        f"weights; only outbound HTTP is used"
    )
    if descriptor.adapter is not None:
        base = size(descriptor.adapter.base_bytes)
        report(f"the weights are a base of {base}, fetched once, and small adapters, one per version")
    report(
        f"tasks: {descriptor.task_count} of {descriptor.tasks.source}; per slot {rollouts.tasks_per_slot} tasks × "
        f"{rollouts.group_size} samples of up to {rollouts.max_new_tokens} tokens at temperature {rollouts.temperature:g}"
    )


def explain_weights(weights: "WeightClient", keep_versions: int, folder: Path, report: Report) -> None:
    """Before the weights are downloaded; a policy that is not there yet is waited for later."""
    try:
        newest = weights.preview()
    except UnavailableError as error:
        report(f"the size of the policy is not known yet: {error.message}")
        return
    if newest is None:
        report("no version of the policy is published yet")
        return
    free, needed = shutil.disk_usage(folder).free, keep_versions * newest.size_bytes + newest.staging_bytes
    report(
        f"policy: version {newest.version}, {size(newest.fetch_bytes)} to fetch; {plural(keep_versions, 'version')} and what is "
        f"put together beside them will take up to {size(needed)} in {folder}, where {size(free)} are free"
    )
    if needed > free + weights.held_bytes():
        report("that will not fit: choose a larger disk with --dir")


def describe_model(config_file: Path) -> str:
    """The architecture that a config.json names; every figure only if it is there."""
    fields = json.loads(config_file.read_bytes())
    name = next(iter(fields.get("architectures") or []), fields.get("model_type", "unknown"))
    sizes = {"num_hidden_layers": "layers", "hidden_size": "hidden", "vocab_size": "tokens in the vocabulary"}
    return ", ".join([str(name), *(f"{fields[key]} {word}" for key, word in sizes.items() if key in fields)])


def describe_scoring(tasks: TaskSet, reward: RewardConfig, environments: Sequence[EnvironmentReference] = ()) -> str:
    """How answers are scored here, and whether anything is executed for it."""
    if environments:
        names = ", ".join(f"{one.name} ({one.replay})" for one in environments)
        own = [one.name for one in environments if is_own_environment(one.name)]
        allowed = f"; {', '.join(own)} is code of the run's owner that you allowed" if own else ""
        return f"episodes with {names}, in processes without network that can change no file{allowed}"
    types = sorted(verifier_names(tasks, reward))
    text = ", ".join(types)
    if any(find_verifier(name).sandboxed for name in types):
        text += "; programs that the model writes are run here, in a sandbox without network"
    if own := list(filter(is_own, types)):
        text += f"; {', '.join(own)} is code of the run's owner that you allowed"
    return text
