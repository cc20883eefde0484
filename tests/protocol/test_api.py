import json

import pytest
from pydantic import ValidationError

from shoal.protocol import api

REGISTER = {"name": "ann", "numerics_class": "torch/float32/cpu", "tokens_per_s": 10.0}


def test_a_plain_registration_is_valid() -> None:
    assert api.RegisterBody.model_validate(REGISTER).name == "ann"


@pytest.mark.parametrize(
    "change",
    [
        {"surplus": 1},
        {"name": "x" * 201},
        {"name": "\x1b[2Jgotcha"},
        {"name": "two\nlines"},
        {"name": "c1\x9bcontrol"},
        {"name": "nad \u202eegdelrevo"},
        {"name": "one\u2028two"},
        {"name": "\u2066isolated"},
        {"tokens_per_s": 0},
        {"tokens_per_s": 1e9},
        {"tokens_per_s": float("nan")},
        {"tokens_per_s": float("inf")},
    ],
)
def test_unknown_fields_control_characters_and_wild_numbers_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        api.RegisterBody.model_validate(REGISTER | change)


def test_names_may_use_any_script() -> None:
    assert api.RegisterBody.model_validate(REGISTER | {"name": "Šárka 漁船 🐟"}).name == "Šárka 漁船 🐟"


@pytest.mark.parametrize("held", [[-1], [1 << 54], list(range(65)), ["x"]])
def test_claimed_versions_are_bounded(held: list[object]) -> None:
    with pytest.raises(ValidationError):
        api.LeaseBody.model_validate({"request_id": "a" * 8, "held_versions": held})


@pytest.mark.parametrize("request_id", ["short", "x" * 65, "semi;colon", "space space", ""])
def test_client_made_ids_are_plain(request_id: str) -> None:
    with pytest.raises(ValidationError):
        api.LeaseBody.model_validate({"request_id": request_id, "held_versions": []})


@pytest.mark.parametrize("wait_s", [-1, 31, float("nan")])
def test_waits_are_bounded(wait_s: float) -> None:
    with pytest.raises(ValidationError):
        api.ClaimBody.model_validate({"request_id": "a" * 8, "wait_s": wait_s})


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_rewards_are_finite(literal: str) -> None:
    group = {"group": 0, "task_id": "t", "useful": True, "tokens": 1, "rewards": [1.0], "task_rewards": [1.0]}
    with pytest.raises(ValidationError):
        api.GroupVerdict.model_validate(json.loads(json.dumps(group).replace("[1.0]", f"[{literal}]", 1)))


def test_a_metric_that_is_not_a_number_is_reported_as_missing() -> None:
    body = api.VersionBody(
        version=0,
        manifest_digest="a" * 64,
        weights_digest="b" * 64,
        bytes_total=1,
        report={"loss": float("nan"), "step": 1},
    )
    assert api.VersionBody.model_validate_json(body.model_dump_json()).report == {"loss": None, "step": 1}


def test_answers_tolerate_fields_of_a_newer_coordinator() -> None:
    answer = api.LeaseAnswer.model_validate({"reason": "no_work", "new_in_next_release": True})
    assert answer.lease is None


@pytest.mark.parametrize("url", ["ftp://relay", "http://", "http://a b", "http://" + "x" * 300, "javascript:alert(1)"])
def test_relay_addresses_are_http(url: str) -> None:
    with pytest.raises(ValidationError):
        api.RelayBody.model_validate({"url": url})
