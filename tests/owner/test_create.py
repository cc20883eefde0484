"""A run is made once, whole or not at all, and means the same ever after."""

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shoal.config import LoraConfig, ShoalConfig, build_config
from shoal.errors import ConfigError, KeyFileError, ShoalError
from shoal.files import digest_bytes
from shoal.owner.create import initialise
from shoal.policy import ModelError
from shoal.policy.weights import base_digest
from shoal.protocol.descriptor import open_descriptor
from shoal.protocol.steps import secret_commitment
from shoal.rundir import ROLES, RunDirectory
from shoal.validation.calibration.adapters import write_typical
from support.tiny_run import Reports, save_policy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def config(model_path: Path, root: Path, /, **sections: dict[str, Any]) -> ShoalConfig:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "dir": root},
        "model": {"path": str(model_path)},
        "tasks": {"count": 20, "heldout": 4},
        "validation": {"foreign_calibration": True},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return build_config(tree)


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_new_run_has_keys_a_secret_and_a_signed_descriptor_that_names_what_it_serves(
    model: Path, tmp_path: Path
) -> None:
    directory = initialise(config(model, tmp_path / "run"))
    descriptor = directory.descriptor()
    assert descriptor.run_id == f"tiny-{directory.existing_key('run').public[:12]}"
    assert descriptor.coordinator_key == directory.existing_key("coordinator").public
    assert descriptor.secret_commitment == secret_commitment(directory.secret())
    assert {"config.json", "tokenizer.json"} <= set(descriptor.model_files)
    for reference in descriptor.model_files.values():
        assert digest_bytes((directory.origin / "shards" / reference.digest).read_bytes()) == reference.digest
    assert (directory.origin / "descriptor.json").read_bytes() == directory.descriptor_file.read_bytes()
    assert sorted(directory.role_keys().values()) == sorted(ROLES)


def test_a_run_admits_the_numerics_classes_that_its_owner_names(model: Path, tmp_path: Path) -> None:
    fine = config(model, tmp_path / "fine", validation={"numerics_classes": ["torch/float32/cpu"]})
    assert initialise(fine).descriptor().numerics_classes == ("torch/float32/cpu",)
    with pytest.raises(ConfigError, match="does not cover abacus"):
        initialise(
            config(model, tmp_path / "coarse", validation={"foreign_calibration": True, "numerics_classes": ["abacus"]})
        )


def test_without_a_name_a_run_admits_the_finest_classes_only(model: Path, tmp_path: Path) -> None:
    reports: list[str] = []
    descriptor = initialise(config(model, tmp_path / "run"), reports.append).descriptor()
    assert descriptor.numerics_classes == ("torch/float32/cpu", "vllm/float32/cpu")
    assert not any("admits" in report for report in reports)


def test_an_owner_is_shown_what_the_limit_on_unaudited_work_costs_a_small_swarm(model: Path, tmp_path: Path) -> None:
    reports: list[str] = []
    initialise(config(model, tmp_path / "run"), reports.append)
    (cost,) = [report for report in reports if "without an audit" in report]
    assert cost == (
        "no key brings more than 3 of 32 groups into a batch without an audit. Least share of groups that are audited"
        " by number of keys at the floor: 1: 91%, 2: 81%, 4: 62%, from 6 keys on 53%"
    )
    alone = config(model, tmp_path / "alone", trust={"unaudited_share": 1.0})
    initialise(alone, reports.append)
    assert reports[-1] == "no key brings more than 32 of 32 groups into a batch without an audit. From 1 keys on 10%"


def test_an_owner_who_admits_a_coarse_class_is_shown_what_it_costs(model: Path, tmp_path: Path) -> None:
    reports: list[str] = []
    both = ["torch/float32/cpu", "torch/bfloat16/cpu"]
    initialise(config(model, tmp_path / "run", validation={"numerics_classes": both[:1]}), reports.append)
    assert not any("admits" in report for report in reports)
    initialise(config(model, tmp_path / "run", validation={"numerics_classes": both}), reports.append)
    (cost,) = [report for report in reports if report.startswith("admits torch/bfloat16/cpu: ")]
    assert re.match(r"admits torch/bfloat16/cpu: [1-9]\.\d\d bits per 1,000 tokens", cost)
    assert "int8 (16 of 16" in cost


def test_a_tokenizer_whose_tokens_the_model_does_not_know_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    settings = json.loads((other / "config.json").read_text())
    known = Tokenizer.from_file(str(other / "tokenizer.json")).get_vocab_size(with_added_tokens=False)
    for vocab_size, refusal in ((8, "do not belong together"), (known, f"does not fit the model: its token {known}")):
        (other / "config.json").write_text(json.dumps(settings | {"vocab_size": vocab_size}))
        with pytest.raises(ModelError, match=refusal):
            initialise(config(other, tmp_path / "run"))
    assert not (tmp_path / "run" / "descriptor.json").exists()


