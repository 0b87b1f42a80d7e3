"""The page in a real browser, before real workers: Debian's chromium, driven by Playwright."""

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from deployments.config import CoordinatorThresholds
from deployments.coordinator import Coordinator, Workers
from deployments.keys import Limits
from deployments.metrics import CoordinatorMetrics
from deployments.openai.routes import make_app
from tests import tiny
from tests.harness import Harness, ReplayDrafter, harness, no_metrics
from workers.draft.drafters.lookup import LookupDrafter
from workers.engine.rows import RowBatch
from workers.target.server import TargetWorker

CHROMIUM = shutil.which("chromium")
PICTURES = os.environ.get("SLIPSTREAM_PICTURES")
"""A folder for screenshots, for those who want to look."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

# Machines that test may be busy.
expect.set_options(timeout=60_000)

tokenizer = tiny.byte_level_tokenizer()
QUESTION = "the cat in the hat the cat"
SEED, SLOW_SEED = 7, 8
"""With the first, a drafter knows the answer; with the second, only what repeats is drafted."""

ANSWER = (
    "Look <script>window.ran = 1</script> <img src='http://evil.invalid/a.png' onerror='window.ran=2'>\n"
    "<b>bold</b> **bold** [link](javascript:window.ran=3) &lt;b&gt; <style>body{display:none}</style> "
    "<iframe src='http://evil.invalid'></iframe> é, 你, the cat in the hat, the cat in the hat"
)
TOKENS = [*tokenizer(ANSWER).input_ids, tokenizer.eos_token_id]
SLOW = 0.03


def prompt_of(question: str) -> list[int]:
    return list(tokenizer(f"user:{question}\nassistant:").input_ids)


def let_say(worker: TargetWorker, tokens: list[int], prompt_len: int) -> None:
    """Make a target say these tokens, again and again, behind a prompt of this length."""
    forward = worker._model.forward

    def scripted(batch: RowBatch) -> torch.Tensor:
        logits = torch.full_like(forward(batch), -50.0)
        positions = batch.positions()
        for row, wanted in enumerate(batch.wanted()):
            logits[row, tokens[(positions[wanted] + 1 - prompt_len) % len(tokens)]] = 50.0
        return logits

    worker._model.forward = scripted  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def listening(h: Harness, keys: Path | None = None) -> AsyncIterator[str]:
    """The front door before the harness' workers, on a port; its address."""
    workers = Workers("tiny", h.targets, (h.drafts.draft_pool,))  # type: ignore[arg-type]
    coordinator = Coordinator([workers], Limits(), CoordinatorMetrics())
    coordinator.reconfigure(CoordinatorThresholds(api_keys_file=keys and str(keys)))
    app = make_app(lambda: coordinator, no_metrics)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await serving


@dataclass
class Site:
    """Addresses of the same workers behind two front doors; the second wants the key "secret"."""

    open: str
    guarded: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    digest = hashlib.sha256(b"secret").hexdigest()
    keys.write_text(f"keys:\n  - id: somebody\n    sha256: {digest}\n")
    prompt = prompt_of(QUESTION)
    replay = ReplayDrafter("mixed", len(tokenizer))
    replay.answers[tuple(prompt), SEED] = TOKENS
    drafters = {"lookup": LookupDrafter(), "replay": replay}
    found: list[Site] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with harness(tiny.llama(), drafters, slow=SLOW) as h:
            let_say(h.target, TOKENS, len(prompt))
            async with listening(h) as free, listening(h, keys) as guarded:
                found.append(Site(free, guarded))
                ready.set()
                await asyncio.to_thread(done.wait)

    # A loop of its own: the browser's calls here block.
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(120)
        yield found[0]
    finally:
        done.set()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM)
        yield made
        made.close()


