"""The page at / and the JSON behind it: what is in them, who gets them, and that they agree."""

import base64
import hashlib
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_engine.server.page import page
from mlx_engine.server.security import Access
from mlx_engine.worker import AnsweringEngine
from tests.scripted_engine import Course, ScriptedEngine
from tests.server.browser import open_page
from tests.server.support import PATIENCE_S, Server, messages_body, on_port, serving, until

SECRET = "zanzibar"
KEY = "a key of ours"


def test_the_page_needs_no_key_and_its_numbers_do() -> None:
    with serving(ScriptedEngine("so"), access=Access(api_key=KEY)) as server:
        shown = server.ask("GET", "/")
        assert shown.status_code == 200
        assert shown.headers["content-type"] == "text/html; charset=utf-8"
        assert server.ask("HEAD", "/").status_code == 200
        assert server.ask("GET", "/status").status_code == 401
        allowed = server.ask("GET", "/status", headers={"x-api-key": KEY})
        assert allowed.status_code == 200 and allowed.headers["cache-control"] == "no-store"
        other = server.ask("GET", "/", headers={"host": "elsewhere.example"})
        assert other.status_code == 403


def test_nothing_but_its_own_style_and_script_may_run() -> None:
    with serving(ScriptedEngine("so")) as server:
        shown = server.ask("GET", "/")
    rules = dict(
        rule.strip().split(" ", 1) for rule in shown.headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in shown.headers["content-security-policy"]
    for element, rule in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", shown.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    # The policy would block these in silence.
    assert not re.search(r"<[^>]+\s(style|on\w+)\s*=", shown.text)
    assert "innerHTML" not in shown.text and "eval(" not in shown.text


def test_the_page_asks_no_other_server() -> None:
    assert "://" not in page() and not re.search(r"""["'(=]//""", page())
    assert set(re.findall(r'fetch\("([^"]+)"', page())) == {"/status"}
    assert set(re.findall(r'(?:href|src)="([^"]*)"', page())) == {"data:,"}


@contextmanager
def standing(server: Server, address: str, go: threading.Event) -> Generator[None]:
    """Two requests, of which the first waits for the event; both are over at the end."""

    def post() -> None:
        with suppress(httpx.HTTPError):
            httpx.post(
                f"{address}/v1/messages",
                json=messages_body(messages=[{"role": "user", "content": f"{SECRET} " * 20}]),
                timeout=PATIENCE_S,
                verify=False,
            )

    threads = [threading.Thread(target=post) for _ in range(2)]
    try:
        for n, thread in enumerate(threads, 1):
            thread.start()
            until(lambda n=n: len(server.worker.jobs()) == n)
        yield
    finally:
        go.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_the_report_follows_a_request_from_the_queue_to_its_end() -> None:
    go, is_decoding = threading.Event(), threading.Event()

    def wait(course: Course) -> None:
        if len(server.engine.courses) > 1:
            return
        if course.chunks_done == 2 or len(course.said) == 5:
            assert go.wait(PATIENCE_S)
        if len(course.said) == 4:
            go.clear()
            is_decoding.set()

    engine = ScriptedEngine("</think>Hello there", before_step=wait, chunk_tokens=16)
    with serving(engine, max_active=1) as server, on_port(server.app) as address:

        def report() -> dict[str, Any]:
            return server.ask("GET", "/status").json()

        with standing(server, address, go):
            until(lambda: bool(engine.courses) and engine.courses[0].chunks_done == 2)
            reading, waiting = report()["jobs"]
            n = len(engine.courses[0].call.token_ids)
            assert (reading["state"], reading["position"]) == ("prefill", 0)
            assert (reading["read_tokens"], reading["prompt_tokens"]) == (32, n)
            assert (reading["cached_tokens"], reading["completion_tokens"]) == (0, 0)
            assert (waiting["state"], waiting["position"]) == ("queued", 1)
            assert waiting["prompt_tokens"] is None
            go.set()
            assert is_decoding.wait(PATIENCE_S)
            until(lambda: server.worker.jobs()[0].completion_tokens == 5)
            answering = report()["jobs"][0]
            assert (answering["state"], answering["completion_tokens"]) == ("decode", 5)
            assert answering["decode_tokens_per_s"] > 0
            assert SECRET not in str(report())
        until(lambda: server.worker.counts.answered == 2)
        ended = report()
    assert ended["jobs"] == [] and ended["counts"]["answered"] == 2
    assert ended["counts"]["completion_tokens"] == sum(len(c.said) for c in engine.courses)


def test_the_report_of_a_server_that_loads() -> None:
    go = threading.Event()
    engine = ScriptedEngine("so")

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[AnsweringEngine]:
        on_progress(3, 10)
        assert go.wait(PATIENCE_S)
        yield engine

    with serving(engine, load=load) as server:
        until(lambda: server.worker.load_bytes == (3, 10))
        loading = server.ask("GET", "/status").json()
        assert loading["state"] == "loading"
        assert loading["load"] == {"done_bytes": 3, "total_bytes": 10}
        assert loading["memory"] is loading["sessions"] is loading["disk_cache"] is None
        go.set()
        until(lambda: server.worker.state == "ready")
        ready = server.ask("GET", "/status").json()
    assert ready["load"] is None and ready["disk_cache"] is None
    assert ready["memory"]["limit_bytes"] > ready["memory"]["active_bytes"] >= 0
    assert ready["sessions"]["budget_bytes"] >= 0 and ready["uptime_s"] >= loading["uptime_s"]


def test_every_number_that_the_page_shows_is_in_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlx_engine.diskcache.cache import DiskCache
    from tests.diskcache.content import FINGERPRINT, PARTS

    go = threading.Event()

    def wait(course: Course) -> None:
        assert go.wait(PATIENCE_S)

    cache = DiskCache.open(tmp_path / "kv", fingerprint=FINGERPRINT, parts=PARTS)
    engine = ScriptedEngine("</think>so", before_step=wait)
    monkeypatch.setattr(engine, "disk_stats", cache.stats)
    with serving(engine) as server, on_port(server.app) as address:
        with standing(server, address, go):
            report: dict[str, Any] = server.ask("GET", "/status").json()
    cache.close()
    of_name = {
        "status": report,
        "job": report["jobs"][0],
        "counts": report["counts"],
        "memory": report["memory"],
        "sessions": report["sessions"],
        "disk": report["disk_cache"],
    }
    (script,) = re.findall(r"<script>(.*?)</script>", page(), re.DOTALL)
    read = set(re.findall(rf"\b({'|'.join(of_name)})\.([a-z_]+)\b(?!\()", script))
    assert len(read) > 50
    assert {(name, field) for name, field in read if field not in of_name[name]} == set()


# What a person sees too little of: texts whose contrast is below WCAG 2.1's 4.5 to 1 (1.4.3).
FAINT = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).slice(0, 3).map((c) => c / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return rgb(color)[3] === 0 ? ground(element.parentElement) : color;
  };
  const hasText = (element) => element.checkVisibility()
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const texts = [...document.body.querySelectorAll("*")].filter(hasText);
  const contrast = (element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const faint = texts.filter((element) => contrast(element) < 4.5);
  return { seen: texts.length, faint: faint.map((element) => element.outerHTML) };
})()
"""
PHONE: dict[str, Any] = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": False}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(scheme: str, tmp_path: Path) -> None:
    go = threading.Event()

    def wait(course: Course) -> None:
        assert go.wait(PATIENCE_S)

    engine = ScriptedEngine("</think>so", before_step=wait)
    with (
        open_page(tmp_path) as shown,
        serving(engine, max_active=1) as server,
        on_port(server.app) as address,
    ):

        def until_shown(expression: str) -> None:
            until(lambda: bool(shown.value(expression)))

        features = [{"name": "prefers-color-scheme", "value": scheme}]
        shown.call("Emulation.setEmulatedMedia", features=features)
        shown.call("Emulation.setDeviceMetricsOverride", **PHONE)
        shown.call("Page.navigate", url=address)
        until_shown("document.title === 'ds41: ready' && $('idle').checkVisibility()")
        red, green, blue = map(
            int,
            re.findall(r"\d+", shown.value("getComputedStyle(document.body).backgroundColor")),
        )
        assert (red + green + blue > 600) if scheme == "light" else (red + green + blue < 150)
        with standing(server, address, go):
            until_shown("document.title === 'ds41: at work' && $('jobs').children.length === 2")
            assert "Waiting, next" in shown.value("$('jobs').innerText")
            looked_at = shown.value(FAINT)
            assert looked_at["seen"] > 20 and looked_at["faint"] == []
            assert shown.value("innerWidth") == PHONE["width"]
            root = "document.documentElement"
            assert shown.value(f"{root}.scrollWidth === {root}.clientWidth")
        until_shown("$('counts').innerText.replace(/\\s+/g, ' ').startsWith('Answered 2 ')")
        until_shown("document.title === 'ds41: ready' && $('jobs').children.length === 0")
        asked = [url for url in shown.requests if not url.startswith("data:")]
    assert {url.removeprefix(address) for url in asked} == {"/", "/status"}
