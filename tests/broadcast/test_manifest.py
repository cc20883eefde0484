import json
from dataclasses import replace

import pytest
from safetensors import safe_open

from shoal.broadcast.manifest import (
    BaseRef,
    Encoding,
    Head,
    Manifest,
    ShardEntry,
    TensorEntry,
    VersionEntry,
    descriptor_key,
    digest_weights,
    open_head,
    open_manifest,
    safetensors_header,
    seal_head,
    seal_manifest,
)
from shoal.errors import IntegrityError, SignatureError
from shoal.identity import Envelope, Keypair

KEY = Keypair.from_seed(b"k" * 32)
OTHER = Keypair.from_seed(b"o" * 32)
DIGEST = "a" * 64


def tensor(**changes: object) -> TensorEntry:
    return TensorEntry.model_validate({"name": "w", "dtype": "bfloat16", "shape": (4,), "digest": DIGEST} | changes)


def manifest_fields(**changes: object) -> dict[str, object]:
    entry = tensor()
    fields: dict[str, object] = {
        "run_id": "run",
        "version": 1,
        "tensors": [entry.model_dump(mode="json")],
        "weights_digest": digest_weights([entry]),
        "encodings": [{"kind": "full", "shards": [{"digest": DIGEST, "size_bytes": 8}]}],
    }
    return fields | changes


def sealed(fields: dict[str, object]) -> bytes:
    return Envelope.seal("manifest", json.dumps(fields), KEY).to_bytes()