def test_a_calibration_of_another_model_is_refused_unless_the_owner_insists(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="made for the model 'bundled'; this one has another architecture"):
        initialise(config(model, tmp_path / "run", validation={"foreign_calibration": False}))
    assert not (tmp_path / "run" / "descriptor.json").exists()


def test_a_class_can_be_admitted_to_a_running_run_but_not_taken_back(model: Path, tmp_path: Path) -> None:
    fine, both = ["torch/float32/cpu"], ["torch/float32/cpu", "torch/bfloat16/cpu"]

    def admitting(classes: list[str]) -> ShoalConfig:
        return config(model, tmp_path / "run", validation={"numerics_classes": classes})

    before = initialise(admitting(fine)).descriptor()
    after = initialise(admitting(both)).descriptor()
    assert (list(before.numerics_classes), list(after.numerics_classes)) == (fine, both)
    assert after.model_copy(update={"numerics_classes": before.numerics_classes}) == before
    assert open_descriptor((tmp_path / "run" / "origin" / "descriptor.json").read_bytes()) == after
    with pytest.raises(ConfigError, match="admits torch/bfloat16/cpu"):
        initialise(admitting(fine))


def test_keys_and_the_secret_are_for_the_owners_eyes_only(model: Path, tmp_path: Path) -> None:
    initialise(config(model, tmp_path / "run"))
    private = list((tmp_path / "run" / "keys").iterdir())
    assert len(private) == len(ROLES) + 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_making_it_again_changes_nothing(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path / "run")
    initialise(settings)
    before = files_of(tmp_path / "run")
    initialise(settings)
    assert files_of(tmp_path / "run") == before


def test_a_run_that_was_cut_off_keeps_its_keys(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path / "run")
    directory = initialise(settings)
    before = directory.descriptor()
    directory.descriptor_file.unlink()
    assert initialise(settings).descriptor() == before


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("model", {"path": "bundled"}, r"model\.path was .* and is now \"bundled\""),
        ("tasks", {"count": 21}, r"tasks\.count was 20 and is now 21"),
        ("rollouts", {"group_size": 4}, r"rollouts\.group_size was .* and is now 4"),
        ("reward", {"length_alpha": 0.5}, r"reward\.length_alpha was .* and is now 0\.5"),
        ("training", {"async_level": 1}, "async_level was 2 and is now 1"),
        ("run", {"name": "other"}, r"run\.name was .* and is now \"other\""),
        ("coordinator", {"store": "postgresql://db/run"}, r"coordinator\.store was \"sqlite\""),
        ("run", {"seed": 5}, "seed was 0 and is now 5"),
    ],
)
def test_settings_that_workers_build_on_cannot_change(
    model: Path, tmp_path: Path, section: str, change: dict[str, Any], named: str
) -> None:
    initialise(config(model, tmp_path / "run"))
    before = files_of(tmp_path / "run")
    with pytest.raises(ConfigError, match=named):
        initialise(config(model, tmp_path / "run", **{section: change}))
    assert files_of(tmp_path / "run") == before


def test_other_settings_may_change(model: Path, tmp_path: Path) -> None:
    initialise(config(model, tmp_path / "run"))
    changed = config(model, tmp_path / "run", run={"steps": 7}, training={"learning_rate": 0.5})
    reports = Reports()
    assert initialise(changed, reports).config() == changed
    assert reports == [
        "changed since the last start: run.steps was 1000 and is now 7",
        "changed since the last start: training.learning_rate was 3e-07 and is now 0.5",
    ]
    initialise(changed, reports)
    assert len(reports) == 2


def test_a_run_that_moves_to_another_port_signs_its_addresses_again(model: Path, tmp_path: Path) -> None:
    before = initialise(config(model, tmp_path / "run")).descriptor()
    moved = config(
        model, tmp_path / "run", coordinator={"port": 8300}, broadcast={"public_url": "https://origin.example"}
    )
    directory = initialise(moved)
    after = directory.descriptor()
    assert after.coordinator_url == "http://127.0.0.1:8300"
    assert after.relay_urls == ("https://origin.example",)
    assert after.model_copy(update={"coordinator_url": "", "relay_urls": ()}) == before.model_copy(
        update={"coordinator_url": "", "relay_urls": ()}
    )
    assert (directory.origin / "descriptor.json").read_bytes() == directory.descriptor_file.read_bytes()


