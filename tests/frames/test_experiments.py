"""The tasks, models and fits of the experiments on recurrence."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.frame_experiments.critical_length import Plan, critical_length, measure
from benchmarks.frame_experiments.fits import (
    alpha_interval,
    crossing_s,
    extrapolated_crossing_s,
    mean_interval,
    power_law,
    power_law_with_floor,
)
from benchmarks.frame_experiments.length_scaling import (
    Data,
    embed,
    evaluate,
    first_model,
    history_control,
    run,
    token_losses,
)
from benchmarks.frame_experiments.length_scaling import Plan as LengthPlan
from benchmarks.frame_experiments.length_summary import summarise
from benchmarks.frame_experiments.sequence_models import MODELS, MinGRU, build
from benchmarks.frame_experiments.tracking import JUMPS, SHELL, SWAPS, TASKS, Task
from shoal.frames import Change, FrameModel, FrameShape, build_dataset, build_table


def test_the_ball_is_where_the_swaps_put_it() -> None:
    symbols, labels = SHELL.batch(20, 30, seed=1)
    for row, truth in zip(symbols, labels, strict=True):
        cups = ["ball", "", "", "", ""]
        for symbol, label in zip(row[:, 0], truth, strict=True):
            first, second = SWAPS[symbol]
            cups[first], cups[second] = cups[second], cups[first]
            assert cups.index("ball") == label


def test_a_program_runs_block_by_block_and_jumps_forward() -> None:
    symbols, labels = JUMPS.batch(20, 60, seed=2)
    for row, truth in zip(symbols, labels, strict=True):
        counter, register, ran = 0, 0, {}
        while counter < len(row):
            first, second, bit = row[counter]
            register ^= int(bit)
            ran[counter] = 1 + register
            counter += int(second if register else first) + 1
        assert [ran.get(at, 0) for at in range(len(row))] == truth.tolist()


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_the_same_seed_gives_the_same_batch(task: Task) -> None:
    first, second, other = (task.batch(4, 9, seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_the_floors_are_far_below_a_tracked_state() -> None:
    assert SHELL.floor() == 0.2
    assert 1 / 3 < JUMPS.floor() < 0.75


@pytest.mark.parametrize("name", MODELS)
def test_no_model_sees_the_future(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, JUMPS.fields, JUMPS.labels)
    symbols = torch.from_numpy(JUMPS.batch(2, 12, seed=0)[0])
    changed = symbols.clone()
    changed[:, 7] = 0
    before, after = model(symbols), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-6)


def test_the_scan_of_mingru_equals_its_recurrence() -> None:
    torch.manual_seed(1)
    layer = MinGRU(8).double()
    x = torch.randn(2, 10, 64, dtype=torch.float64)
    inside = layer.norm(x)
    gate = torch.sigmoid(layer.gate(inside))
    value = layer.value(inside)
    positive = torch.where(value >= 0, value + 0.5, torch.sigmoid(value))
    state, states = torch.zeros(2, 8, dtype=torch.float64), []
    for at in range(10):
        state = (1 - gate[:, at]) * state + gate[:, at] * positive[:, at]
        states.append(state)
    mixed = x + layer.out(torch.stack(states, dim=1))
    expected = mixed + layer.down(torch.nn.functional.gelu(layer.up(layer.norm_mlp(mixed))))
    assert (layer(x) - expected).abs().max() < 1e-10


def test_growing_sequences_end_at_the_whole_length_and_others_have_it_from_the_start() -> None:
    plan = Plan(length=64, steps=8, growing=True)
    assert [plan.length_at(step) for step in range(8)] == [16, 16, 16, 16, 32, 32, 64, 64]
    assert {Plan(length=64, steps=8).length_at(step) for step in range(8)} == {64}
    assert Plan(length=2, growing=True).length_at(0) == 1


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_label_counts_about_the_same_in_the_loss(task: Task) -> None:
    _, labels = task.batch(400, 64, seed=3)
    parts = np.bincount(labels.flatten(), minlength=task.labels) * np.array(task.weights)
    assert parts.max() < 1.3 * parts.min()


def test_a_piece_of_the_experiment_has_accuracies_for_every_position() -> None:
    piece = measure("lstm", "shell", Plan(length=6, unseen=9, steps=3, batch=4, tested=40))
    assert len(piece["accuracy"]) == 6  # type: ignore[arg-type]
    assert len(piece["accuracy_unseen"]) == 9  # type: ignore[arg-type]


@pytest.mark.parametrize(("values", "found"), [([1.0, 0.95], None), ([1.0, 0.95, 0.89, 0.95], 3), ([0.1], 1)])
def test_the_critical_length_is_the_first_position_that_is_not_tracked(values: list[float], found: int | None) -> None:
    assert critical_length(values) == found


LENGTHS = [2, 4, 8, 16, 32]


def test_a_power_law_is_found_again() -> None:
    losses = 3.0 * np.array(LENGTHS, float) ** -0.2
    alpha, scale, r2 = power_law(LENGTHS, losses)
    assert (alpha, scale, r2) == pytest.approx((0.2, 3.0, 1.0))
    floor, alpha, _, _ = power_law_with_floor(LENGTHS, 1.0 + losses)
    assert (floor, alpha) == pytest.approx((1.0, 0.2), abs=0.03)


def test_the_interval_of_an_exponent_contains_it_and_widens_with_noise() -> None:
    rng = np.random.default_rng(0)
    clean = (3.0 * np.array(LENGTHS, float) ** -0.2)[:, None] * np.ones((1, 16))
    widths = []
    for noise in (0.01, 0.2):
        low, high = alpha_interval(LENGTHS, clean * np.exp(noise * rng.standard_normal(clean.shape)))
        assert low < 0.2 < high
        widths.append(high - low)
    assert widths[1] > widths[0]


def curve(*losses: float) -> list[dict[str, float]]:
    return [{"cpu_s": 10.0 * at, "loss": loss} for at, loss in enumerate(losses, 1)]


def test_a_run_is_overtaken_when_the_longer_one_stays_below_it() -> None:
    assert crossing_s(curve(3.0, 2.0, 1.9), curve(4.0, 1.9, 1.5), "loss") == 20.0
    assert crossing_s(curve(3.0, 2.0, 1.9), curve(2.0, 1.9, 2.5), "loss") is None
    assert crossing_s(curve(3.0, 2.0), curve(2.0, 1.0), "loss") == 10.0


def falling(slope: float, offset: float) -> list[dict[str, float]]:
    return [{"cpu_s": 2.0**at, "loss": offset - slope * at} for at in range(1, 9)]


def test_a_crossing_beyond_the_runs_is_extrapolated_and_lines_that_part_have_none() -> None:
    short, long = falling(0.1, 3.0), falling(0.2, 4.0)
    assert crossing_s(short, long, "loss") is None
    assert extrapolated_crossing_s(short, long, "loss") == pytest.approx(2.0**10, rel=1e-3)
    assert extrapolated_crossing_s(long, short, "loss") is None
    assert extrapolated_crossing_s(short, falling(0.1001, 9.0), "loss") is None, "later than a day"


def test_the_interval_of_a_mean_contains_it() -> None:
    low, high = mean_interval(np.random.default_rng(1).normal(0.5, 0.1, 40))
    assert 0.4 < low < 0.5 < high < 0.6


def tiny_data(shape: FrameShape) -> Data:
    table = build_table(["word"], shape.actions)
    changes = [Change("x", ["ab"], ["ab" + text * 12]) for text in ("cde", "fgh", "ijk")]
    dataset = build_dataset(changes, table, shape.rows, shape.columns, actions=10_000, least=4, most=64, seed=0)
    frames, targets = dataset.streams(24, 3)
    return Data(dataset, frames, targets, {})


def test_windows_from_the_first_state_and_carried_streams_are_measured_on_the_same_targets() -> None:
    shape = FrameShape.small(rows=4, columns=8, actions=220)
    data = tiny_data(shape)
    model = FrameModel(shape)
    whole = evaluate(model, data, 24)
    assert whole["own"] == pytest.approx(whole["carried"], abs=1e-4)
    assert evaluate(model, data, 8)["own"] != pytest.approx(whole["carried"], abs=1e-6)
    assert len(evaluate(model, data, 8)["by_position"]) == 8


def bias(model: FrameModel) -> Tensor:
    found = model.integrator.lstm.bias_ih_l0
    assert isinstance(found, Tensor)
    return found


def test_recent_losses_are_those_of_windows_with_at_least_half_of_their_history() -> None:
    shape = FrameShape.small(rows=4, columns=8, actions=220)
    data = tiny_data(shape)
    model = FrameModel(shape)
    with torch.no_grad():
        bias(model)[shape.hidden : 2 * shape.hidden] = 5.0  # it remembers
        x_LBC = embed(model, data.frames_LB)
        expected = torch.empty(data.targets_LB.shape)
        for at in range(24):
            first = 0 if at < 8 else at // 4 * 4 - 4
            part = slice(first, at + 1)
            expected[at] = token_losses(model, x_LBC[part], data.targets_LB[part])[-1]
    assert evaluate(model, data, 8)["recent"] == pytest.approx(expected.mean(dim=0).tolist(), abs=1e-4)
    assert evaluate(model, data, 1)["recent"] == evaluate(model, data, 1)["own"]


def test_with_its_own_history_the_control_is_the_loss_of_the_second_half() -> None:
    shape = FrameShape.small(rows=4, columns=8, actions=220)
    data = tiny_data(shape)
    model = FrameModel(shape)
    with torch.no_grad():
        bias(model)[shape.hidden : 2 * shape.hidden] = 5.0  # it remembers
        model.action_head.weight *= 20
        found = history_control(model, data, 24)
        losses = token_losses(model, embed(model, data.frames_LB), data.targets_LB)
    assert found["own"] == pytest.approx(float(losses[12:].mean()), abs=1e-4)
    assert min(abs(a - b) for a, b in itertools.combinations(found.values(), 2)) > 0.01, (
        "another history and none change the loss"
    )


@pytest.mark.parametrize(("steps", "milestones"), [(4, {"1", "2", "4"}), (1, {"1"})])
def test_runs_of_several_lengths_are_summed_up(steps: int, milestones: set[str]) -> None:
    shape = FrameShape.small(rows=4, columns=8, actions=220)
    plan = LengthPlan(batch=2, steps=steps, least_s=0.0, first_s=0.0, growth=1.0)
    rows = [run(length, 2, tiny_data(shape), shape, plan) for length in (1, 2, 4, 12)]
    control = run(2, 12, tiny_data(shape), shape, plan, is_control=True)
    found = summarise([{**row, "train_actions": 1, "skipped_files": {}} for row in rows], control, steps)
    assert set(found["overtaken_by_double"]) == {"1", "2", "4"}
    assert len(found["crossings_s"]) == 6
    low, high = found["alpha_interval"]
    assert low <= found["alpha"] <= high
    assert set(found["alpha_by_step"]) == milestones
    assert list(found["running_mean_of_longest"]) == ["1", "2", "4", "12"]


def test_a_run_starts_from_how_often_each_action_occurs() -> None:
    shape = FrameShape.small(rows=4, columns=8, actions=220)
    train = tiny_data(shape).train
    model = first_model(shape, train)
    with torch.no_grad():
        model.action_head.weight.zero_()
        logits, _ = model(torch.from_numpy(train.frames_NRC[:1, None]))
    often = np.bincount(train.actions_N, minlength=220)
    assert int(logits.argmax()) in np.flatnonzero(often == often.max())
    assert float(logits.logsumexp(dim=-1)) == pytest.approx(0.0, abs=1e-5)


def test_training_windows_of_the_data_are_as_long_as_asked() -> None:
    data = tiny_data(FrameShape.small(rows=4, columns=8, actions=220))
    ((frames, _),) = itertools.islice(data.train.windows(5, 2, 0), 1)
    assert frames.shape == (5, 2, 4, 8)
