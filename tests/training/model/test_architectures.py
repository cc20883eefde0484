"""Every architecture of the installed Transformers is packed, padded, run row by row or refused, and never wrong."""

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.training import World
from shoal.training.model.layouts import UnsupportedModelError, choose_layout
from shoal.training.model.model import PolicyModel
from shoal.training.packing.batch import Member, build_minibatch
from shoal.training.packing.samples import Sample

from .architectures import VARIANTS, VOCABULARY, model_types, tiny_config

TOLERANCE = 2e-3
LARGEST = 100_000_000
"""Weights of a model that counts as tiny: some architectures have parts that keep their size."""
RESULTS: dict[tuple[str, str], str] = {}


def built(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()  # a model changes its config
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    return model


def members(longest: int) -> list[Member]:
    """Long rows beside short ones, and several completions of one prompt."""
    draw = random.Random(5)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(1, VOCABULARY) for _ in range(length)]

    shared = tokens(4)
    lengths = [3, longest - 6, 9, 1, longest // 2, 14, 2, longest - 5]
    prompts = [shared, shared, shared, tokens(2), tokens(3), tokens(2), tokens(3), tokens(3)]
    samples = [Sample(prompt, tokens(length), 0.0, 0.0) for prompt, length in zip(prompts, lengths, strict=True)]
    return [Member(sample, 0.0, 1.0) for sample in samples]


def refuse_a_large_one(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size / 1e6:.0f} million weights")


@torch.no_grad()
def alone(model: Any, member: Member) -> torch.Tensor:
    """By a model that has computed nothing else."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    row = [*member.sample.prompt_tokens, *member.sample.output_tokens]
    first = len(member.sample.prompt_tokens) - 1
    logprobs = torch.log_softmax(model(torch.tensor([row[:-1]]), use_cache=False).logits[0, first:].float(), -1)
    return logprobs.gather(1, torch.tensor(list(member.sample.output_tokens))[:, None])[:, 0]


@torch.no_grad()
def largest_error(config: Any, longest: int) -> tuple[str, float]:
    """The layout that was chosen, and how far its log-probabilities are from those of each row alone; the model runs twice."""
    policy, fresh = PolicyModel(built(config), temperature=1.0), built(config)
    chosen = members(longest)
    try:
        choose_layout(policy, World(), longest_row=longest)
    except UnsupportedModelError as refusal:
        return f"refused: {refusal.hint}", 0.0
    capacity = 1 if policy.one_by_one else 2 * longest
    batch = build_minibatch(chosen, capacity, packed=policy.packed, rank=0, ranks=1, device=torch.device("cpu"))
    truth = [alone(fresh, member) for member in chosen]
    worst = 0.0
    for micro_batch in [*batch.micro_batches, *reversed(batch.micro_batches)]:
        logprobs_N = policy(micro_batch.bin)[0]
        for number in set(micro_batch.bin.member_N.tolist()):
            ours = logprobs_N[micro_batch.bin.member_N == number]
            worst = max(worst, float((ours - truth[number]).abs().max()))
    return policy.layout, worst


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", model_types())
def test_architecture_is_packed_padded_or_refused_and_never_wrong(model_type: str, variant: str) -> None:
    try:
        config = tiny_config(model_type, variant)
        if config is not None:
            refuse_a_large_one(config)
            alone(built(config), members(40)[0])
    except Exception as error:
        RESULTS[model_type, variant] = "no tiny config"
        pytest.skip(f"no tiny config: {error}")
    if config is None:
        pytest.skip("the variant does not apply")
    layout, off = largest_error(config, 40)
    RESULTS[model_type, variant] = layout
    assert off < TOLERANCE, f"{layout} is off by {off:.3g} nats"


@pytest.mark.slow
def test_most_architectures_were_tried() -> None:
    """Runs last in its file: prints the list."""
    for (model_type, variant), layout in sorted(RESULTS.items()):
        print(f"{model_type:<28}{variant:<10}{layout}")
    counts = Counter(layout.split(":")[0] for (_, variant), layout in RESULTS.items() if variant == "plain")
    print(dict(counts))
    assert sum(counts.values()) - counts["no tiny config"] >= 100
    assert counts["packed"] >= 40
