"""The report in a real browser: its figures are the JSON's, it fits a phone, and it is silent on the console."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from playwright.sync_api import Browser, Page, sync_playwright

from gnn_predictor.infer import main

_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LAPTOP, _PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 812}
_HOSTILE = """<script>alert(1)</script> & "quotes' {{ 7 * 7 }}"""
_JOB = f"""
name: {json.dumps(_HOSTILE)}
model: {{num_layers: 8, hidden_size: 1024, num_attention_heads: 16, vocab_size: 51200}}
batch: {{seq_length: 1024, micro_batch_size: 2, global_batch_size: 64}}
cluster: {{gpu: A100-SXM4-80GB, num_nodes: 1, gpus_per_node: 8}}
training: {{tokens: 1e12}}
price: {{usd_per_gpu_hour: 2.5}}
"""
_PAGES: dict[str, list[str]] = {
    "one stage": [],
    "four stages": ["--set", "parallel={tensor: 2, pipeline: 4, recompute: full}"],
    "dualpipe": ["--set", "parallel={pipeline: 4, schedule: dualpipe}"],
    "64 stages": [
        *("--set", "parallel.pipeline=64", "--set", "model.num_layers=64", "--set", "batch.global_batch_size=4096"),
        *("--set", "cluster.num_nodes=8"),
    ],
    "experts": [
        *("--set", "model.moe={num_experts: 8, top_k: 2, expert_ffn_hidden_size: 2048}", "--set", "parallel.expert=8"),
    ],
    "encoder and decoder": [
        *("--set", "model={architecture: encoder_decoder, num_encoder_layers: 4, num_decoder_layers: 4,"
          " hidden_size: 1024, num_attention_heads: 16, vocab_size: 51200}"),
        *("--set", "batch.target_seq_length=128"),
    ],
    "failing variants": ["--compare", "precision=bf16_mixed,fp8_mixed,tf32", "parallel.tensor=3,1"],
    "does not fit": ["--set", "model.num_layers=2000", "--force"],
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        missing = f"no browser on the path (looked for {', '.join(_BROWSERS)})"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=list(_PAGES))
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, untrained: Path
) -> tuple[Path, dict[str, Any]]:
    """A page and the JSON of the same command; that of a comparison stands under ``compare``."""
    folder = tmp_path_factory.mktemp("report")
    job, file = folder / "job.yaml", folder / "report.html"
    job.write_text(_JOB)
    arguments = [str(job), "--checkpoint", str(untrained), "--format", "json"]
    answer = _answer([*arguments, *_PAGES[request.param], "--html", str(file)])
    if "variants" in answer:
        reference = answer["variants"][answer["reference"]]["set"]
        settings = [word for key, value in reference.items() for word in ("--set", f"{key}={value}")]
        answer = {**_answer([*arguments, *settings]), "compare": answer}
    return file, answer


