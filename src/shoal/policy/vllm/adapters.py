"""Adapters in vLLM by its own LoRA: one name per content, loaded before the old one is dropped.

vLLM keys its prefix cache by the adapter's name, so that two versions never share an entry. Adapters are read from PEFT
directories only; a published version becomes one by a link and a config.
"""

import tempfile
from pathlib import Path
from typing import Any

from shoal.config import LoraConfig
from shoal.files import digest_bytes, digest_file
from shoal.policy.architecture import meta_model
from shoal.policy.directory import read_config, weight_files
from shoal.policy.lora.files import WEIGHTS_NAME, factor_shapes, read_factors, write_adapter_config
from shoal.policy.lora.targets import LoraError, target_names

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM reserves memory; a smaller rank takes the next one."""


class VllmAdapters:
    def __init__(self, model_files: Path, lora: LoraConfig) -> None:
        if lora.rank > RANKS[-1]:
            raise LoraError(f"vLLM has no adapters of rank {lora.rank}.", hint=f"Its largest rank is {RANKS[-1]}.")
        skeleton = meta_model(read_config(model_files))
        names = target_names(skeleton, lora)
        self._shapes = factor_shapes(skeleton, names, lora.rank)
        # vLLM reads "all-linear" from no config file.
        ends = tuple(sorted({name.rpartition(".")[2] for name in names}))
        self._lora = lora if lora.target_modules else lora.model_copy(update={"target_modules": ends})
        self._base = str(model_files)
        self._number = 0
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self.current: Any = None
        """vLLM's request for the adapter in use; it goes with every request for tokens."""

    @property
    def options(self) -> dict[str, Any]:
        """For the start of vLLM: the old adapter and the new one fit beside each other."""
        rank = next(rank for rank in RANKS if rank >= self._lora.rank)
        return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2}

    def use(self, llm: Any, directory: Path) -> None:
        """The adapter of a directory; on refusal the one in use stays."""
        from vllm.lora.request import LoRARequest

        read_factors(directory, self._shapes)
        files = weight_files(directory)
        name = digest_bytes("".join(map(digest_file, files)).encode())
        if self.current is not None and self.current.lora_name == name:
            return
        # It stays as long as the adapter is in use: vLLM may read it again.
        place = tempfile.TemporaryDirectory(prefix="shoal-adapter-")
        (Path(place.name) / WEIGHTS_NAME).symlink_to(files[0].resolve())
        write_adapter_config(Path(place.name), self._lora, base=self._base)
        request = LoRARequest(lora_name=name, lora_int_id=self._number + 1, lora_path=place.name)
        if not llm.llm_engine.add_lora(request):
            raise LoraError(f"vLLM did not take the adapter in {directory}.")
        self._number += 1
        old, self.current, self._place = self.current, request, place
        if old is not None:
            llm.llm_engine.remove_lora(old.lora_int_id)
