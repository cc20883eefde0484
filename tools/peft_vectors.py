"""Writes what PEFT computes for a tiny model into tests/policy/lora/vectors: run it where `peft` is installed.

A base, an adapter by PEFT's own `save_pretrained`, one batch, the logits and the gradients of every factor of a fixed loss, and
greedy continuations. Tests compare trainer and engine with it.

    python -m tools.peft_vectors
"""

import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

OUTPUT = Path(__file__).parents[1] / "tests" / "policy" / "lora" / "vectors"
VOCABULARY, RANK, ALPHA = 64, 4, 10.0
PROMPT_TOKENS, NEW_TOKENS = 6, 12


def main() -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=None,
        )
    )
    shutil.rmtree(OUTPUT, ignore_errors=True)
    base.save_pretrained(OUTPUT / "base")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.peft_config["default"].base_model_name_or_path = "../base"
    model.save_pretrained(OUTPUT / "adapter")
    (OUTPUT / "adapter" / "README.md").unlink()
    ids = torch.randint(VOCABULARY, (4, PROMPT_TOKENS + NEW_TOKENS))
    logits = model(input_ids=ids).logits
    loss = -torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None]).sum()
    torch.autograd.backward(loss)
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    with torch.no_grad():
        greedy = model.generate(
            input_ids=ids[:, :PROMPT_TOKENS], max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
    save_file({"ids": ids, "logits": logits.detach(), "greedy": greedy}, OUTPUT / "batch.safetensors")
    save_file(gradients, OUTPUT / "gradients.safetensors")


if __name__ == "__main__":
    main()