def _answer(arguments: list[str]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(arguments) == 0
    answer: dict[str, Any] = json.loads(printed.getvalue())
    return answer


def _at(answer: Any, path: str) -> Any:
    return functools.reduce(
        lambda part, key: part[int(key) if isinstance(part, list) else key], path.split("."), answer
    )


def _read(text: str) -> float:
    """A figure as people read it."""
    number, unit = re.fullmatch(r"([\d,.]+(?:e[+-]\d+)?) ?(.*)", text).groups()  # type: ignore[union-attr]
    scales = {"ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "GB": 1e9, "%": 1e-2, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    return float(number.replace(",", "")) * scales.get(unit.removesuffix(" USD"), 1.0)


def _open(browser: Browser, file: Path, size: Any, scheme: Any) -> tuple[Page, list[str]]:
    """The page, and what it logged, failed at or asked the network for."""
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda request: noise.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(file.as_uri())
    return page, noise


def test_the_page_is_whole_and_quiet_on_laptop_and_phone(report: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    file, _ = report
    assert file.stat().st_size < 2_000_000
    backgrounds = set()
    for size, scheme in ((_LAPTOP, "light"), (_PHONE, "dark"), (_PHONE, "light")):
        page, noise = _open(browser, file, size, scheme)
        assert noise == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.locator("h1").inner_text() == _HOSTILE
        assert page.locator("script, iframe, link[href^=http], img").count() == 0
        assert page.locator("main section").count() == 7
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.context.close()
    assert len(backgrounds) == 2


def test_every_figure_is_the_jsons(report: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    file, answer = report
    page, _ = _open(browser, file, _LAPTOP, "light")
    figures = page.eval_on_selector_all(
        "data[data-path]", "all => all.map(each => [each.dataset.path, each.value, each.textContent])"
    )
    page.context.close()
    paths = {path for path, _, _ in figures}
    for path, value, text in figures:
        if path.startswith("compare.") and "compare" not in answer:
            continue  # the page's own comparison of precisions
        assert float(value) == pytest.approx(_at(answer, path), rel=1e-5), path
        assert _read(text) == pytest.approx(float(value), rel=6e-3, abs=6e-2 if " GB" not in text else 6e7), path
    assert {"iteration_time_s", "iteration_time_low_s", "iteration_time_high_s", "mfu", "tokens_per_s"} <= paths
    assert {f"stages.{len(answer['stages']) - 1}.{key}" for key in ("forward_s", "bubble_s", "total_s")} <= paths
    by_kind = {f"breakdown.by_kind.{kind}" for kind, seconds in answer["breakdown"]["by_kind"].items() if seconds}
    assert by_kind <= paths
    rows = [each for each in answer.get("compare", {}).get("variants", []) if each["status"] != "ok"]
    text = file.read_text()
    assert text.count(">cannot run<") == len(rows)
    assert all(str(escape(each["reason"])) in text for each in rows)
    assert ("✗ Does not fit in memory" in text) == (answer["memory_verdict"] == "does not fit")


def test_keyboard_and_screen_reader_find_their_way(report: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    file, answer = report
    page, _ = _open(browser, file, _LAPTOP, "light")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the figures"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    unnamed = "[tabindex]:not([aria-label]), section:not([aria-labelledby]), svg[role=img]:not([aria-label])"
    assert page.locator(unnamed).count() == 0
    assert page.locator("[tabindex]:not([tabindex='0'])").count() == 0
    ids = page.eval_on_selector_all("[id]", "all => all.map(each => each.id)")
    targets = page.eval_on_selector_all("a[href^='#']", "all => all.map(each => each.getAttribute('href').slice(1))")
    assert set(targets) <= set(ids)
    assert len(ids) == len(set(ids))
    assert page.locator("table").count() >= 4  # stages, memory, comparison, operators
    assert page.locator("#stages ~ details tbody tr").count() == len(answer["stages"])
    page.context.close()


@pytest.mark.parametrize("report", ["four stages"], indirect=True)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_as_wcag_aa_asks(report: tuple[Path, dict[str, Any]], browser: Browser, scheme: str) -> None:
    """At least 4.5 to 1 (WCAG 2.2, success criterion 1.4.3)."""
    page, _ = _open(browser, report[0], _LAPTOP, scheme)
    pairs = page.evaluate(
        """() => {
          const color = (selector, property) => getComputedStyle(document.querySelector(selector))[property];
          const card = color("section", "backgroundColor"), body = color("body", "backgroundColor");
          return [
            ["body", color("body", "color"), body], ["about", color(".about", "color"), body],
            ["card", color("h2", "color"), card], ["muted", color("section > p", "color"), card],
            ["link", color("summary", "color"), card], ["heading", color("th", "color"), card],
            ["good", color(".chip", "color"), color(".chip", "backgroundColor")],
            ...["forward", "backward"].map(kind =>
              [kind, color("text.number", "fill"), color(`rect.slice.${kind}`, "fill")]),
          ];
        }"""
    )
    page.context.close()
    for name, text, back in pairs:
        assert _contrast(text, back) >= 4.5, (name, text, back)


def _contrast(first: str, second: str) -> float:
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    """Relative luminance of ``rgb(r, g, b)`` (WCAG 2.2)."""
    channels = [int(each) / 255 for each in re.findall(r"\d+", color)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("report", ["one stage"], indirect=True)
def test_the_page_forbids_itself_network_and_scripts(report: tuple[Path, dict[str, Any]]) -> None:
    text = report[0].read_text()
    assert """content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">""" in text
    assert not re.search(r"(src|href)=.?https?:|@import|url\(.?https?:", text)
    assert "<script" not in text
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", text)[0]


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_comparison_of_which_nothing_runs_writes_no_file(
    option: str, tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, file = tmp_path / "job.yaml", tmp_path / "out"
    job.write_text(_JOB)
    arguments = [str(job), "--checkpoint", str(untrained), "--compare", "parallel.tensor=3,5", option, str(file)]
    assert main(arguments) == 4
    assert not file.exists()


def test_a_page_is_replaced_whole_and_leaves_nothing_beside_it(
    tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, file = tmp_path / "job.yaml", tmp_path / "report.html"
    job.write_text(_JOB)
    file.write_text("before")
    assert main([str(job), "--checkpoint", str(untrained), "--html", str(file)]) == 0
    assert file.read_text().rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "report.html"]
