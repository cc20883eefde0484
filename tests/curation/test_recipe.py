import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.curation.recipe import (
    DIRECTORY,
    STYLE_LENGTHS,
    Recipe,
    build,
    build_tokenizer,
    demonstrations,
    fit_settings,
    style_for,
    worked_solution,
)
from shoal.tasks import PromptStyle, TextCodec, score
from shoal.tasks.datasets.chain_sums import ChainSum, as_task, sample_chain_sum

PROBLEM = ChainSum(47, 38, -19)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_directory(DIRECTORY)


def test_the_recipe_makes_the_tokenizer_that_is_bundled() -> None:
    assert build_tokenizer().to_str(pretty=True) == (DIRECTORY / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("style", "text"),
    [("plain", "47+38=85 85-19=66</think>66"), ("checked", "47+38=85 85-19=66 66+19=85</think>66")],
)
def test_clean_solutions_state_each_intermediate_result(style: str, text: str) -> None:
    assert worked_solution(PROBLEM, style, 0.0, random.Random(0)) == text


@pytest.mark.parametrize("style", list(STYLE_LENGTHS))
def test_clean_solutions_are_always_right_and_as_long_as_their_style(codec: TextCodec, style: str) -> None:
    rng = random.Random(0)
    for _ in range(100):
        problem = sample_chain_sum(rng)
        text = worked_solution(problem, style, 0.0, rng)
        assert score(as_task(problem), text).reward == 1.0
        assert STYLE_LENGTHS[style] - 6 <= len(codec.encode(text)) + 1 <= STYLE_LENGTHS[style]


def test_careless_solutions_are_mostly_wrong_but_carry_their_slips_on() -> None:
    rng = random.Random(0)
    texts = [worked_solution(PROBLEM, "plain", 0.3, rng) for _ in range(400)]
    right = sum(score(as_task(PROBLEM), text).reward for text in texts) / len(texts)
    assert 0.2 < right < 0.5
    second_steps = [text.split(" ")[1].split("</think>")[0] for text in texts]
    consistent = Counter(eval(step.replace("=", "==")) for step in second_steps)
    assert 0.6 < consistent[True] / len(texts) < 0.8


def test_asked_length_chooses_the_nearest_style() -> None:
    assert [style_for(target) for target in (0, 16, 21, 25)] == ["plain"] * 4
    assert [style_for(target) for target in (26, 30, 35)] == ["checked"] * 3


def test_demonstrations_are_filtered_and_only_careless_ones_may_be_wrong(codec: TextCodec) -> None:
    recipe = Recipe(clean_steps=10, careless_steps=10, batch=20)
    made = list(demonstrations(recipe, codec))
    clean, careless = made[:200], made[200:]
    assert len(careless) == 200
    assert all(score(one.task, one.completion).reward == 1.0 for one in clean)
    assert 0.2 < sum(score(one.task, one.completion).reward for one in careless) / 200 < 0.5
    assert len({(one.task.prompt, one.completion) for one in clean}) == 200
    assert not any(ChainSum(*one.task.metadata["terms"]).is_heldout for one in made)


def test_demonstrations_come_in_the_order_of_the_curriculum() -> None:
    assert not fit_settings(Recipe()).shuffle


def test_a_build_writes_every_file_of_a_policy_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    recipe = Recipe(hidden=32, layers=1, heads=1, intermediate=32, clean_steps=1, careless_steps=1, batch=2)
    build(recipe, tmp_path / "out", tmp_path / "work")
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    build(recipe, tmp_path / "again", tmp_path / "work")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in DIRECTORY.iterdir()}


def test_bundled_weights_are_small_and_bf16() -> None:
    path = DIRECTORY / "model.safetensors"
    assert path.stat().st_size <= 4 << 20
    with safe_open(path, framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_transformers_loads_policy_and_tokenizer_and_agrees_with_the_codec(codec: TextCodec) -> None:
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    chat = [{"role": "user", "content": PROBLEM.prompt}]
    theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert theirs == codec.prompt_tokens(as_task(PROBLEM), 0, PromptStyle())
    assert model.config.vocab_size == len(tokenizer) == codec.vocab_size
    assert (model.config.eos_token_id,) == codec.eos_token_ids
