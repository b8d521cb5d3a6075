"""What can go wrong, by what the caller can do about it.

    EngineError
    ├── BadRequest        the request itself is wrong: change it
    │   └── ContextTooLong    the prompt does not fit the context: shorten it
    ├── ModelFileError    the checkpoint on disk is wrong or incomplete: fetch it again
    ├── CacheCorrupt      a cache entry is damaged: it is dropped and computed again
    ├── CacheUnusable     the cache's folder cannot be used: go on without, or name another
    ├── DeviceError       this machine cannot do it: free memory, or use another
    └── Cancelled         the caller asked to stop

A message says what is wrong, where, what the limit is, and what to do, in one sentence.
"""


class EngineError(Exception):
    """Base of every error that this package raises on purpose."""


class BadRequest(EngineError):
    """The request cannot be served as it stands."""


class ContextTooLong(BadRequest):
    """The prompt, or the prompt and the answer, pass the context length."""


class ModelFileError(EngineError):
    """A file of the checkpoint is missing, damaged or of another model."""


class CacheCorrupt(EngineError):
    """A cache entry failed its check."""


class CacheUnusable(EngineError):
    """The cache's folder cannot be used as it is."""


class DeviceError(EngineError):
    """The machine lacks the memory or the device that the work needs."""


class Cancelled(EngineError):
    """The work was stopped on request."""
