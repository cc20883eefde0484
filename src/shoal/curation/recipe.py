"""Rebuilds the bundled policy: `python -m shoal.curation.recipe` (or `make bundled`).

A tokenizer, worked solutions of chain sums that passed the filters, and a warm start of a tiny Llama that first learns to
calculate from clean solutions and then, from careless ones, the habit of slipping at any step. The result knows the procedure but
samples a wrong answer two times out of three: something for reinforcement learning to sharpen. Held-out problems never enter the
data.
"""

import argparse
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.config import TasksConfig
from shoal.curation.demonstrations import Demonstration, FilterSettings, filter_demonstrations
from shoal.curation.fitting import FitReport, FitSettings
from shoal.curation.sft import WarmStart, encode, write_policy
from shoal.evaluation import AnswerGenerator, SamplingSettings, answer_metrics
from shoal.files import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, write_atomic
from shoal.policy import bundled_directory
from shoal.tasks import CODEC_FILES, THINK_CLOSE, THINK_OPEN, PromptStyle, TextCodec, load_tasks
from shoal.tasks.datasets.chain_sums import ChainSum, as_task, sample_chain_sum

DIRECTORY = bundled_directory()
FILES = (CONFIG_FILE, WEIGHTS_FILE, *CODEC_FILES)
VOCABULARY = 320
PAD, END = "<|pad|>", "<|end|>"
CONTROL_TOKENS = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
INSTRUCTION = TasksConfig().length_instruction
STYLE_LENGTHS = {"plain": 21, "checked": 30}
MAX_NEW_TOKENS = 40
NEARLY_GREEDY = 0.05


@dataclass(frozen=True)
class Recipe:
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    intermediate: int = 384
    clean_steps: int = 2000
    careless_steps: int = 300
    batch: int = 64
    learning_rate: float = 2e-3
    slip: float = 0.30
    """Probability of an error at each step of a careless solution."""
    heed: float = 0.8
    """Probability that a careless solution has the length that was asked for."""
    seed: int = 0


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text has tokens, digits stand alone, the fixed words of the prompt become long tokens."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    # Merges may cross words: the instruction then costs the tiny model two tokens instead of ten.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [f"Compute 1+2-3. {INSTRUCTION}".replace("{target}", "4")] * 4 + [
        "Answer with an integer.",
        "Compute 1-2.",
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (THINK_OPEN, THINK_CLOSE)])
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    return tokenizer


def write_tokenizer(directory: Path) -> TextCodec:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    write_atomic(directory / TOKENIZER_FILE, build_tokenizer().to_str(pretty=True).encode())
    write_atomic(directory / "tokenizer_config.json", json.dumps(settings, indent=2).encode() + b"\n")
    write_atomic(directory / "chat_template.jinja", TEMPLATE.encode())
    return TextCodec.from_directory(directory)


def worked_solution(problem: ChainSum, style: str, slip: float, rng: random.Random) -> str:
    """The text after the opened think tag; a slip is carried on faithfully by the steps that follow it."""
    first = _slipping(problem.first + problem.second, slip, rng)
    second = _slipping(first + problem.third, slip, rng)
    answer = _slipping(second, slip, rng)
    first_step = f"{problem.first}{problem.second:+d}={first}"
    second_step = f"{first}{problem.third:+d}={second}"
    check = f" {second}{-problem.third:+d}={first}" if style == "checked" else ""
    return f"{first_step} {second_step}{check}{THINK_CLOSE}{answer}"


def _slipping(value: int, slip: float, rng: random.Random) -> int:
    """The value or, with the given probability, one with a wrong digit: noise from which nothing can be learnt."""
    if rng.random() >= slip:
        return value
    digits = list(str(value))
    place = rng.randrange(len(digits))
    lowest = "1" if place == 0 and len(digits) > 1 else "0"
    digits[place] = rng.choice([digit for digit in "0123456789" if digit >= lowest and digit != digits[place]])
    return int("".join(digits))


def sample_target(rng: random.Random) -> int:
    """A length to ask for, or 0 for none."""
    return 0 if rng.random() < 0.1 else rng.randint(16, 35)