@dataclass
class Visit:
    """A page, all that it asked for, and what went wrong in it."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def look(self, name: str) -> None:
        """Keep a picture, where pictures are wanted."""
        if PICTURES is not None:
            self.page.screenshot(path=f"{PICTURES}/{name}.png")

    def set(self, setting: str, value: Any) -> None:
        details = self.page.locator("#composer details")
        if details.get_attribute("open") is None:
            self.page.get_by_text("Settings").click()
        self.page.locator(f"#{setting}").fill(str(value))

    def ask(self, text: str = QUESTION) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.keyboard.press("Enter")

    def ask_and_wait(self, text: str = QUESTION) -> None:
        self.ask(text)
        expect(self.page.locator("#state")).to_contain_text("Done")

    @property
    def words(self) -> str:
        return self.page.locator(".answer .words").last.text_content() or ""


@pytest.fixture
def visit(browser: Browser, site: Site, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A fresh visit of the chat; the parameter holds options of the browser's context."""
    context = browser.new_context(**getattr(request, "param", {}))
    page = context.new_page()
    made = Visit(page)
    page.on("request", lambda asked: made.asked.append(asked.url))
    page.on(
        "console", lambda said: made.complaints.append(said.text) if said.type == "error" else None
    )
    page.on("pageerror", lambda error: made.complaints.append(str(error)))
    page.goto(site.open)
    expect(page.locator("#served")).to_contain_text("tiny")
    made.set("seed", SEED)
    made.set("max_tokens", len(TOKENS))
    yield made
    context.close()
    assert made.complaints == []
    assert all(url.startswith(site.open) for url in made.asked)


WATCH = """
() => {
  window.seen = [];
  const look = () => seen.push(document.querySelector(".words")?.textContent ?? "");
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
}
"""


def test_an_answer_streams_and_its_tokens_say_where_they_come_from(visit: Visit) -> None:
    page = visit.page
    page.evaluate(WATCH)
    visit.ask_and_wait()
    begun = page.evaluate("window.seen")
    assert len(set(begun)) > 10, "it came at once"
    assert all(ANSWER.startswith(text) for text in begun)
    assert visit.words == ANSWER
    kinds = page.locator(".words .token").evaluate_all("spans => spans.map(s => s.className)")
    assert len(kinds) == len(TOKENS)
    assert {"token drafter-1", "token drafter-2", "token bonus", "token plain"} <= set(kinds)
    assert kinds[0] == "token plain", "nothing is drafted before the first token"
    spelt = page.locator(".words .token").evaluate_all("spans => spans.map(s => s.textContent)")
    texts = [tokenizer.decode([token]) for token in TOKENS[:-1]]
    # Characters of several tokens stand where they are complete.
    assert [s for s, t in zip(spelt, texts, strict=False) if "�" not in t] == [
        t for t in texts if "�" not in t
    ]
    legend = page.locator("#legend").inner_text()
    assert "drafted by lookup" in legend
    assert "drafted by replay" in legend
    numbers = dict(
        zip(
            page.locator(".numbers dt").all_inner_texts(),
            page.locator(".numbers dd").all_inner_texts(),
            strict=True,
        )
    )
    assert numbers["tokens"] == str(len(TOKENS))
    assert float(numbers["tokens/s"]) > 0
    assert float(numbers["τ"]) > 1.5
    assert float(numbers["mean length"]) > 1
    assert float(numbers["price"]) >= 0
    assert re.fullmatch(r"\d+ %", numbers["hit rate"])
    assert re.match(r"1: \d+ %", numbers["accepted by depth"])
    visit.look("chat")


def test_nothing_of_an_answer_is_markup(visit: Visit) -> None:
    page = visit.page
    visit.ask_and_wait()
    assert visit.words == ANSWER
    assert page.evaluate("window.ran") is None
    inside = page.locator("#conversation")
    assert inside.locator("script, img, style, iframe, b, a, strong").count() == 0
    # The question is text, too, and so is what the tree shows.
    visit.set("max_tokens", 60)
    visit.ask_and_wait("<img src=x onerror='window.ran = 4'><b>hi</b>")
    assert (
        page.locator(".said").last.text_content() == "<img src=x onerror='window.ran = 4'><b>hi</b>"
    )
    assert page.evaluate("window.ran") is None
    assert inside.locator("img, b").count() == 0
    visit.look("markup")
    # Whatever is forgotten here, the browser runs nothing that was inserted.
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<img src=x onerror=window.ran=5>'")
    assert all("TrustedHTML" in complaint for complaint in visit.complaints)
    visit.complaints.clear()


