"""Weights of a policy at rest and on the wire: every tensor once, checked before it is copied.

Weights exist once: `load_weights` checks every name, shape and kind of number first and then copies into the live tensors, so a
refused file changes nothing. On the wire a policy is bf16, each tensor once, tied ones under the name that comes first. Integers
and truth values keep their own type, bit for bit, and come last, so that all others lie on their own boundaries. The frozen base of
an adapter travels as it is stored.
"""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.broadcast import WireTensor
from shoal.broadcast.manifest import SAFETENSORS_DTYPES, digest_weights
from shoal.broadcast.wire import tensor_entry
from shoal.errors import first_line
from shoal.policy.architecture import meta_model
from shoal.policy.directory import ArchitectureError, ModelError, read_config, some_names, weight_files
from shoal.policy.lora.files import trained_factors

EXACT_DTYPES = {
    torch.int64: "int64",
    torch.uint64: "uint64",
    torch.int32: "int32",
    torch.uint32: "uint32",
    torch.int16: "int16",
    torch.uint16: "uint16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
"""Types that are not rounded."""
EXACT_STORED = {SAFETENSORS_DTYPES[name] for name in EXACT_DTYPES.values()}


class WireCopy:
    """One copy of a policy in host memory, each tensor once, in the order of the module; every `take` overwrites it.

    Weights are bf16; of a model that trains an adapter its factors are taken alone, in float32. Memory is allocated once. On a GPU
    it is page-locked, so that all copies are queued and waited for together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._dtype = torch.float32 if trained_factors(model) else torch.bfloat16
        self._memory: Tensor | None = None

    @torch.no_grad()
    def take(self, *, here: bool = True) -> list[WireTensor]:
        """The tensors as they are now. Sharded ones are gathered one at a time: every rank calls this, one with `here`."""
        tensors = published_tensors(self._model)
        numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        free = self._allocated_for(numbers) if here else None
        taken, wire_dtype = [], str(self._dtype).removeprefix("torch.")
        for name, tensor in numbers.items():
            whole = _gathered(tensor.detach(), self._dtype)
            if free is not None:
                copy, free = free[: whole.numel()], free[whole.numel() :]
                copy.view(whole.shape).copy_(whole, non_blocking=True)
                data = copy.view(torch.uint8).numpy().data
                taken.append(WireTensor(name=name, dtype=wire_dtype, shape=tuple(tensor.shape), data=data))
        exact = [_exact_copy(name, tensor) for name, tensor in tensors.items() if name not in numbers]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken + exact if here else []

    def _allocated_for(self, tensors: dict[str, Tensor]) -> Tensor:
        if self._memory is None:
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            count = sum(tensor.numel() for tensor in tensors.values())
            self._memory = torch.empty(count, dtype=self._dtype, pin_memory=on_gpu)
        return self._memory


def _gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    rounded = tensor.to(dtype)  # to bf16 halves what travels between ranks
    assert isinstance(rounded, DTensor)
    return rounded.full_tensor()


def _exact_copy(name: str, tensor: Tensor) -> WireTensor:
    if tensor.dtype not in EXACT_DTYPES:
        raise ModelError(
            f"{name} has dtype {tensor.dtype}, which cannot be published.",
            hint=f"Besides floating point these can: {', '.join(EXACT_DTYPES.values())}.",
        )
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    copy = whole.to("cpu", copy=True).contiguous().view(-1)
    data = copy.view(torch.uint8).numpy().data
    return WireTensor(name=name, dtype=EXACT_DTYPES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def load_weights(model: nn.Module, directory: Path) -> None:
    """Copy the safetensors of `directory` into the live tensors; all names and shapes are checked before the first copy."""
    files = weight_files(directory)
    live = model.state_dict(keep_vars=True)
    wanted = unique_tensors(model)
    try:
        _check_headers(files, live, set(wanted), directory)
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt", device="cpu") as reader:
                    for name in reader.keys():  # noqa: SIM118 - not a mapping
                        if name in wanted:
                            wanted[name].copy_(reader.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The weights in {directory} cannot be read: {first_line(error)}.") from error


def stored_tensors(directory: Path) -> list[WireTensor]:
    """The tensors of a model's files as they are stored, each once, widest numbers first: what a frozen base is on the wire.

    They lie in the mapped files, not in memory.
    """
    wanted, found = set(unique_tensors(meta_model(read_config(directory)))), dict[str, Tensor]()
    for file in weight_files(directory):
        with safe_open(file, framework="pt", device="cpu") as reader:
            found.update({name: reader.get_tensor(name) for name in reader.keys() if name in wanted})  # noqa: SIM118
    if missing := sorted(wanted - found.keys()):
        raise ArchitectureError(
            f"The weights in {directory} lack {some_names(missing)} under the names that the model uses.",
            hint="Load and save the model with Transformers (`save_pretrained`), which writes them.",
        )
    order = sorted(found.items(), key=lambda item: (-item[1].element_size(), item[0]))
    return [as_wire(name, tensor) for name, tensor in order]


def as_wire(name: str, tensor: Tensor) -> WireTensor:
    """A tensor in host memory, with every bit."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return WireTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), data=data)


def base_digest(directory: Path) -> str:
    """What an adapter's base is known by: one digest over names, types, shapes and contents of its tensors."""
    return digest_weights(map(tensor_entry, stored_tensors(directory)))


def stored_dtype(directory: Path) -> str:
    """In which most numbers of a model are stored, such as `bfloat16`."""
    sizes: dict[str, int] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                entry = reader.get_slice(name)
                sizes[entry.get_dtype()] = sizes.get(entry.get_dtype(), 0) + math.prod(entry.get_shape())
    stored = max(sizes, key=lambda dtype: sizes[dtype])
    return next((name for name, known in SAFETENSORS_DTYPES.items() if known == stored), stored)


def check_fit(model_files: Path, directory: Path) -> None:
    """Refuse weights in `directory` that are not exactly those of the model that `model_files` describes."""
    model = meta_model(read_config(model_files))
    try:
        _check_headers(weight_files(directory), model.state_dict(keep_vars=True), set(unique_tensors(model)), directory)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The weights in {directory} cannot be read: {first_line(error)}.") from error


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a version of this model is made of: the factors of the adapter that it trains, or everything."""
    return trained_factors(model) or unique_tensors(model)


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of tied ones the first name only."""
    tensors = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first_names[id(tensor)] == name}