def style_for(target: int) -> str:
    """The style whose usual length is nearest to the target."""
    return min(STYLE_LENGTHS, key=lambda style: abs(STYLE_LENGTHS[style] - target)) if target else "plain"


def sample_demonstration(rng: random.Random, *, slip: float, heed: float) -> Demonstration:
    """A worked solution of a problem that is not held out."""
    problem = sample_chain_sum(rng)
    while problem.is_heldout:
        problem = sample_chain_sum(rng)
    target = sample_target(rng)
    style = style_for(target) if rng.random() < heed else rng.choice(list(STYLE_LENGTHS))
    return Demonstration(as_task(problem), worked_solution(problem, style, slip, rng), target)


def demonstrations(recipe: Recipe, codec: TextCodec) -> Iterator[Demonstration]:
    """Clean solutions first: learnt from careless ones alone, calculating takes several times as long.

    Both go through the filters. Careless solutions are meant to be wrong two times out of three, so there, and only there, the
    verifier is not asked.
    """
    rng = random.Random(recipe.seed)
    phases = [(recipe.clean_steps, 0.0, 1.0, True), (recipe.careless_steps, recipe.slip, recipe.heed, False)]
    for steps, slip, heed, correct in phases:
        settings = FilterSettings(max_tokens=MAX_NEW_TOKENS, correct=correct, similarity=1.0)
        sampled = (sample_demonstration(rng, slip=slip, heed=heed) for _ in itertools.count())
        kept = (one for one, reason in filter_demonstrations(sampled, settings, codec) if not reason)
        yield from itertools.islice(kept, steps * recipe.batch)


def build_model(recipe: Recipe, codec: TextCodec) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=codec.vocab_size,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=codec.eos_token_ids[0],
        pad_token_id=codec.encode(PAD)[0],
    )
    return LlamaForCausalLM(config)


def fit_settings(recipe: Recipe) -> FitSettings:
    return FitSettings(
        batch=recipe.batch,
        learning_rate=recipe.learning_rate,
        warmup_steps=100,
        checkpoint_every=200,
        shuffle=False,
        seed=recipe.seed,
    )


def build(recipe: Recipe, out: Path, work_dir: Path) -> None:
    """Writes every file of the policy: tokenizer, chat template, config and bf16 weights. A killed build goes on."""
    base = work_dir / "base"
    codec = write_tokenizer(base)
    model = build_model(recipe, codec)
    model.save_pretrained(base)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters")
    examples = [encode(one, codec, PromptStyle()) for one in demonstrations(recipe, codec)]
    checkpoint = WarmStart(fit_settings(recipe), base, work_dir=work_dir).train(examples, _report_step)
    shutil.rmtree(work_dir / "policy", ignore_errors=True)
    policy = write_policy(checkpoint, base, work_dir / "policy", base_model="random weights", loss_curve=())
    for name in FILES:
        write_atomic(out / name, (policy / name).read_bytes())


def _report_step(report: FitReport) -> None:
    if report.step % 50 == 0 or report.step == report.steps:
        print(f"step {report.step:5d}  loss {report.loss:.4f}  {report.seconds:6.3f} s", flush=True)


def report(directory: Path) -> None:
    """Held-out accuracy of the saved bf16 weights, computed in fp32."""
    heldout = list(load_tasks(TasksConfig(count=1, heldout=1024)).heldout)
    engine = AnswerGenerator.load(str(directory), "torch", SamplingSettings()).engine
    codec = TextCodec.from_directory(directory)
    for targets in ((), *((length,) for length in STYLE_LENGTHS.values()), tuple(STYLE_LENGTHS.values())):
        for temperature in (1.0, NEARLY_GREEDY):
            settings = SamplingSettings(
                samples=1, temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, target_lengths=targets
            )
            metrics = answer_metrics(AnswerGenerator(engine, codec, settings).answer(heldout))
            print(
                f"targets {targets}, temperature {temperature}: {metrics.avg} right, {metrics.mean_tokens:.1f} tokens",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/bundled"), help="checkpoints; the same one goes on"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    out, work_dir = arguments.pop("out"), arguments.pop("work_dir")
    torch.set_num_threads(arguments.pop("threads"))
    build(Recipe(**arguments), out, work_dir)
    report(out)


if __name__ == "__main__":
    main()
