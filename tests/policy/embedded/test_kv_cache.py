import torch

from shoal.policy.embedded.kv_cache import KeyValueCache, PlaneShape, bytes_per_position

KEYS, VALUES = PlaneShape(2, 4), PlaneShape(2, 3)


def make_cache(rows: int = 4, capacity: int = 8) -> KeyValueCache:
    planes = [KEYS, VALUES, KEYS, VALUES]
    return KeyValueCache(planes, rows, capacity, dtype=torch.float32, device=torch.device("cpu"))


def test_planes_of_one_shape_share_a_tensor_but_not_their_values() -> None:
    cache = make_cache()
    cache.planes[0].fill_(1)
    assert cache.planes[2].sum() == 0
    assert [tuple(plane.shape) for plane in cache.planes] == [(4, 2, 8, 4), (4, 2, 8, 3)] * 2


def test_rows_get_copies_of_the_prompts_they_name() -> None:
    cache = make_cache()
    prompts = torch.randn(2, 2, 3, 4)
    cache.write_prompts(2, 1, torch.tensor([1, 0, 1]), prompts)
    assert torch.equal(cache.planes[2][1:, :, :3], prompts[[1, 0, 1]])
    assert cache.planes[2][0].abs().sum() == 0
    assert cache.planes[2][:, :, 3:].abs().sum() == 0


def test_a_copy_takes_all_layers_along() -> None:
    cache = make_cache()
    for plane in cache.planes:
        plane.normal_()
    kept = [plane[3, :, :5].clone() for plane in cache.planes]
    cache.copy(torch.tensor([1]), torch.tensor([3]), 5)
    assert all(torch.equal(plane[1, :, :5], row) for plane, row in zip(cache.planes, kept, strict=True))


def test_size_of_a_position_counts_keys_and_values_of_all_layers() -> None:
    assert bytes_per_position([KEYS, VALUES, KEYS, VALUES], torch.bfloat16) == 2 * (8 + 6) * 2
