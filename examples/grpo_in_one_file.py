"""The whole algorithm in one process: asynchronous GRPO on the demo's task with the bundled policy.

    python examples/grpo_in_one_file.py --steps 60 --seed 0

What the swarm does with workers, relays and validators happens here in one loop: sample groups from a policy that is
`async_level` versions old and rounded to bf16 like published weights, score them, keep the groups with signal, recompute the
old log-probabilities, and take one clipped step per mini-batch. One line per step, the held-out accuracy every few.
"""

import argparse
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from shoal.config import TasksConfig
from shoal.tasks import PromptStyle, Task, TaskSet, TextCodec, length_penalty, load_tasks, score

# Shapes: B completions, L tokens of prompt and output, V vocabulary.

BUNDLED = Path(__file__).parents[1] / "src" / "shoal" / "policy" / "bundled"


@dataclass(frozen=True)
class Settings:
    model: Path = BUNDLED
    steps: int = 60
    seed: int = 0
    async_level: int = 2
    groups_per_step: int = 32
    oversampling: int = 4
    group_size: int = 8
    max_new_tokens: int = 48
    temperature: float = 1.0
    target_lengths: tuple[int, ...] = (21, 30)
    length_alpha: float = 0.003
    minibatches: int = 2
    learning_rate: float = 2e-4
    warmup_steps: int = 4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    max_grad_norm: float = 0.1
    clip_epsilon: float = 0.2
    clip_delta: float = 4.0
    kl_beta: float = 0.0
    entropy_eta: float = 0.0
    evaluate_every: int = 4
    threads: int = 1


@dataclass(frozen=True)
class Sample:
    prompt: list[int]
    output: list[int]
    task_reward: float
    reward: float


Group = list[Sample]


def advantages(rewards: Tensor) -> Tensor:
    """A = (r − mean) / (std + 1e-6), the standard deviation with ddof 1, inside one group."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def token_loss(logprobs: Tensor, old_logprobs: Tensor, advantage: Tensor, *, epsilon: float, delta: float) -> Tensor:
    """−min( min(ρ, δ)·A , clip(ρ, 1−ε, 1+ε)·A ), ρ = π/π_old: the ratio is bounded on both sides."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio.clamp(max=delta) * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL₃(π‖π_ref) = exp(d) − d − 1 with d = log π_ref − log π: unbiased and never negative."""
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1


