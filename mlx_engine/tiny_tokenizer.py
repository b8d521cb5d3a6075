"""The byte-level tokenizer of the tiny checkpoint: one token a byte, and every special token.

Owns its `tokenizer.json` and `tokenizer_config.json`: the spellings and flags of the released
files, other ids. Without merges any bytes are text, so nothing had to be trained.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_engine.tokenizer import SPELLINGS

BOS, EOS, PAD = SPELLINGS["bos"], SPELLINGS["eos"], "<｜▁pad▁｜>"
THINK_END, IMAGE = SPELLINGS["think_end"], SPELLINGS["image"]
PLACEHOLDER = "<｜place▁holder▁no▁{}｜>"

_ROLES = [SPELLINGS[name] for name in ("user", "assistant", "think_start", "think_end", "dsml")]
_TASKS = ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
NAMED_TOKENS = (*_ROLES, *(f"<｜{task}｜>" for task in _TASKS), SPELLINGS["system"], IMAGE)

# One placeholder at least: the draft stages need a token that stands for nothing.
MIN_VOCAB_SIZE = 3 + 256 + len(NAMED_TOKENS) + 1


def build_tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Build the tokenizer with exactly `vocab_size` ids, at least MIN_VOCAB_SIZE.

    In order: BOS, EOS and pad as 0, 1 and 2, the bytes in the released order, NAMED_TOKENS, and
    placeholders to the end.
    """
    assert vocab_size >= MIN_VOCAB_SIZE
    # By code point: the printable bytes of Latin-1, which stand for themselves, then the others.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([BOS, EOS, PAD, *alphabet])}
    placeholders = range(vocab_size - len(vocab) - len(NAMED_TOKENS))

    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in (BOS, EOS, PAD)])
    # Not special, as in the release: they stay visible where special tokens are skipped.
    tokenizer.add_tokens([AddedToken(t, normalized=t != IMAGE) for t in NAMED_TOKENS])
    tokenizer.add_special_tokens(
        [AddedToken(PLACEHOLDER.format(i), normalized=False) for i in placeholders]
    )
    return tokenizer


def tokenizer_config(model_max_length: int) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`; the prompt's writer adds BOS, nobody else."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
