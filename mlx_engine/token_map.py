"""The canonical token map: which token ids Engram treats as the same word.

It folds case, accents and whitespace, so that the n-gram hashes see one id for all spellings of
a token. Owns the rule (section 4.1) and the map's cache file; hashing is engram's part. A map
that is wrong in one place silently rehashes everything, so its size is checked on every load.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlx_engine.cache_file import read_sealed, write_sealed
from mlx_engine.errors import CacheCorrupt, ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Part of the cache file's digest: raise it when the rule changes.
_CACHE_VERSION = b"ds41 token map 1"

# Stands for a text that is a lone space while the ends of the others are stripped.
_LONE_SPACE = "\ue000"


def build_token_map(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Give each token id the number of its normalised text, in order of first appearance.

    Returns int32 [number of token ids]; the values are 0 .. map.max() without a gap.
    The rule is section 4.1's; the normalisation is the tokenizers library's own, because
    Python's `str.lower` and `str.strip` differ from it.
    """
    from tokenizers import Regex, normalizers

    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    n_ids = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[i] for i in range(n_ids)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    token_map = np.empty(n_ids, np.int32)
    for token_id, text in enumerate(texts):
        if "\ufffd" in text:
            # A fragment of a UTF-8 sequence: only its raw form tells it from other fragments.
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalizer.normalize_str(text) or text
        token_map[token_id] = numbers.setdefault(key, len(numbers))
    return token_map


def load_token_map(
    tokenizer_path: Path, cache_dir: Path | None, expected_size: int
) -> NDArray[np.int32]:
    """Return the token map of a `tokenizer.json`, from the cache folder where it has one.

    The cache file is named after the tokenizer's sha256; a damaged one is built anew, and a
    folder that cannot be written only costs the second that building takes. `expected_size` is
    the configuration's `engram_compressed_vocab_size`. Raises ModelFileError when the tokenizer
    cannot be read or its map has another size.
    """
    try:
        source = tokenizer_path.read_bytes()
    except OSError as error:
        raise ModelFileError(
            f"cannot read {tokenizer_path} ({error.strerror}): fetch the checkpoint's tokenizer"
        ) from error
    source_digest = hashlib.sha256(source).digest()
    cache_path = cache_dir / f"token_map-{source_digest.hex()}.bin" if cache_dir else None

    token_map = _read_cache(cache_path, source_digest) if cache_path else None
    if token_map is None:
        token_map = build_token_map(_parse(source, tokenizer_path))
        if cache_path:
            _write_cache(cache_path, source_digest, token_map)

    size = int(token_map.max(initial=-1)) + 1
    if size != expected_size:
        raise ModelFileError(
            f"{tokenizer_path} folds to {size} canonical token ids, but the configuration's "
            f"engram_compressed_vocab_size is {expected_size}: fetch tokenizer.json and "
            "config.json again, both from the same checkpoint"
        )
    return token_map


def _parse(source: bytes, path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(source)
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(
            f"{path} is no tokenizer ({error}): fetch the checkpoint's tokenizer again"
        ) from error


def _read_cache(path: Path, source_digest: bytes) -> NDArray[np.int32] | None:
    """Return the cached map, or None where there is none that passes its digest."""
    try:
        payload = read_sealed(path, _CACHE_VERSION + source_digest)
    except OSError:
        return None
    except CacheCorrupt:
        log.warning("the token map in %s is damaged, it is built anew", path)
        return None
    return np.frombuffer(payload, "<i4").astype(np.int32)


def _write_cache(path: Path, source_digest: bytes, token_map: NDArray[np.int32]) -> None:
    """Put the map (little-endian int32) in place whole, or warn and leave nothing."""
    try:
        payload = token_map.astype("<i4").tobytes()
        write_sealed(path, _CACHE_VERSION + source_digest, payload)
    except OSError as error:
        log.warning("the token map is not cached, %s: %s", path, error.strerror)
