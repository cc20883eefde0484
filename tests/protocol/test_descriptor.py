import json

import pytest

from shoal.errors import IntegrityError, SignatureError
from shoal.identity import DESCRIPTOR_KIND, MAX_DESCRIPTOR_BYTES, Envelope
from shoal.protocol.descriptor import ProtocolVersionError, open_descriptor
from support.samples import descriptor, keypair

RUN_KEY = keypair("run")


def sealed(payload: dict[str, object], kind: str = DESCRIPTOR_KIND) -> bytes:
    return Envelope.seal(kind, json.dumps(payload), RUN_KEY).to_bytes()


def fields(**changes: object) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(descriptor().model_dump_json())
    return loaded | changes


def test_what_the_run_key_sealed_comes_back_unchanged() -> None:
    data = descriptor().seal(RUN_KEY).to_bytes()
    assert open_descriptor(data, RUN_KEY.public) == descriptor()
    assert open_descriptor(data) == descriptor()


def test_another_key_than_the_pinned_one_is_refused() -> None:
    data = descriptor().seal(RUN_KEY).to_bytes()
    with pytest.raises(SignatureError, match="not by the trusted key"):
        open_descriptor(data, keypair("someone").public)


def test_a_descriptor_that_names_another_run_key_than_its_signer_is_refused() -> None:
    data = descriptor(run_key=keypair("someone").public).seal(RUN_KEY).to_bytes()
    with pytest.raises(SignatureError, match="not signed by the run key that it names"):
        open_descriptor(data)


def test_a_changed_payload_is_refused() -> None:
    data = descriptor().seal(RUN_KEY).to_bytes().replace(b"run-1", b"run-2")
    with pytest.raises(SignatureError):
        open_descriptor(data)


def test_a_sealed_thing_of_another_kind_is_refused() -> None:
    with pytest.raises(SignatureError, match="signed head"):
        open_descriptor(sealed(fields(), kind="head"))


def test_another_protocol_gets_an_upgrade_hint_even_if_its_fields_are_unknown() -> None:
    for payload in (fields(protocol=2), {"protocol": 2, "run_id": "run-1", "shape": "of the future"}):
        with pytest.raises(ProtocolVersionError, match="protocol 2") as caught:
            open_descriptor(sealed(payload))
        assert "Install the release" in caught.value.hint


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"protocol": "one"},
        {"protocol": 1},
        fields(task_count="many"),
        fields(model_files={"../../.ssh/authorized_keys": {"digest": "ab" * 32, "bytes": 1}}),
        fields(model_files={".hidden": {"digest": "ab" * 32, "bytes": 1}}),
        fields(model_files={"config.json": {"digest": "../secret", "bytes": 1}}),
        fields(model_files={"config.json": {"digest": "ab" * 32, "bytes": -1}}),
    ],
)
def test_a_malformed_descriptor_is_refused(payload: dict[str, object]) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        open_descriptor(sealed(payload))


@pytest.mark.parametrize("data", [b"", b"[]", b"not json", b'{"kind": 1}', b" " * (MAX_DESCRIPTOR_BYTES + 1)])
def test_bytes_that_are_no_descriptor_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        open_descriptor(data)


def test_fields_of_a_newer_release_are_ignored() -> None:
    assert open_descriptor(sealed(fields(motto="from the future"))) == descriptor()
