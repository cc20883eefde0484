"""The one-file algorithm is the engine's: same loss, same advantages, same update."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shoal.config import TasksConfig, TrainingConfig
from shoal.training import ADVANTAGES, LOSSES, Group, Sample, TokenBatch, Trainer
from support.tiny_models import save_llama

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_in_one_file.py"
VOCABULARY = 32
TEMPERATURE = 0.9
SEED = 3


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), VOCABULARY)


def random_groups(seed: int) -> list[Group]:
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    groups = []
    for number in range(4):
        prompt = tokens(2, 6)
        rewards = [float((place + number) % 2) for place in range(4)]
        samples = [Sample(prompt, tokens(1, 9), reward - 0.01 * rng.random(), reward) for reward in rewards]
        groups.append(Group(f"0/0/{number}", samples))
    return groups


def in_engine_order(groups: list[Group], step: int) -> list[Group]:
    """The engine shuffles groups before it cuts the batch into mini-batches; the example takes them as they come."""
    order = list(range(len(groups)))
    random.Random(f"{SEED}/{step}").shuffle(order)
    return [groups[index] for index in order]


@pytest.mark.parametrize(("kl_beta", "entropy_eta"), [(0.0, 0.0), (0.05, 0.02)])
def test_updates_equal_those_of_the_engine(
    example: ModuleType, model_dir: Path, tmp_path: Path, kl_beta: float, entropy_eta: float
) -> None:
    torch.set_num_threads(1)
    shared = {
        "learning_rate": 3e-3,
        "warmup_steps": 3,
        "kl_beta": kl_beta,
        "entropy_eta": entropy_eta,
        "minibatches": 2,
    }
    config = TrainingConfig.model_validate({**shared, "weight_decay": 0.0, "device": "cpu"})
    engine = Trainer(config, model_dir, work_dir=tmp_path, temperature=TEMPERATURE, seed=SEED)
    settings = example.Settings(model=model_dir, temperature=TEMPERATURE, **shared)
    model = example.load_model(model_dir)
    reference = example.load_model(model_dir) if kl_beta else None
    optimizer, scheduler = example.build_optimizer(model, settings)
    for step in range(3):
        groups = random_groups(step)
        engine.train_step(groups)
        same = [
            [
                example.Sample(list(s.prompt_tokens), list(s.output_tokens), s.task_reward, s.reward)
                for s in group.samples
            ]
            for group in in_engine_order(groups, step)
        ]
        example.train_step(model, reference, optimizer, scheduler, same, settings)
    start = example.load_model(model_dir)
    for ours, theirs, before in zip(model.parameters(), engine.policy.parameters(), start.parameters(), strict=True):
        assert not torch.equal(ours, before)
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-3)


def test_loss_and_its_gradient_equal_the_engines_at_every_ratio(example: ModuleType) -> None:
    old = torch.zeros(200)
    advantage = torch.randn(200, generator=torch.Generator().manual_seed(0))
    ours = torch.linspace(-3, 3, 200, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    batch = TokenBatch(theirs, old, advantage, torch.zeros(200, dtype=torch.int64), 1)
    one = example.token_loss(ours, old, advantage, epsilon=0.2, delta=4.0)
    two = LOSSES["two_sided_grpo"](batch, TrainingConfig()).loss_N
    torch.autograd.backward([one.sum(), two.sum()])
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_advantages_equal_the_engines(example: ModuleType) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.97])
    torch.testing.assert_close(example.advantages(rewards), ADVANTAGES["grpo"]([rewards])[0])


def test_groups_differing_only_in_length_are_not_useful(example: ModuleType) -> None:
    equal = [example.Sample([1], [2], 1.0, 0.9), example.Sample([1], [2, 3], 1.0, 0.8)]
    mixed = [example.Sample([1], [2], 1.0, 0.9), example.Sample([1], [2], 0.0, -0.1)]
    assert not example.is_useful(equal)
    assert example.is_useful(mixed)


def test_one_file_stays_under_300_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 300


def test_a_short_run_on_the_bundled_policy_reports_each_step(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "TasksConfig", lambda: TasksConfig(count=20, heldout=8))
    settings = example.Settings(steps=2, groups_per_step=2, oversampling=1, evaluate_every=2)
    curve = example.run(settings)
    assert len(curve) == 2
    assert capsys.readouterr().out.count("\nstep ") == 2
