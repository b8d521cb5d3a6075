"""Text to token ids and back, over the checkpoint's `tokenizer.json`.

Owns the rule that plain text never becomes a special token: the library's tokenizer is loaded
without its added vocabulary, which is kept apart as spelling -> id. Turning ids into text goes
over bytes, since one character may be spread over several tokens. The spellings of special tokens
are here for all modules; prompts are prompt's part.
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from mlx_engine.config import ModelConfig
from mlx_engine.errors import BadRequest, ModelFileError
from mlx_engine.json_file import read_file


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the special tokens that the engine itself acts on.

    `image` is None where the tokenizer has no such token: text never needs it.
    """

    bos: int
    eos: int
    system: int
    user: int
    assistant: int
    think_start: int
    think_end: int
    dsml: int
    image: int | None


SPELLINGS: Mapping[str, str] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "system": "<｜System｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "think_start": "<think>",
    "think_end": "</think>",
    "dsml": "｜DSML｜",
    # UNVERIFIED: how the released tokenizer.json spells it.
    "image": "<｜deepseek_image｜>",
}

# Encoded in some hundredths of a second.
_PART_CHARACTERS = 1 << 14
_LINE_END = re.compile(r"\n(?=[A-Za-z])")


class Tokenizer:
    """Byte-level BPE without special tokens, and the special tokens beside it."""

    def __init__(self, plain: tokenizers.Tokenizer, added_ids: Mapping[str, int]) -> None:
        """Take a tokenizer without added vocabulary, and that vocabulary as spelling -> id.

        Raises ModelFileError when tokens of `SPELLINGS` are not among it, the image token aside.
        """
        special: dict[str, Any] = {name: added_ids.get(s) for name, s in SPELLINGS.items()}
        missing = [SPELLINGS[n] for n, i in special.items() if i is None and n != "image"]
        if missing:
            raise ModelFileError(
                f"the tokenizer lacks the special tokens {' '.join(missing)}: "
                "use the tokenizer.json of DeepSeek-V4.1-Flash"
            )
        self.special = SpecialIds(**special)
        self._plain = plain
        self._added_ids = dict(added_ids)
        self._spelling_of_added = {i: spelling.encode() for spelling, i in added_ids.items()}
        # The DSML marker is ordinary text wherever it opens no tool call.
        self._bytes_of_added = dict.fromkeys(added_ids.values(), b"")
        self._bytes_of_added[self.special.dsml] = SPELLINGS["dsml"].encode()

    @classmethod
    def load(cls, directory: Path, config: ModelConfig) -> Self:
        """Read the `tokenizer.json` of a checkpoint with this configuration.

        Raises ModelFileError when it cannot be read, lacks a special token, or is not the
        tokenizer of this configuration.
        """
        path = directory / "tokenizer.json"
        try:
            source = read_file(path)
        except FileNotFoundError:
            raise ModelFileError(f"{path} is missing: fetch the checkpoint's tokenizer") from None
        try:
            tokenizer = cls.from_json(source)
            tokenizer.require_ids_of(config)
        except ModelFileError as error:
            raise ModelFileError(f"{path}: {error}") from error
        return tokenizer

    @classmethod
    def from_json(cls, source: str | bytes) -> Self:
        """Read the content of a `tokenizer.json`; raises as `load` does for this file alone."""
        try:
            content: dict[str, Any] = json.loads(source)
            added_ids = {token["content"]: token["id"] for token in content["added_tokens"]}
            plain = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        except Exception as error:  # the library raises nothing narrower
            raise ModelFileError(
                "this is no tokenizer: fetch the checkpoint's tokenizer.json again"
            ) from error
        return cls(plain, added_ids)

    @property
    def n_ids(self) -> int:
        """How many token ids there are, those of added tokens included."""
        beside = {i for i in self._added_ids.values() if self._plain.id_to_token(i) is None}
        return self._plain.get_vocab_size() + len(beside)

    def require_ids_of(self, config: ModelConfig) -> None:
        """Raise ModelFileError where the configuration means other tokens, or has more of them.

        An id that the model can say and the tokenizer does not know has neither text nor a
        canonical id for Engram.
        """
        remedy = "fetch tokenizer.json and config.json again, both from the same checkpoint"
        for name in ("bos", "eos", "image"):
            ours, configured = getattr(self.special, name), getattr(config, f"{name}_token_id")
            if ours is not None and ours != configured:
                raise ModelFileError(
                    f"{SPELLINGS[name]} has the id {ours}, but the configuration's "
                    f"{name}_token_id is {configured}: {remedy}"
                )
        if self.n_ids < config.vocab_size:
            raise ModelFileError(
                f"the tokenizer has {self.n_ids} ids, but the configuration's vocab_size is "
                f"{config.vocab_size}: {remedy}"
            )

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes of text that one token stands for."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.n_ids))

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text; the spelling of a special token in it stays plain text.

        Raises BadRequest for text that is not Unicode (a lone surrogate).
        """
        check_unicode(text)
        if len(text) <= _PART_CHARACTERS:
            return self._plain.encode(text, add_special_tokens=False).ids
        # Other threads go on meanwhile, as they do not with `encode`, which is quicker to call.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def special_id(self, spelling: str) -> int:
        """The id of an added token; raises ModelFileError where the tokenizer has none."""
        try:
            return self._added_ids[spelling]
        except KeyError:
            raise ModelFileError(
                f"the tokenizer lacks the special token {spelling}: "
                "use the tokenizer.json of DeepSeek-V4.1-Flash"
            ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that a token stands for: none for special and for unknown ids."""
        added = self._bytes_of_added.get(token_id)
        if added is not None:
            return added
        token = self._plain.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # not in the byte alphabet, so it stands for itself
            return token.encode()

    def spelling(self, token_id: int) -> bytes:
        """What a token looks like: its bytes of text, or how a special token is spelled."""
        return self.token_bytes(token_id) or self._spelling_of_added.get(token_id, b"")


def parts(text: str) -> Iterator[str]:
    """Cut a long text where its tokens do not depend on what stands on the other side.

    After a line's end and before a letter: no rule of the released tokenizer's `pre_tokenizer`
    takes a line's end together with a letter that follows, and none looks that far ahead.
    """
    start = 0
    while cut := _LINE_END.search(text, start + _PART_CHARACTERS):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


class TextDecoder:
    """Turns token ids into text as they arrive, and never gives out half a character.

    The texts put together are what decoding all bytes at once gives: bytes that may still become
    a character are held back, and those that no longer can are U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return what was held back, as U+FFFD, and begin anew."""
        return self._utf8.decode(b"", final=True)


def check_unicode(text: str) -> None:
    """Raise BadRequest for text that has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text is not valid Unicode at character {error.start}: "
            "send it as UTF-8, without lone surrogates"
        ) from None


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in a byte-level vocabulary, as GPT-2 introduced it.

    Printable bytes stand for themselves, the others for U+0100 and up in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
