"""Small files of the cache folder: put in place whole, and right or not used.

A file is a digest of a seal and the payload, then the payload; the seal is what the payload was
made from and by which rule. What is in them, and going on without, is for those who keep them.
"""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from mlx_engine.errors import CacheCorrupt

_DIGEST_BYTES = 32


def read_sealed(path: Path, seal: bytes) -> bytes:
    """The payload. Raises OSError for no file, CacheCorrupt for damage or another seal."""
    data = path.read_bytes()
    payload = data[_DIGEST_BYTES:]
    if data[:_DIGEST_BYTES] != _digest(seal, payload):
        raise CacheCorrupt(f"{path} is damaged or was made from something else: delete it")
    return payload


def write_sealed(path: Path, seal: bytes, payload: bytes) -> None:
    """Put seal and payload in place; raises OSError and leaves nothing where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_digest(seal, payload) + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _digest(seal: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(seal + payload).digest()