def pad_batch(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of output tokens [B, L], padded on the right."""
    length = max(len(sample.prompt) + len(sample.output) for sample in samples)
    ids_BL = torch.zeros(len(samples), length, dtype=torch.int64)
    outputs_BL = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        end = len(sample.prompt) + len(sample.output)
        ids_BL[row, :end] = torch.tensor(sample.prompt + sample.output)
        outputs_BL[row, len(sample.prompt) : end] = True
    return ids_BL, outputs_BL


def output_logprobs(model: PreTrainedModel, ids_BL: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and the entropy there; both [B, L−1]."""
    logits_BLV = model(input_ids=ids_BL, use_cache=False).logits[:, :-1] / temperature
    all_BLV = logits_BLV.log_softmax(-1)
    chosen_BL = all_BLV.gather(-1, ids_BL[:, 1:, None]).squeeze(-1)
    return chosen_BL, -(all_BLV.exp() * all_BLV).sum(-1)


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: Sequence[list[int]], settings: Settings) -> list[list[int]]:
    """One completion per prompt, the end token included, by plain sampling."""
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    width = max(map(len, prompts))
    ids_BL = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    out_BL = model.generate(
        input_ids=ids_BL,
        attention_mask=(ids_BL != pad).long(),
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        max_new_tokens=settings.max_new_tokens,
    )
    rows = out_BL[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def prompts_for(codec: TextCodec, tasks: Sequence[Task], targets: Sequence[int]) -> list[list[int]]:
    return [codec.prompt_tokens(task, target, PromptStyle()) for task, target in zip(tasks, targets, strict=True)]


def sample_groups(
    model: PreTrainedModel, codec: TextCodec, tasks: TaskSet, settings: Settings, rng: random.Random
) -> list[Group]:
    """`groups_per_step` groups: one task each, with a drawn target length, and G completions."""
    size = settings.group_size
    chosen = [tasks[rng.randrange(len(tasks))] for _ in range(settings.groups_per_step)]
    targets = [rng.choice(settings.target_lengths or (0,)) for _ in chosen]
    prompts = prompts_for(codec, chosen, targets)
    outputs = generate(model, [prompt for prompt in prompts for _ in range(size)], settings)
    groups = []
    for index, (task, target, prompt) in enumerate(zip(chosen, targets, prompts, strict=True)):
        group = []
        for output in outputs[index * size : (index + 1) * size]:
            task_reward = score(task, codec.decode(output)).reward
            penalty = length_penalty(target, len(output), settings.length_alpha)
            group.append(Sample(prompt, output, task_reward, task_reward - penalty))
        groups.append(group)
    return groups


def is_useful(group: Group) -> bool:
    """Whether the task rewards differ; the length term alone is no signal."""
    return len({sample.task_reward for sample in group}) > 1


def collect_groups(
    model: PreTrainedModel, codec: TextCodec, tasks: TaskSet, settings: Settings, rng: random.Random
) -> tuple[list[Group], list[Group]]:
    """The online filter: sample until enough groups are useful or the cap is reached; gives the useful ones and all."""
    wanted, everything = settings.groups_per_step, list[Group]()
    useful: list[Group] = []
    while len(useful) < wanted and len(everything) < settings.oversampling * wanted:
        everything += sample_groups(model, codec, tasks, settings, rng)
        useful = [group for group in everything if is_useful(group)][:wanted]
    return useful, everything


def round_like_published(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.to(torch.bfloat16).to(torch.float32) for name, weight in model.state_dict().items()}


def train_step(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    groups: Sequence[Group],
    settings: Settings,
) -> dict[str, float]:
    """Old log-probabilities for the whole batch first, then one optimiser step per disjoint mini-batch of groups."""
    parts = [groups[index :: settings.minibatches] for index in range(settings.minibatches)]
    batches = []
    for part in filter(None, parts):
        ids_BL, outputs_BL = pad_batch([sample for group in part for sample in group])
        advantage_B = torch.cat([advantages(torch.tensor([sample.reward for sample in group])) for group in part])
        with torch.no_grad():
            old_BL, _ = output_logprobs(model, ids_BL, settings.temperature)
            reference_BL = output_logprobs(reference, ids_BL, settings.temperature)[0] if reference else None
        batches.append((ids_BL, outputs_BL[:, 1:], advantage_B, old_BL, reference_BL))
    totals = {"entropy": 0.0, "gradient": 0.0, "clipped": 0.0}
    for ids_BL, mask_BL, advantage_B, old_BL, reference_BL in batches:
        logprobs_BL, entropy_BL = output_logprobs(model, ids_BL, settings.temperature)
        loss_BL = token_loss(
            logprobs_BL, old_BL, advantage_B[:, None], epsilon=settings.clip_epsilon, delta=settings.clip_delta
        )
        if reference_BL is not None:
            loss_BL = loss_BL + settings.kl_beta * kl_estimate(logprobs_BL, reference_BL)
        loss_BL = loss_BL - settings.entropy_eta * entropy_BL
        optimizer.zero_grad()
        (loss_BL * mask_BL).sum().div(mask_BL.sum()).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        scheduler.step()
        far_BL = ((logprobs_BL - old_BL).exp() - 1).abs() > settings.clip_epsilon
        totals["entropy"] += float(entropy_BL.detach()[mask_BL].mean()) / len(batches)
        totals["clipped"] += float(far_BL[mask_BL].float().mean()) / len(batches)
        totals["gradient"] += float(norm) / len(batches)
    return totals


def heldout_accuracy(model: PreTrainedModel, codec: TextCodec, tasks: TaskSet, settings: Settings) -> float:
    """Share of right answers at the training temperature, target lengths in turn."""
    targets = settings.target_lengths or (0,)
    right = 0.0
    for start in range(0, len(tasks), 256):
        chosen = [tasks[index] for index in range(start, min(start + 256, len(tasks)))]
        prompts = prompts_for(codec, chosen, [targets[index % len(targets)] for index in range(len(chosen))])
        outputs = generate(model, prompts, settings)
        right += sum(score(task, codec.decode(output)).reward for task, output in zip(chosen, outputs, strict=True))
    return right / len(tasks)


def build_optimizer(
    model: PreTrainedModel, settings: Settings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with a linear warm-up, then constant."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    warmup = max(1, settings.warmup_steps)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / warmup))


def run(settings: Settings) -> list[float]:
    """Trains for `steps` steps and gives the held-out accuracies."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    codec, sets = TextCodec.from_directory(settings.model), load_tasks(TasksConfig())
    model, sampler = load_model(settings.model), load_model(settings.model)
    reference = load_model(settings.model) if settings.kl_beta else None
    optimizer, scheduler = build_optimizer(model, settings)
    published = deque([round_like_published(model)], maxlen=settings.async_level + 1)
    curve = [heldout_accuracy(sampler, codec, sets.heldout, settings)]
    print(f"before training: held-out accuracy {curve[0]:.3f}", flush=True)
    for step in range(settings.steps):
        started = time.perf_counter()
        sampler.load_state_dict(published[0])
        useful, everything = collect_groups(sampler, codec, sets.train, settings, rng)
        generated = time.perf_counter()
        metrics = train_step(model, reference, optimizer, scheduler, useful, settings) if useful else {}
        published.append(round_like_published(model))
        times = {"generate_s": generated - started, "train_s": time.perf_counter() - generated}
        if (step + 1) % settings.evaluate_every == 0:
            sampler.load_state_dict(published[-1])
            curve.append(heldout_accuracy(sampler, codec, sets.heldout, settings))
            metrics["heldout"] = curve[-1]
        print_step(step, useful, everything, times | metrics)
    return curve


def load_model(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def print_step(step: int, useful: list[Group], everything: list[Group], metrics: dict[str, float]) -> None:
    samples = [sample for group in everything for sample in group]
    reward = sum(sample.task_reward for sample in samples) / len(samples)
    length = sum(len(sample.output) for sample in samples) / len(samples)
    rest = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
    filtered = f"{len(useful)} useful of {len(everything)} groups"
    print(f"step {step}  reward {reward:.3f}  length {length:.1f}  {filtered}  {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Settings):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, tuple):
            parser.add_argument(flag, type=type(default[0]), nargs="*", default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    values: dict[str, Any] = vars(parser.parse_args())
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    run(Settings(**(values | lists)))


if __name__ == "__main__":
    main()