def test_a_round_is_chosen_by_click_and_keys_and_its_tree_is_drawn(visit: Visit) -> None:
    page = visit.page
    visit.ask_and_wait()
    page.locator(".words .token.drafter-2").nth(40).click()
    caption = page.locator("figcaption span")
    said = caption.inner_text()
    found = re.match(r"Round (\d+): (\d+) drafted, (\d+) accepted", said)
    assert found, said
    number, drafted, accepted = map(int, found.groups())
    assert accepted >= 1
    tree = page.locator("svg.tree")
    # The anchor, the nodes, and the target's own token; a line to each but the first.
    assert tree.locator("g.box").count() == drafted + 2
    assert tree.locator("path.edge").count() == drafted + 1
    assert tree.locator("path.edge.chosen").count() == accepted + 1
    chosen = tree.locator("g.box.chosen .token").all_text_contents()
    committed = page.locator(f".words [data-round='{number}']").all_inner_texts()
    assert [c.replace("␣", " ") for c in chosen[1:]] == [c.replace("\n", "⏎") for c in committed]
    assert page.locator(".words .looked-at").count() == len(committed)
    visit.look("tree")
    page.locator(".words").focus()
    page.keyboard.press("ArrowRight")
    expect(caption).to_contain_text(f"Round {number + 1}:")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(caption).to_contain_text(f"Round {number - 1}:")
    page.keyboard.press("Home")
    expect(caption).to_contain_text("Prefill")
    page.get_by_label("Next round").press("Enter")
    expect(caption).to_contain_text("Round 1:")
    expect(page.get_by_label("Next round")).to_be_focused()


@pytest.mark.parametrize(
    "visit", [{"viewport": {"width": 1280, "height": 900}}], indirect=True, ids=["wide"]
)
def test_the_same_prompt_drafted_and_plain(visit: Visit) -> None:
    page = visit.page
    page.get_by_label("Compare with plain decoding").check()
    visit.ask_and_wait()
    assert page.locator(".answer h3").all_inner_texts() == ["Drafted", "Plain"]
    texts = page.locator(".answer .words").all_text_contents()
    assert texts == [ANSWER, ANSWER]
    plain = page.locator(".answer").nth(1)
    kinds = plain.locator(".token").evaluate_all("spans => spans.map(s => s.className)")
    assert set(kinds) == {"token plain"}
    verdict = page.locator(".verdict").inner_text()
    assert verdict.startswith("The texts are equal.")
    faster = re.search(r"([\d.]+) times as many tokens", verdict)
    assert faster
    assert float(faster[1]) > 1.2
    boxes = [page.locator(".answer").nth(n).bounding_box() for n in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"], "side by side"
    visit.look("compare")


def test_stop_clear_and_refusals(visit: Visit) -> None:
    page = visit.page
    visit.set("seed", SLOW_SEED)
    visit.ask()
    expect(page.locator(".words .token").nth(3)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#state")).to_have_text("Stopped.")
    assert 0 < len(visit.words) < len(ANSWER)
    assert page.get_by_label("Message").input_value() == QUESTION
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".turn")).to_have_count(0)
    visit.set("max_tokens", 100_000)
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens is 100000, but after a prompt of")
    # The browser itself reports the status.
    assert all("400" in complaint for complaint in visit.complaints)
    visit.complaints.clear()
    visit.set("max_tokens", 5)
    visit.ask_and_wait()
    assert visit.words == ANSWER[:5].rstrip() or ANSWER.startswith(visit.words)


NARROW = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize(
    "visit",
    [
        pytest.param(NARROW, id="light", marks=pytest.mark.slow),
        pytest.param({**NARROW, "color_scheme": "dark"}, id="dark"),
    ],
    indirect=True,
)
def test_a_phone_shows_all_of_it_without_scrolling_sideways(visit: Visit, site: Site) -> None:
    page = visit.page
    wide = "document.scrollingElement.scrollWidth"
    assert page.evaluate(wide) <= 390
    page.get_by_label("Compare with plain decoding").check()
    visit.ask_and_wait()
    page.locator(".answer .words .token.drafter-2").nth(4).click()
    assert page.evaluate(wide) <= 390
    first, second = (page.locator(".answer").nth(n).bounding_box() for n in (0, 1))
    assert second["y"] >= first["y"] + first["height"], "beneath each other"
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    visit.look(f"phone-{'dark' if dark else 'light'}")
    page.goto(f"{site.open}/pools")
    expect(page.locator(".pool")).to_have_count(2)
    assert page.evaluate(wide) <= 390
    visit.look(f"phone-pools-{'dark' if dark else 'light'}")


