"""A trained policy as a plain Hugging Face directory, or its adapter as a PEFT one, with a model card made from the run.

Weights come from a checkpoint (fp32 master weights, rounded once to bf16, so they equal the published version) or from a published
`model.safetensors`. The directory appears whole under its final name or not at all.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from shoal.config import LoraConfig
from shoal.errors import ShoalError, first_line
from shoal.files import TEMPORARY_PREFIX, write_atomic
from shoal.policy import build_empty_model, build_model, load_weights
from shoal.policy.architecture import meta_model
from shoal.policy.directory import read_config
from shoal.policy.lora.files import PREFIX, as_factors, factor_shapes, read_factors, write_adapter
from shoal.policy.lora.files import merge as merge_factors
from shoal.policy.lora.targets import target_names
from shoal.policy.weights import base_digest
from shoal.rundir import checkpoint_path, checkpoint_steps, checkpoints_of
from shoal.training.checkpoints import UNREADABLE, accept_one_process

COMPANION_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "generation_config.json",
)


class ExportError(ShoalError):
    """A policy that cannot be exported."""

    code = "export"
    permanent = True


@dataclass(frozen=True)
class RunFacts:
    """What the card says about the run; empty values are left out."""

    run_name: str
    base_model: str
    version: int
    last_version: int | None = None
    """With which the run ends; another one is called intermediate. None where there is no run."""
    recipe_toml: str = ""
    task_digest: str = ""
    weights_digest: str = ""
    ledger_head: str = ""
    reward_curve: Sequence[tuple[int, float]] = field(default_factory=tuple)
    heldout_curve: Sequence[tuple[int, float]] = field(default_factory=tuple)
    loss_curve: Sequence[tuple[int, float]] = field(default_factory=tuple)
    method: str = "reinforcement learning"
    run_key: str = ""
    adapter: str = ""
    """Of what kind it is, where the directory holds an adapter and not the whole policy."""
    has_evidence: bool = False
    """Whether rollouts and the files that repeat the run lie beside the card."""

    @property
    def intermediate(self) -> bool:
        return self.last_version is not None and self.version != self.last_version


def version_to_export(wanted: int | None, *, newest: int, steps: int) -> int:
    """The last version of a run, or the one that is asked for by its number.

    `newest` is the newest published version and `steps` the length of the run: one that has not reached its end has no result.
    """
    if wanted is None and newest < steps:
        raise ExportError(
            f"The run has reached version {newest} of {steps}, so its result does not exist yet.",
            hint=f"Let it finish, or export an intermediate version by its number, such as --version {newest}.",
        )
    return newest if wanted is None else wanted


def export_policy(
    source: Path,
    model_dir: Path,
    output: Path,
    facts: RunFacts,
    *,
    lora: LoraConfig | None = None,
    merge: bool = False,
    add: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write `output` from `source`: a checkpoint directory `…/checkpoints/step-N`, or one that holds safetensors.

    `model_dir` is the base model: its config and tokenizer go along. With `lora` the output is a PEFT directory, or with `merge`
    the whole model. `add` writes what else belongs into the directory.
    """
    from transformers.utils.logging import disable_progress_bar

    if output.exists() and any(output.iterdir()):
        raise ExportError(f"{output} exists and is not empty.", hint="Name another directory, or remove it first.")
    if merge and lora is None:
        raise ExportError("There is no adapter to merge: all weights were trained.", hint="Export without --merge.")
    disable_progress_bar()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.parent / f"{TEMPORARY_PREFIX}{output.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    if lora is None:
        load_model(source, model_dir).to(torch.bfloat16).save_pretrained(temporary)
    elif merge:
        _merged(source, model_dir, lora).to(torch.bfloat16).save_pretrained(temporary)
    else:
        factors, digest = load_factors(source, model_dir, lora), base_digest(model_dir)
        write_adapter(temporary, factors, lora, base=_base_name(facts, model_dir), base_digest=digest)
    _copy_companions(model_dir, temporary)
    figure = _plot(facts, temporary)
    write_atomic(temporary / "README.md", model_card(facts, figure).encode())
    add(temporary)
    if output.exists():
        output.rmdir()
    os.replace(temporary, output)
    return output


def latest_checkpoint(work_dir: Path, step: int | None = None) -> Path:
    """The checkpoint of a step, or the newest; says so if there is none."""
    checkpoints = checkpoints_of(work_dir)
    steps = checkpoint_steps(checkpoints)
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        known = f"There are: {', '.join(map(str, steps))}." if steps else "Train first, or export a published version."
        if steps and step is not None and step > steps[-1]:
            known += (
                " The trainer writes that of the last version when it ends: start it again, it goes on where it was."
            )
        raise ExportError(f"{checkpoints} holds {wanted}.", hint=known)
    return checkpoint_path(checkpoints, steps[-1] if step is None else step)


def load_model(source: Path, model_dir: Path) -> Any:
    """The weights of a checkpoint or of a directory with safetensors, in float32."""
    model: Any = build_empty_model(model_dir, "float32")
    if any(source.glob("*.safetensors")):
        load_weights(model, source)
    elif (source / ".metadata").is_file():
        _read_checkpoint(model.state_dict(), source)
    else:
        raise ExportError(f"{source} is neither a checkpoint nor a directory with safetensors.")
    return model


