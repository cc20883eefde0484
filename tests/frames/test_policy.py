"""A frame policy is a policy like any other: sampled, scored, committed to and trained by the same code."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shoal.errors import ConfigError, ShoalError
from shoal.frames import build_table
from shoal.frames.actions import ActionTable
from shoal.frames.files import build_tokenizer, write_policy
from shoal.frames.model import FrameShapeError
from shoal.frames.policy import FrameConfig, FramePolicy, fresh_policy, policy_shape
from shoal.frames.repairs import Window, repair_tasks
from shoal.frames.screens import GO, GOAL
from shoal.policy import Completion, GenerationRequest, RequestError, ScoreRequest, TorchEngine, build_model
from shoal.policy.engines import make_engine
from shoal.proofs.commitments import build_proofs
from shoal.tasks import PromptStyle, TextCodec
from shoal.tasks.editor import DELETE, DOWN, RIGHT, SAVE
from shoal.training import Sample, World
from shoal.training.model.model import PolicyModel, load_policy
from shoal.training.packing.batch import Member, build_minibatch

LINES = ["def main():", "self.x = 1", "import os", "return None", "yield 3"]
WINDOW = Window(rows=2, columns=16)
STYLE = PromptStyle(thinking=False)


@pytest.fixture(scope="module")
def table() -> ActionTable:
    return build_table(LINES, 256)


@pytest.fixture(scope="module")
def directory(table: ActionTable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = policy_shape(len(table) + 2, channels=8, stages=(16, 32), hidden=48)
    policy = fresh_policy(shape, table, seed=1)
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)  # a policy that prefers some actions, so that ties are rare and weights matter
    return write_policy(policy, table, tmp_path_factory.mktemp("frames") / "policy")


@pytest.fixture(scope="module")
def codec(directory: Path) -> TextCodec:
    return TextCodec.from_directory(directory)


@pytest.fixture(scope="module")
def engine(directory: Path, codec: TextCodec) -> TorchEngine:
    return TorchEngine(directory, eos_token_ids=codec.eos_token_ids)


def requests(codec: TextCodec, *, tasks: int = 6, samples: int = 3, longest: int = 40) -> list[GenerationRequest]:
    return [
        GenerationRequest(tuple(codec.prompt_tokens(task, 0, STYLE)), 100 * number + sample, longest)
        for number, task in enumerate(repair_tasks(LINES, WINDOW, tasks, most=2, seed=3))
        for sample in range(samples)
    ]


def as_claims(asked: Sequence[GenerationRequest], made: Sequence[Completion]) -> list[ScoreRequest]:
    return [
        ScoreRequest(one.prompt_tokens, tuple(completion.tokens), one.seed)
        for one, completion in zip(asked, made, strict=True)
    ]


def test_the_tokenizer_cuts_keys_as_the_table_does(table: ActionTable, codec: TextCodec) -> None:
    keys = f"return  x_1{RIGHT * 17}{DELETE * 3}def{DOWN * 2}   1self\n{SAVE}"
    assert codec.encode(keys) == table.encode(keys)
    assert codec.decode_all(table.encode(keys)) == keys
    assert build_tokenizer(table).get_vocab_size() == len(table) + 2


def test_a_prompt_ends_with_the_mark_of_the_first_frame(codec: TextCodec) -> None:
    (task,) = repair_tasks(LINES, WINDOW, 1, most=1, seed=0)
    tokens = codec.prompt_tokens(task, 0, STYLE)
    assert codec.text_of(tokens[-1]) == GO
    assert [codec.text_of(token) for token in tokens].count(GOAL) == 1


def test_a_validator_confirms_what_an_honest_worker_sampled(engine: TorchEngine, codec: TextCodec) -> None:
    asked = requests(codec)
    made = engine.generate(asked, temperature=1.0)
    scored = engine.score(as_claims(asked, made), temperature=1.0)
    assert any(len(completion.tokens) > 32 for completion in made), "no sample has two chunks of states"
    for completion, found in zip(made, scored, strict=True):
        assert float(found.margins.max()) < 1e-4
        assert torch.allclose(torch.tensor(completion.logprobs), found.logprobs, atol=1e-5)
        assert completion.proofs == build_proofs(list(torch.split(found.states, 32)))


def test_other_weights_are_seen_in_tokens_and_states(
    engine: TorchEngine, directory: Path, codec: TextCodec, tmp_path: Path, table: ActionTable
) -> None:
    asked = requests(codec)
    made = engine.generate(asked, temperature=1.0)
    policy: FramePolicy = build_model(directory)  # type: ignore[assignment]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    other = TorchEngine(write_policy(policy, table, tmp_path / "other"), eos_token_ids=codec.eos_token_ids)
    scored = other.score(as_claims(asked, made), temperature=1.0)
    assert sum(int((found.margins > 0.01).sum()) for found in scored) > 10
    assert all(
        completion.proofs != build_proofs(list(torch.split(found.states, 32)))
        for completion, found in zip(made, scored, strict=True)
    )


def test_a_sample_does_not_depend_on_its_neighbours(engine: TorchEngine, codec: TextCodec) -> None:
    asked = requests(codec, tasks=3)
    together = engine.generate(asked, temperature=1.0)
    alone = [engine.generate([one], temperature=1.0)[0] for one in asked]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_rows_that_leave_and_enter_keep_their_screens(engine: TorchEngine, codec: TextCodec) -> None:
    asked = requests(codec, tasks=5)
    wide = engine.generate(asked, temperature=1.0)
    with engine.open(temperature=1.0, max_tokens=200, rows=3) as stream:
        numbers = stream.submit(asked)
        ended: dict[int, Completion] = {}
        while stream.unfinished:
            ended.update(stream.step())
    assert [ended[number].tokens for number in numbers] == [one.tokens for one in wide]


def test_a_later_turn_reads_everything_before_it_again(engine: TorchEngine, codec: TextCodec) -> None:
    (one,) = requests(codec, tasks=1, samples=1, longest=9)
    (whole,) = engine.generate([one], temperature=1.0)
    split = ScoreRequest((*one.prompt_tokens, *whole.tokens[:4]), tuple(whole.tokens[4:]), one.seed)
    (first,) = engine.score(as_claims([one], [whole]), temperature=1.0)
    (later,) = engine.score([split], temperature=1.0)
    assert torch.equal(first.states[4:], later.states)


def trained(policy: PolicyModel, asked: Sequence[GenerationRequest], made: Sequence[Completion]) -> torch.Tensor:
    """Log-probabilities of all sampled tokens, completion after completion."""
    members = [
        Member(Sample(one.prompt_tokens, tuple(completion.tokens), 0.0, 0.0), 0.0, 1.0)
        for one, completion in zip(asked, made, strict=True)
    ]
    batch = build_minibatch(members, 1 << 16, packed=policy.packed, rank=0, ranks=1, device=torch.device("cpu"))
    (only,) = batch.micro_batches
    logprobs: torch.Tensor = policy(only.bin)[0]
    order = torch.argsort(only.bin.member_N, stable=True)
    return logprobs[order]


def test_the_trainer_computes_the_log_probabilities_that_the_worker_reported(
    engine: TorchEngine, directory: Path, codec: TextCodec
) -> None:
    asked = requests(codec)
    made = engine.generate(asked, temperature=0.7)
    policy = load_policy(directory, temperature=0.7, world=World())
    reported = torch.tensor([value for completion in made for value in completion.logprobs])
    assert torch.allclose(trained(policy, asked, made).detach(), reported, atol=1e-4)


def test_activations_that_are_computed_again_give_the_same_gradients(
    engine: TorchEngine, directory: Path, codec: TextCodec
) -> None:
    asked = requests(codec)
    made = engine.generate(asked, temperature=1.0)
    gradients = []
    for again in (False, True):
        policy = load_policy(directory, temperature=1.0, world=World(), activation_checkpointing=again)
        torch.autograd.backward(trained(policy, asked, made).sum())
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert recomputed is not None
        assert torch.allclose(plain, recomputed, atol=1e-5)


def test_a_packed_line_gives_the_gradients_of_rows_padded_apart(
    engine: TorchEngine, directory: Path, codec: TextCodec
) -> None:
    """Padding has the token of a key that does nothing; here completions end with that key too."""
    asked = requests(codec, tasks=5)
    made = engine.generate(asked, temperature=1.0)
    made[0].tokens = [*made[0].tokens[:2], 0, 0, 0]
    policy = load_policy(directory, temperature=1.0, world=World())
    assert policy.layout == "packed"
    found = []
    for layout in ("packed", "padded"):
        policy.set_layout(layout)
        policy.zero_grad()
        logprobs = trained(policy, asked, made)
        torch.autograd.backward(logprobs.sum())
        found.append([logprobs, *(parameter.grad for parameter in policy.parameters())])
    for packed, padded in zip(*found, strict=True):
        assert torch.allclose(packed, padded, atol=1e-4, rtol=1e-4)


def test_prompts_with_and_without_actions_are_read_together(engine: TorchEngine, codec: TextCodec) -> None:
    asked = [one.prompt_tokens for one in requests(codec, tasks=3, samples=1)]
    asked += [(*asked[0], *codec.encode("ab")), (*asked[1], *codec.encode("c")), tuple(codec.encode("no mark"))]
    together = engine._runner.read_prompts(asked)
    for at, prompt in enumerate(asked):
        alone = engine._runner.read_prompts([prompt])
        assert torch.allclose(together.entries[0][at], alone.entries[0][0], atol=1e-6)
        assert torch.allclose(together.states_PD[at], alone.states_PD[0], atol=1e-6)


@pytest.mark.parametrize(
    "prompt",
    ["no mark at all", f"{GOAL}{GOAL}{GO}", GO, f"a{RIGHT}b\x00{GOAL}\n\n\n{GO}", f"{'x' * 300}{GOAL}{GO}{GO}{SAVE}"],
)
def test_any_prompt_has_a_screen(engine: TorchEngine, codec: TextCodec, prompt: str) -> None:
    one = GenerationRequest(tuple(codec.encode(prompt)), 7, 5)
    made = engine.generate([one], temperature=1.0)
    (scored,) = engine.score(as_claims([one], made), temperature=1.0)
    assert torch.allclose(scored.logprobs, torch.tensor(made[0].logprobs), atol=1e-5)


def test_tokens_beyond_the_vocabulary_are_refused(engine: TorchEngine, codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        engine.generate([GenerationRequest((engine.vocab_size,), 1, 1)], temperature=1.0)
    with pytest.raises(RequestError, match="vocabulary"):
        engine.score([ScoreRequest((1,), (engine.vocab_size,), 1)], temperature=1.0)


def test_a_config_that_does_not_fit_its_actions_is_refused(directory: Path, tmp_path: Path, codec: TextCodec) -> None:
    tree = json.loads((directory / "config.json").read_text())
    shape, entries = tree["shape"], tree["entries"]
    cases = [("entries", ["a"]), ("entries", [7, *entries[1:]]), ("shape", {"rows": 4}), ("shape", shape | {"rows": 5})]
    cases += [("shape", shape | {"rows": "4"}), ("shape", shape | {"stages": 3}), ("shape", shape | {"stages": [1.5]})]
    for number, (name, wrong) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tree | {name: wrong}))
        with pytest.raises(ShoalError, match=r"actions|shape|halved|whole numbers|stages"):
            TorchEngine(folder, eos_token_ids=codec.eos_token_ids)


def test_a_policy_needs_an_output_for_every_action_and_both_marks(table: ActionTable) -> None:
    with pytest.raises(FrameShapeError, match="outputs"):
        FrameConfig.of(policy_shape(len(table)), table)


def test_vllm_refuses_a_policy_of_frames(directory: Path, codec: TextCodec) -> None:
    with pytest.raises(ConfigError, match="frames"):
        make_engine("vllm", directory, codec.eos_token_ids)
