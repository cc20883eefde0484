"""A frame policy as a model directory, like any other: config, safetensors, tokenizer, template.

The tokenizer cuts keys as the table of actions does, the longest entry first. The end token is the key that saves.
"""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.logging import disable_progress_bar

from shoal.files import TOKENIZER_FILE, write_atomic
from shoal.frames.actions import ActionTable
from shoal.frames.policy import FramePolicy
from shoal.frames.screens import GO, GOAL
from shoal.tasks.codec import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from shoal.tasks.editor import ARROWS, SAVE

LONGEST_PIECE = 1 << 16


def build_tokenizer(table: ActionTable) -> Tokenizer:
    vocabulary = {entry: number for number, entry in enumerate(table.entries)}
    model = models.WordPiece(
        vocabulary, unk_token=table.entries[0], continuing_subword_prefix="", max_input_chars_per_word=LONGEST_PIECE
    )
    tokenizer = Tokenizer(model)
    # No entry crosses the border of such a piece, and long texts are not searched as one word.
    pieces = "|".join(["[A-Za-z_0-9]+", *(f"{re.escape(key)}+" for key in (*ARROWS, " ")), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in (GOAL, GO)])
    return tokenizer


def write_policy(policy: FramePolicy, table: ActionTable, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    policy.save_pretrained(directory)
    build_tokenizer(table).save(str(directory / TOKENIZER_FILE))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SAVE}
    write_atomic(directory / TOKENIZER_CONFIG_FILE, json.dumps(settings).encode())
    write_atomic(directory / TEMPLATE_FILE, f"{{{{ messages[-1].content }}}}{GO}".encode())
    return directory