def tensor_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in unique_tensors(model).values())


def _check_headers(files: list[Path], live: dict[str, Tensor], wanted: set[str], directory: Path) -> None:
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                entry = reader.get_slice(name)
                _check_shape(name, tuple(entry.get_shape()), live, directory)
                _check_kind(name, entry.get_dtype(), live[name].dtype, directory)
                found.add(name)
    if missing := sorted(wanted - found):
        raise ArchitectureError(f"The weights in {directory} lack {some_names(missing)}.")


def _check_shape(name: str, shape: tuple[int, ...], live: dict[str, Tensor], directory: Path) -> None:
    if name not in live:
        raise ArchitectureError(f"The weights in {directory} have {name}, which this model does not have.")
    if shape != tuple(live[name].shape):
        raise ArchitectureError(f"{name} in {directory} has shape {shape}; the model needs {tuple(live[name].shape)}.")


def _check_kind(name: str, stored: str, live: torch.dtype, directory: Path) -> None:
    """Numbers may be rounded to another floating-point type; what is not floating point must be stored as it is used."""
    wanted = SAFETENSORS_DTYPES[EXACT_DTYPES[live]] if live in EXACT_DTYPES else ""
    if wanted != (stored if stored in EXACT_STORED else ""):
        raise ArchitectureError(f"{name} in {directory} is stored as {stored}; the model needs {wanted or live}.")
