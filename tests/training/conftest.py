"""A tiny random policy and batches for it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.training import Group, Sample

VOCABULARY = 32


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_groups(
    seed: int, groups: int = 4, group_size: int = 4, *, policy_version: int = 0, behaviour: bool = False
) -> list[Group]:
    draw = random.Random(seed)
    made = []
    for number in range(groups):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 6))]
        samples = []
        for place in range(group_size):
            output = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
            logprobs = [-draw.random() * 3 for _ in output] if behaviour else None
            reward = float((place + number) % 2)
            samples.append(Sample(prompt, output, reward, reward, logprobs, policy_version))
        made.append(Group(f"0/0/{number}", samples))
    return made


@pytest.fixture
def groups() -> Callable[..., list[Group]]:
    return make_groups
