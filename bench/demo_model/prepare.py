"""Makes what training needs and the training machine cannot: tokenizer, configuration, texts.

    python -m bench.demo_model.prepare FOLDER

The tokenizer is byte-level BPE over the demo model's own conversations, with the special tokens of
the release; the format's fixed texts are read off the vendor's package.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.demo_model import chat as chats
from bench.demo_model.sizes import VOCAB_SIZE, demo_config
from bench.demo_model.tasks import chat_of
from mlx_engine.tiny_tokenizer import (
    BOS,
    EOS,
    IMAGE,
    NAMED_TOKENS,
    PAD,
    PLACEHOLDER,
    tokenizer_config,
)
from mlx_engine.token_map import build_token_map

_SAMPLES = 6000
_SAMPLE_TOKENS = 1024

# Small words are cut with the spaces around them; every other word is cut by itself, so that it
# has the same tokens after a space, a quote, a slash or an underscore, in a name or in a sentence.
_SMALL = (
    "the of is a an and to in was it you i my for what with on at that are be not as by or if do "
    "does can this your me tell there has have had one when so but from will"
).split()
_ANY_SMALL = f"(?:{'|'.join(_SMALL)})(?![A-Za-z0-9_])"
_PIECES = "|".join(
    (
        f" {_ANY_SMALL}(?: (?=[A-Za-z0-9])(?!{_ANY_SMALL}))?",
        "[A-Z]?[a-z]+",
        "[A-Z]+(?![a-z])",
        # Digits stay single, so that numbers are read and written alike wherever they stand.
        "[0-9]",
        # What stands around the values of calls and of JSON.
        ' (?:invoke|parameter) name="|" string="(?:true|false)">',
        r""""?[}\]]*[:,] [\[{]*"|[\[{]+"|"[}\]]+\n?|"[:,>] ?|</""",
        # A quote or a bracket ends a piece: what it encloses begins a new one.
        r"""[^A-Za-z0-9\s"'`(\[{<>]*(?:["'`(\[{>]|<(?!/))""",
        r"[^A-Za-z0-9\s<]+[ \n]?",
        r"\s+",
    )
)


def build_tokenizer(texts: chats.FormatTexts) -> Tokenizer:
    """Train the tokenizer: BOS, EOS and pad as 0, 1 and 2, bytes and merges, special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(NAMED_TOKENS) - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(texts), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in (BOS, EOS, PAD)])
    tokenizer.add_tokens([AddedToken(t, normalized=t != IMAGE) for t in NAMED_TOKENS])
    tokenizer.add_special_tokens([AddedToken(PLACEHOLDER.format(0), normalized=False)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def _plain_texts(texts: chats.FormatTexts) -> Iterator[str]:
    """What stands between the special tokens of many conversations; the fixed texts in some."""
    seen = chats.FormatTexts("", "", "")
    for seed in range(_SAMPLES):
        sample = chat_of(Random(-1 - seed), _SAMPLE_TOKENS)
        for text, _ in chats.spans(sample, texts if seed % 20 == 0 else seen):
            yield from chats.SPECIAL.split(text)


def prepare(folder: Path) -> None:
    """Write the tokenizer with its configuration and token map, config.json and texts.json."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = chats.format_texts()
    tokenizer = build_tokenizer(texts)
    token_map = write_map_and_texts(folder, tokenizer, texts)
    image = tokenizer.token_to_id(IMAGE)
    assert image is not None
    config = demo_config(int(token_map.max()) + 1, image)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    limit: int = config["text_config"]["max_position_embeddings"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(limit), indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_map_and_texts(
    folder: Path, tokenizer: Tokenizer, texts: chats.FormatTexts
) -> NDArray[np.int32]:
    """Write what a checkpoint does not hold: the tokenizer's map, which is returned, and the
    format's fixed texts.
    """
    token_map = build_token_map(tokenizer)
    np.save(folder / "token_map.npy", token_map)
    (folder / "texts.json").write_text(json.dumps(asdict(texts), indent=1) + "\n")
    return token_map


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared", type=Path)
    prepare(parser.parse_args().prepared)