def test_manifest_survives_the_wire() -> None:
    manifest = open_manifest(sealed(manifest_fields()), KEY.public)
    assert open_manifest(seal_manifest(manifest, KEY), KEY.public) == manifest
    assert manifest.size_bytes == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"version": "1"},
        {"extra": 1},
        {"encodings": []},
        {"encodings": [{"kind": "full", "shards": [{"digest": DIGEST, "size_bytes": 9}]}]},
        {"encodings": [{"kind": "full", "shards": [{"digest": "../../etc/passwd", "size_bytes": 8}]}]},
        {"encodings": [{"kind": "full", "shards": [{"digest": DIGEST, "size_bytes": (64 << 20) + 1}]}]},
        {"encodings": [{"kind": "full", "shards": [{"digest": DIGEST, "size_bytes": 8}]}] * 2},
        {"encodings": [{"kind": "delta", "shards": [{"digest": DIGEST, "size_bytes": 8}], "block_bytes": [8]}]},
        {"weights_digest": DIGEST},
        {"tensors": [{"name": "__metadata__", "dtype": "bfloat16", "shape": [4], "digest": DIGEST}]},
        {"tensors": [{"name": 'a"b\n', "dtype": "bfloat16", "shape": [4], "digest": DIGEST}]},
        {"tensors": [{"name": "x" * 256, "dtype": "bfloat16", "shape": [4], "digest": DIGEST}]},
        {"tensors": [{"name": "w", "dtype": "int64", "shape": [4], "digest": DIGEST}]},
        {"tensors": [{"name": "w", "dtype": "bfloat16", "shape": [-4], "digest": DIGEST}]},
        {"tensors": [{"name": "w", "dtype": "bfloat16", "shape": [1 << 40, 1 << 40], "digest": DIGEST}]},
        {"tensors": [{"name": "w", "dtype": "bfloat16", "shape": [1] * 9, "digest": DIGEST}]},
    ],
)
def test_hostile_manifest_is_refused_even_when_signed(changes: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        open_manifest(sealed(manifest_fields(**changes)), KEY.public)


def test_two_tensors_may_not_share_a_name() -> None:
    duplicates = [tensor(), tensor()]
    with pytest.raises(ValueError, match="unique"):
        Manifest(
            run_id="run",
            version=0,
            tensors=tuple(duplicates),
            weights_digest=digest_weights(duplicates),
            encodings=(Encoding(kind="full", shards=(ShardEntry(digest=DIGEST, size_bytes=16),)),),
        )


def delta_manifest(size_bytes: int, **changes: object) -> Manifest:
    entry = tensor()
    base = BaseRef(version=0, manifest_digest=DIGEST, weights_digest=DIGEST)
    shards = (ShardEntry(digest=DIGEST, size_bytes=size_bytes),)
    fields = {"kind": "delta", "base": base, "shards": shards, "span_bytes": 100, "block_bytes": (size_bytes,)}
    encoding = Encoding.model_validate(fields | changes)
    return Manifest(
        run_id="run", version=1, tensors=(entry,), weights_digest=digest_weights([entry]), encodings=(encoding,)
    )


def test_delta_encoding_holds_the_blocks_of_all_tensors() -> None:
    assert delta_manifest(9).encoding("delta") is not None


@pytest.mark.parametrize(
    ("size_bytes", "changes", "reason"),
    [
        (10, {}, "larger than what it describes"),
        (9, {"base": None}, "older base"),
        (9, {"base": BaseRef(version=1, manifest_digest=DIGEST, weights_digest=DIGEST)}, "older base"),
        (9, {"block_bytes": (8, 1)}, "blocks of all tensors"),
        (9, {"block_bytes": (8,)}, "blocks of all tensors"),
        (9, {"span_bytes": 0}, "too many blocks"),
    ],
)
def test_delta_encoding_that_does_not_add_up_is_refused(
    size_bytes: int, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        delta_manifest(size_bytes, **changes)


def test_manifest_signed_by_another_key_is_refused() -> None:
    with pytest.raises(SignatureError):
        open_manifest(sealed(manifest_fields()), OTHER.public)


def test_manifest_cannot_be_shown_as_a_head() -> None:
    with pytest.raises(SignatureError):
        open_head(sealed(manifest_fields()), KEY.public)


def head(**changes: object) -> Head:
    fields = {"run_id": "r", "counter": 1, "expires_at": 1e9, "ledger_head": "", "versions": ()}
    return Head.model_validate(fields | changes)


def test_head_versions_ascend() -> None:
    entries = tuple(VersionEntry(version=number, manifest_digest=DIGEST) for number in (1, 0))
    with pytest.raises(ValueError, match="ascend"):
        head(versions=entries)


def test_head_survives_the_wire() -> None:
    entries = tuple(VersionEntry(version=number, manifest_digest=DIGEST) for number in (3, 7))
    opened = open_head(seal_head(head(versions=entries), KEY), KEY.public)
    assert opened.newest == entries[-1]
    assert opened.entry(3) == entries[0]
    assert opened.entry(4) is None


def test_descriptor_vouches_for_the_key_that_signed_it() -> None:
    descriptor = Envelope.seal("descriptor", "{}", KEY)
    assert descriptor_key(descriptor.to_bytes()) == KEY.public
    with pytest.raises(SignatureError):
        descriptor_key(replace(descriptor, payload="{ }").to_bytes())
    with pytest.raises(SignatureError):
        descriptor_key(descriptor.to_bytes(), OTHER.public)


def test_head_is_not_a_descriptor() -> None:
    with pytest.raises(SignatureError):
        descriptor_key(seal_head(head(), KEY))


def test_header_opens_as_safetensors(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tensors = [tensor(name="a", dtype="float32", shape=(2, 3)), tensor(name="b", dtype="float16", shape=())]
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_header(tensors) + bytes(26))
    with safe_open(path, "numpy") as file:
        assert file.get_tensor("a").shape == (2, 3)
        assert file.get_tensor("b").shape == ()


def test_epochs_ascend_with_the_versions_of_a_head() -> None:
    def head(epoch: int, *epochs: int) -> Head:
        entries = tuple(
            VersionEntry(version=number, manifest_digest=DIGEST, epoch=made) for number, made in enumerate(epochs)
        )
        return Head(run_id="r", counter=1, epoch=epoch, expires_at=1.0, ledger_head="", versions=entries)

    assert head(2, 0, 0, 2).epoch == 2
    for epoch, epochs in ((1, (0, 2)), (2, (1, 0))):
        with pytest.raises(ValueError, match="epochs must ascend"):
            head(epoch, *epochs)