CONTRAST = """
element => {
  const numbers = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = color => {
    const [r, g, b] = numbers(color).map(c => {
      const s = c / 255;
      return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
"""


@pytest.mark.parametrize(
    "visit",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}],
    indirect=True,
    ids=["light", "dark"],
)
def test_text_is_readable_in_light_and_dark(visit: Visit) -> None:
    page = visit.page
    visit.ask_and_wait()
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    behind = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(behind[4:].split(",")[0]) < 60) == dark
    # A bar for every tint there is.
    page.evaluate(
        """() => {
          const legend = document.getElementById("legend");
          for (let n = 1; n <= 6; n += 1) {
            const span = document.createElement("span");
            span.className = `token drafter-${n}`;
            span.textContent = `drafter ${n}`;
            legend.append(span);
          }
        }"""
    )
    for selector in ("#legend .token", ".said", ".words .token", "dt", "dd", "#state", "button"):
        for element in page.locator(selector).all()[:60]:
            if element.is_visible() and element.is_enabled():
                assert element.evaluate(CONTRAST) >= 4.5, selector
    visit.look(f"scheme-{'dark' if dark else 'light'}")


def test_pools_show_what_the_workers_say(visit: Visit, site: Site) -> None:
    visit.ask_and_wait()
    page = visit.page
    page.get_by_role("link", name="Pools").click()
    expect(page.locator("h2")).to_have_text(["Targets of tiny", "Draft workers of tiny"])
    target = page.locator(".pool").first
    assert "healthy; replicas: 1 running; known here: 1" in target.inner_text()
    cells = dict(
        zip(
            target.locator("td").evaluate_all("cells => cells.map(c => c.dataset.name)"),
            target.locator("td").all_inner_texts(),
            strict=True,
        )
    )
    assert cells["health"] == "answers"
    assert cells["answers"] == "0 of 16 run, 0 wait"
    assert re.fullmatch(r"[\d.]+ tokens", cells["price of a row"])
    assert re.fullmatch(r"\d+ % of \d+ tokens", cells["KV cache"].strip())
    # While an answer runs, the second look finds rates.
    with visit.page.context.expect_page() as opened:
        page.evaluate("window.open('./', '_blank', 'noopener')")
    other = Visit(opened.value)
    expect(other.page.locator("#served")).to_contain_text("tiny")
    other.set("seed", SLOW_SEED)
    other.ask()
    expect(target.locator("[data-name='answers']")).to_contain_text("1 of 16 run")
    expect(target.locator("[data-name='rows a step']")).to_have_text(re.compile(r"^[\d.]+$"))
    expect(target.locator("[data-name='tokens/s']")).to_have_text(re.compile(r"^\d[\d.]*$"))
    visit.look("pools")


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, site: Site) -> None:
    page = browser.new_context().new_page()
    page.goto(site.guarded)
    key = page.get_by_label("API key", exact=True).and_(page.locator("input"))
    key.fill("wrong")
    key.press("Enter")
    expect(page.locator("dialog")).to_have_count(1)
    expect(page.locator("dialog .error")).to_contain_text("no valid API key")
    key.fill("secret")
    key.press("Enter")
    expect(page.locator("#served")).to_contain_text("tiny")
    expect(page.locator("dialog")).to_have_count(0)
    Visit(page).set("max_tokens", 5)
    Visit(page).ask_and_wait()
    page.goto(f"{site.guarded}/pools")
    expect(page.locator(".pool")).to_have_count(2)
    assert page.evaluate("localStorage.length") == 0
    assert page.evaluate("sessionStorage.getItem('slipstream-key')") == "secret"
    assert page.context.cookies() == []
    page.context.close()
