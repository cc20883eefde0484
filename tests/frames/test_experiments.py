"""The tasks, models and fits of the experiments on recurrence."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks.frame_experiments.critical_length import Plan, critical_length, measure
from benchmarks.frame_experiments.fits import alpha_interval, crossing_s, power_law, power_law_with_floor
from benchmarks.frame_experiments.length_scaling import Data, evaluate, history_control
from benchmarks.frame_experiments.sequence_models import MODELS, MinGRU, build
from benchmarks.frame_experiments.tracking import JUMPS, SHELL, SWAPS, TASKS
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
def test_the_same_seed_gives_the_same_batch(task: object) -> None:
    first, second, other = (TASKS["jumps"].batch(4, 9, seed)[0] for seed in (1, 1, 2))
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
    assert crossing_s(curve(3.0, 2.0, 1.9), curve(4.0, 1.9, 1.5)) == 20.0
    assert crossing_s(curve(3.0, 2.0, 1.9), curve(2.0, 1.9, 2.5)) is None
    assert crossing_s(curve(3.0, 2.0), curve(2.0, 1.0)) == 10.0


def tiny_data(shape: FrameShape) -> Data:
    table = build_table(["word"], shape.actions)
    changes = [Change("x", ["ab"], ["ab" + "cde" * 12]) for _ in range(3)]
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
    assert set(history_control(model, data)) == {"own", "swapped", "last_frames"}


def test_training_windows_of_the_data_are_as_long_as_asked() -> None:
    data = tiny_data(FrameShape.small(rows=4, columns=8, actions=220))
    ((frames, _),) = itertools.islice(data.train.windows(5, 2, 0), 1)
    assert frames.shape == (5, 2, 4, 8)
