"""Content blocks of Anthropic's messages, made into those that the vendor's converter takes.

Owns what becomes of a block that this server cannot show the model: a line of text in its place,
and a note in the log. Nothing is left out in silence.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from mlx_engine.errors import BadRequest
from mlx_engine.server.body import IMAGE_NOTE, check_fields, note
from mlx_engine.server.fields import Object, Types, as_object, as_string, quoted

# Of all kinds. Callers, and what is to be cached, are the matter of the vendor's own servers.
BLOCK_FIELDS: Types = {
    "cache_control": dict,
    "caller": object,
    "content": object,
    "data": str,
    "id": str,
    "input": object,
    "is_error": bool,
    "name": str,
    "signature": str,
    "source": object,
    "text": str,
    "thinking": str,
    "title": str,
    "tool_name": str,
    "tool_use_id": str,
    "type": str,
}


class ImageInNewestMessage(BadRequest):
    """The message to be answered shows something that the model cannot see."""


def user_blocks(blocks: Sequence[Object], where: str, *, is_newest: bool) -> list[Object]:
    """Blocks of text and tool results, results first.

    An image becomes a line of text, but for one that the newest message itself carries: raises
    ImageInNewestMessage there, BadRequest for a damaged block.
    """
    results: list[Object] = []
    texts: list[Object] = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            results.append(_tool_result(block, f"{where}.{i}"))
            continue
        if is_newest and _is_image(block):
            raise ImageInNewestMessage(where)
        texts += ({"type": "text", "text": text} for text in _texts(block, f"{where}.{i}"))
    if not results and not texts:
        texts = [{"type": "text", "text": ""}]
    return results + texts


def assistant_blocks(blocks: Sequence[Object], where: str) -> list[Object]:
    """Blocks of reasoning, text and calls; empty where nothing is left."""
    kept: list[Object] = []
    for i, block in enumerate(blocks):
        check_fields("/v1/messages block", block, BLOCK_FIELDS, f"{where}.{i}")
        match block["type"]:
            case "thinking":
                text = _string(block, "thinking", f"{where}.{i}")
                kept.append({"type": "thinking", "thinking": text, "signature": ""})
            case "text":
                text = _string(block, "text", f"{where}.{i}")
                if text:
                    kept.append({"type": "text", "text": text})
            case "tool_use":
                given = block.get("input")
                kept.append(
                    {
                        "type": "tool_use",
                        "id": _string(block, "id", f"{where}.{i}"),
                        "name": _string(block, "name", f"{where}.{i}"),
                        "input": {} if given is None else as_object(given, f"{where}.{i}.input"),
                    }
                )
            case kind:
                note(f"/v1/messages: a block {quoted(kind)} of an earlier answer is left out")
    return kept


def _tool_result(block: Object, where: str) -> Object:
    check_fields("/v1/messages block", block, BLOCK_FIELDS, where)
    content = block.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        inner = cast(list[Any], content)
        content = "\n\n".join(
            text for i, each in enumerate(inner) for text in _texts(each, f"{where}.content.{i}")
        )
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content: a result is a string or a list of blocks")
    tool_use_id = _string(block, "tool_use_id", where)
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": content}


def _is_image(block: Object) -> bool:
    source: Any = block.get("source")
    kind: Any = cast(Object, source).get("type") if isinstance(source, dict) else None
    return block["type"] == "image" or (
        block["type"] == "document" and kind not in ("text", "content")
    )


def _texts(block: Any, where: str) -> Iterator[str]:
    """What of a block is text; a line that says so for one that has none."""
    if not isinstance(block, dict) or not isinstance(cast(Object, block).get("type"), str):
        raise BadRequest(f"{where}: a block is an object with a type")
    block = cast(Object, block)
    check_fields("/v1/messages block", block, BLOCK_FIELDS, where)
    kind: str = block["type"]
    if kind == "text":
        text = _string(block, "text", where)
        if text:
            yield text
    elif kind == "image":
        note("/v1/messages: an image is not shown to the model")
        yield IMAGE_NOTE
    elif kind == "tool_reference":
        yield f"[tool: {_string(block, 'tool_name', where)}]"
    elif kind == "document" and not _is_image(block):
        yield from _document(block, where)
    elif kind == "search_result":
        yield "\n".join(str(block[key]) for key in ("title", "source") if block.get(key))
        yield from _inner(block.get("content"), where)
    else:
        note(f"/v1/messages: a block {quoted(kind)} is not shown to the model")
        yield f"[{kind[:60]} not shown: this server reads text only]"


def _document(block: Object, where: str) -> Iterator[str]:
    if isinstance(block.get("title"), str):
        yield block["title"]
    source: Object = block["source"]
    if source["type"] == "text":
        yield _string(source, "data", f"{where}.source")
    else:
        yield from _inner(source.get("content"), where)


def _inner(content: Any, where: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for i, each in enumerate(cast(list[Any], content)):
            yield from _texts(each, f"{where}.content.{i}")


def _string(block: Object, key: str, where: str) -> str:
    return as_string(block.get(key), f"{where}.{key}")