def _read_checkpoint(weights: dict[str, Any], source: Path) -> None:
    """Into these tensors, in place."""
    accept_one_process()
    try:
        load_distributed({"model": weights}, checkpoint_id=source, no_dist=True)
    except UNREADABLE as error:
        raise ExportError(
            f"The checkpoint {source} cannot be read: {first_line(error)}.",
            hint="It belongs to another model or was damaged; name another version.",
        ) from None


def load_factors(source: Path, model_dir: Path, lora: LoraConfig) -> dict[str, Tensor]:
    """The adapter of a checkpoint or of a directory with safetensors, by PEFT's names."""
    skeleton = meta_model(read_config(model_dir))
    shapes = factor_shapes(skeleton, target_names(skeleton, lora), lora.rank)
    if any(source.glob("*.safetensors")):
        return read_factors(source, shapes)
    if not (source / ".metadata").is_file():
        raise ExportError(f"{source} is neither a checkpoint nor a directory with safetensors.")
    state = {name.removeprefix(PREFIX): torch.empty(shape) for name, shape in shapes.items()}
    _read_checkpoint(state, source)
    return {f"{PREFIX}{name}": tensor for name, tensor in state.items()}


def _merged(source: Path, model_dir: Path, lora: LoraConfig) -> Any:
    """Base and adapter in one, added in float32."""
    factors, model = load_factors(source, model_dir, lora), build_model(model_dir, "float32")
    merge_factors(model, as_factors(factors, target_names(model, lora), lora.scale))
    return model


def _base_name(facts: RunFacts, model_dir: Path) -> str:
    """How others find the base: by its id where it has one."""
    is_local = facts.base_model == "bundled" or Path(facts.base_model).expanduser().exists()
    return str(model_dir.resolve()) if is_local else facts.base_model


def _copy_companions(model_dir: Path, output: Path) -> None:
    for pattern in COMPANION_FILES:
        for file in model_dir.glob(pattern):
            shutil.copyfile(file, output / file.name)


def _plot(facts: RunFacts, directory: Path) -> str:
    """File name of the curves, or empty when there are none."""
    curves = {
        "training reward": facts.reward_curve,
        "held-out accuracy": facts.heldout_curve,
        "loss per token": facts.loss_curve,
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return ""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot([x for x, _ in curve], [y for _, y in curve], label=name)
    axes.set_xlabel("optimiser step" if facts.loss_curve else "policy version")
    axes.legend()
    figure.savefig(directory / "curves.png", dpi=120)
    return "curves.png"


def model_card(facts: RunFacts, figure: str = "") -> str:
    """README.md of the exported policy."""
    header = {
        "library_name": "transformers" if facts.adapter == "" else "peft",
        "pipeline_tag": "text-generation",
        "tags": [facts.method.split(" of ")[0].replace(" ", "-"), "shoal"],
        "policy_version": facts.version,
    }
    if facts.base_model != "bundled" and not facts.base_model.startswith(("/", ".", "~")):
        header["base_model"] = facts.base_model
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in header.items()), "---", ""]
    lines += [f"# {facts.run_name}, policy version {facts.version}", ""]
    lines += [f"Trained from `{facts.base_model}` by {facts.method} with Shoal.", ""]
    if facts.adapter:
        lines += [f"This is an adapter of `{facts.base_model}` ({facts.adapter}), in the layout of PEFT.", ""]
    if facts.intermediate:
        lines += [
            f"**Intermediate**: this is version {facts.version}; the run ends with version {facts.last_version}.",
            "",
        ]
    table = {
        "Task set digest": facts.task_digest,
        "Weights digest": facts.weights_digest,
        "Ledger head": facts.ledger_head,
        "Held-out accuracy (versions)": _first_to_last(facts.heldout_curve),
        "Training reward (versions)": _first_to_last(facts.reward_curve),
        "Loss per token (steps)": _first_to_last(facts.loss_curve),
    }
    lines += ["| | |", "|---|---|", *(f"| {name} | `{value}` |" for name, value in table.items() if value), ""]
    lines += [f"![Curves of the run]({figure})", ""] if figure else []
    lines += _how_to_reproduce(facts)
    lines += ["## Recipe", "", "```toml", facts.recipe_toml.strip(), "```", ""] if facts.recipe_toml else []
    return "\n".join(lines)


def _how_to_reproduce(facts: RunFacts) -> list[str]:
    if not facts.has_evidence:
        return []
    key = f" --run-key {facts.run_key}" if facts.run_key else ""
    return [
        "## Reproduce",
        "",
        "`evidence/` holds the signed descriptor, the settings, the ledger and the rollout files as their workers signed",
        f"them. The ledger's head is `{facts.ledger_head}`. This repeats the training bit for bit and a sample of the",
        "verdicts, and writes one page about it:",
        "",
        "```",
        f"shoal reproduce .{key}",
        "```",
        "",
        "`rollouts/` holds the same rollouts as a dataset:",
        "",
        "```python",
        'datasets.load_dataset("parquet", data_files="rollouts/*.parquet")',
        "```",
        "",
    ]


def _first_to_last(curve: Sequence[tuple[int, float]]) -> str:
    if not curve:
        return ""
    (first, before), (last, after) = curve[0], curve[-1]
    return f"{before:.3f} → {after:.3f} ({first} and {last})" if last != first else f"{after:.3f} ({last})"
