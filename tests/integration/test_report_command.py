from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_grid, write_run

Cli = Callable[..., Any]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_grid(root, seeds=3, rows=60)
    return root


def test_report_writes_all_its_files_and_says_the_verdicts(grid: Path, tmp_path: Path, cli: Cli) -> None:
    outcome = cli("report", grid, "--output-dir", tmp_path / "out")
    assert outcome.code == 0 and outcome.stderr == ""
    assert "isobn against none: " in outcome.stdout and "STS-B Spearman" in outcome.stdout
    plots = {f"{name}.{kind}" for name in ("scores", "curves", "isotropy") for kind in ("png", "svg")}
    texts = {f"report.{kind}" for kind in ("md", "csv", "json", "tex", "html")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == plots | texts
    markdown = (tmp_path / "out/report.md").read_text()
    assert all(f"]({name}.png)" in markdown for name in ("scores", "curves", "isotropy"))
    assert json.loads((tmp_path / "out/report.json").read_text())["schema"] == 1


def test_a_bad_file_is_named_skipped_and_ends_in_exit_1(grid: Path, tmp_path: Path, cli: Cli) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(grid, runs)
    result = runs / "rte/none/seed_2/result.json"
    result.write_text(result.read_text()[:99])
    outcome = cli("report", runs, "--output-dir", tmp_path / "out")
    assert outcome.code == 1
    assert outcome.stderr == "isobn-finetune: rte/none/seed_2/result.json: cut short, or no JSON\n"
    assert "rte/none/seed_2/result.json" in (tmp_path / "out/report.html").read_text()


def test_nothing_is_written_where_there_is_nothing_to_report(tmp_path: Path, cli: Cli) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        outcome = cli("report", folder, "--output-dir", tmp_path / "out")
        assert outcome.code == 2 and len(outcome.stderr.splitlines()) == 1 and str(folder) in outcome.error
        assert not (tmp_path / "out").exists()


class Page(HTMLParser):
    """Collects what an HTML page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_is_self_contained_escaped_and_links_to_run_folders(tmp_path: Path, cli: Cli) -> None:
    name = "a <script>alert(1)</script> & b"
    for seed in (1, 2):
        folder = tmp_path / "runs" / f"it's #{seed}"
        write_run(folder, "rte", "none", seed, [0, 1] * 9, [0, 1] * 8 + [1, 0], model=name)
    assert cli("report", tmp_path / "runs", "--output-dir", tmp_path / "out").code == 0
    text = (tmp_path / "out/report.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text
    page = Page(text)
    assert not page.all("link") and all("src" not in attributes for attributes in page.all("script"))
    assert all(str(image["src"]).startswith("data:") and image["alt"] for image in page.all("img"))
    assert len(page.all("img")) == 3
    links = [str(link["href"]) for link in page.all("a")]
    assert "../runs/it%27s%20%231/" in links and not any("://" in link for link in links)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and all(link[1:] in ids for link in links if link.startswith("#"))
    assert all(head.get("scope") in ("col", "row") for head in page.all("th"))
    assert page.all("html")[0]["lang"] == "en" and len(page.all("caption")) == len(page.all("table"))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_real_browser_sorts_the_table_by_keyboard(grid: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("report", grid, "--output-dir", tmp_path / "out").code == 0
    page = (tmp_path / "out/report.html").read_text()
    press = """<script>
    window.addEventListener("error", event => { document.title = "error: " + event.message; });
    const table = document.querySelector("#numbers table");
    const button = table.tHead.rows[0].cells[4].querySelector("button");
    button.focus();
    const order = [document.activeElement === button];
    for (let press = 0; press < 2; press++) {
      button.click();
      order.push([...table.tBodies[0].rows].map(row => row.cells[4].textContent).join(" "));
      order.push(table.tHead.rows[0].cells[4].getAttribute("aria-sort"));
    }
    order.push(document.getElementById("sorted").textContent);
    document.body.insertAdjacentHTML("beforeend", "<pre id=order></pre>");
    document.getElementById("order").textContent = JSON.stringify(order);
    </script></body>"""
    file = tmp_path / "pressed.html"
    file.write_text(page.replace("</body>", press))
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-background-networking --virtual-time-budget=5000 --dump-dom"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'browser'}", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True).stdout
    found = re.search(r'<pre id="order">(.*?)</pre>', shown)
    assert found is not None and "<title>error" not in shown
    focused, up, rising, down, falling, said = json.loads(found[1])
    values = [float(value) for value in up.split()]
    assert focused and len(values) == 8
    assert values == sorted(values) and rising == "ascending"
    assert [float(value) for value in down.split()] == sorted(values, reverse=True) and falling == "descending"
    assert said == "Sorted by median, descending"


def test_a_thousand_runs_are_reported_within_twenty_seconds(tmp_path: Path, cli: Cli) -> None:
    tasks = ("mnli", "qnli", "sst2", "rte", "mrpc", "cola", "stsb")
    write_grid(tmp_path / "runs", tasks, ("none", "batchnorm", "isobn"), seeds=48, rows=300)
    started = time.process_time()  # the machine may be busy
    assert cli("report", tmp_path / "runs", "--output-dir", tmp_path / "out").code == 0
    assert time.process_time() - started < 20
    assert len(list((tmp_path / "runs").rglob("result.json"))) == 1008
