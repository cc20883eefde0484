"""What role processes of one host share, and what not."""

from pathlib import Path

from shoal.roles.process import own_directory


def test_several_validators_of_one_host_each_have_a_directory_of_their_own(tmp_path: Path) -> None:
    with own_directory(tmp_path, "validator") as first, own_directory(tmp_path, "validator") as second:
        assert (first.name, second.name) == ("validator", "validator-2")
    with own_directory(tmp_path, "validator") as again:
        assert again == first