@pytest.mark.parametrize("seed", [0, 5])
def test_no_seed_that_an_owner_can_type_decides_slots_or_audits(model: Path, tmp_path: Path, seed: int) -> None:
    def secret(name: str) -> bytes:
        return initialise(config(model, tmp_path / name, run={"seed": seed})).secret()

    assert len({secret(name) for name in ("a", "b", "c")}) == 3


def test_a_secret_that_was_placed_before_the_run_is_made_does_not_enter_it(model: Path, tmp_path: Path) -> None:
    known = bytes(range(32))
    (tmp_path / "run" / "keys").mkdir(parents=True)
    (tmp_path / "run" / "keys" / "run.secret").write_text(known.hex())
    directory = initialise(config(model, tmp_path / "run"))
    assert directory.secret() != known
    assert directory.descriptor().secret_commitment == secret_commitment(directory.secret())


@pytest.mark.parametrize("bad", ["model", "weights", "tokenizer", "template", "calibration", "tasks", "prompts"])
def test_nothing_is_written_when_something_is_wrong(model: Path, tmp_path: Path, bad: str) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    settings: dict[str, dict[str, Any]] = {}
    if bad == "model":
        settings["model"] = {"path": str(tmp_path / "nowhere")}
    elif bad == "weights":
        (copy / "model.safetensors").unlink()
    elif bad == "tokenizer":
        (copy / "tokenizer.json").write_text("{}")
    elif bad == "template":
        (copy / "chat_template.jinja").write_text("{% for %}")
    elif bad == "calibration":
        settings["validation"] = {"calibration": str(tmp_path / "nowhere.json")}
    elif bad == "tasks":
        settings["tasks"] = {"source": "builtin:riddles"}
    elif bad == "prompts":
        settings["rollouts"] = {"max_prompt_tokens": 8}
    with pytest.raises(ShoalError):
        initialise(config(copy, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_prompts_that_are_too_long_are_named_with_the_limit_that_would_do(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chain-sums/.* tokens, rollouts\.max_prompt_tokens allows 8\. Raise it to"):
        initialise(config(model, tmp_path / "run", rollouts={"max_prompt_tokens": 8}))


def test_a_directory_without_a_run_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunDirectory(tmp_path).descriptor()
    with pytest.raises(KeyFileError, match="run secret"):
        RunDirectory(tmp_path).secret()
    with pytest.raises(KeyFileError, match="no key file"):
        RunDirectory(tmp_path).existing_key("trainer")


def test_a_descriptor_that_was_edited_is_refused(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path / "run")
    directory = initialise(settings)
    envelope = json.loads(directory.descriptor_file.read_bytes())
    envelope["payload"] = envelope["payload"].replace('"async_level":2', '"async_level":9')
    directory.descriptor_file.write_text(json.dumps(envelope))
    with pytest.raises(ShoalError, match="signature"):
        directory.descriptor()


def test_a_run_of_adapters_names_its_base_and_admits_classes_with_an_adapter(model: Path, tmp_path: Path) -> None:
    made = config(model, tmp_path / "run", model={"path": str(model), "lora": {"rank": 4}})
    directory = initialise(made)
    descriptor = directory.descriptor()
    assert descriptor.adapter is not None
    assert descriptor.adapter.lora.rank == 4
    assert descriptor.adapter.base_weights == base_digest(model)
    assert (directory.origin / "manifests" / descriptor.adapter.base_manifest).is_file()
    assert descriptor.numerics_classes == ("torch/float32/cpu+lora",)
    assert initialise(made).descriptor() == descriptor
    with pytest.raises(ConfigError, match=r"keeps its settings: model\.lora\.rank was 4 and is now 8"):
        initialise(config(model, tmp_path / "run", model={"path": str(model), "lora": {"rank": 8}}))


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rank": 4, "target_modules": ["q_porj"]}, "Nearest: q_proj"),
        ({"rank": 999}, "Rank 999 does not fit"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, lora: dict[str, Any], says: str
) -> None:
    with pytest.raises(ShoalError, match=says):
        initialise(config(model, tmp_path / "run", model={"path": str(model), "lora": lora}))
    assert not (tmp_path / "run" / "descriptor.json").exists()


def test_a_run_starts_from_a_peft_directory_of_the_same_kind(model: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2)
    adapter = write_typical(tmp_path / "adapter", model, lora)
    named = {"path": str(adapter)}
    for wrong, says in (({}, "is an adapter, and model.lora.rank is 0"), ({"rank": 4}, "rank 2, model.lora.rank is 4")):
        with pytest.raises(ShoalError, match=says):
            initialise(config(model, tmp_path / "run", model={**named, "lora": wrong}))
    directory = initialise(config(model, tmp_path / "run", model={**named, "lora": {"rank": 2}}))
    terms = directory.descriptor().adapter
    assert terms is not None
    assert terms.base_weights == base_digest(model)
