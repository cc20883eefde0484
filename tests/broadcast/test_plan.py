import pytest

from shoal.broadcast.manifest import BaseRef, Encoding, Manifest, ShardEntry, TensorEntry, digest_weights
from shoal.broadcast.plan import cheapest_plan
from shoal.errors import IntegrityError, UnavailableError

TENSOR = TensorEntry(name="w", dtype="bfloat16", shape=(500,), digest="f" * 64)
WEIGHTS = digest_weights([TENSOR])


def name(version: int) -> str:
    return f"{version:064x}"


def manifest(version: int, *, full: bool, delta_bytes: int | None = None, base_weights: str = WEIGHTS) -> Manifest:
    encodings = [Encoding(kind="full", shards=(ShardEntry(digest="a" * 64, size_bytes=1000),))] if full else []
    if delta_bytes is not None:
        base = BaseRef(version=version - 1, manifest_digest=name(version - 1), weights_digest=base_weights)
        shard = ShardEntry(digest="b" * 64, size_bytes=delta_bytes)
        encodings.append(
            Encoding(kind="delta", base=base, shards=(shard,), span_bytes=1000, block_bytes=(delta_bytes,))
        )
    return Manifest(run_id="", version=version, tensors=(TENSOR,), weights_digest=WEIGHTS, encodings=tuple(encodings))


CHAIN = {
    name(0): manifest(0, full=True),
    name(1): manifest(1, full=False, delta_bytes=100),
    name(2): manifest(2, full=False, delta_bytes=100),
    name(3): manifest(3, full=True, delta_bytes=100),
    name(4): manifest(4, full=False, delta_bytes=900),
}


def plan(wanted: int, held: set[int], manifests: dict[str, Manifest] = CHAIN) -> tuple[int, bool, list[int], int]:
    def load(digest: str) -> Manifest:
        if digest not in manifests:
            raise UnavailableError("pruned")
        return manifests[digest]

    found = cheapest_plan(name(wanted), load, load, lambda digest: int(digest, 16) in held)
    return int(found.start, 16), found.fetch_full, [int(step, 16) for step in found.steps], found.size_bytes


def test_follower_takes_one_delta() -> None:
    assert plan(3, {2}) == (2, False, [3], 100)


def test_joiner_takes_the_keyframe_and_the_chain() -> None:
    assert plan(2, set()) == (0, True, [1, 2], 1200)


def test_joiner_at_a_keyframe_takes_it_whole() -> None:
    assert plan(3, set()) == (3, True, [], 1000)


def test_one_who_slept_takes_the_chain_while_it_is_cheaper() -> None:
    assert plan(3, {0}) == (0, False, [1, 2, 3], 300)
    assert plan(4, {0}) == (0, False, [1, 2, 3, 4], 1200)


def test_held_version_costs_nothing() -> None:
    assert plan(2, {2}) == (2, False, [], 0)


def test_pruned_base_is_no_obstacle_when_there_is_a_full_encoding() -> None:
    assert plan(3, set(), {name(3): CHAIN[name(3)]}) == (3, True, [], 1000)
    with pytest.raises(UnavailableError):
        plan(2, set(), {name(2): CHAIN[name(2)]})


def test_delta_whose_base_has_other_weights_is_refused() -> None:
    wrong = CHAIN | {name(1): manifest(1, full=False, delta_bytes=100, base_weights="0" * 64)}
    with pytest.raises(IntegrityError, match="does not belong"):
        plan(1, set(), wrong)
