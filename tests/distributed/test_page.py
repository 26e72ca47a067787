"""The page of a run in a real browser: the system's Chromium, driven by Playwright, and judged by axe."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from horizonml.report.page.runs import RunsServer
from horizonml.report.page.server import PageServer
from horizonml.security.token import make_token
from tests.distributed.processes import horizonml, ours, wait_for
from tests.programs import need, need_package
from tests.runs import append

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

JOB = """
name: test
epochs: {epochs}
batch_size: 64
model: {{name: digits_cnn}}
data: {{name: digits}}
optimizer: {{name: sgd, lr: 0.02}}
parallel: {{strategy: pipeline, workers: 3, micro_batches: 4}}
telemetry: {{timeline_every: 5}}
"""
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that three ranks have trained to its end."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "job.yaml").write_text(JOB.format(epochs=2))
    result = horizonml(folder, "train", "job.yaml")
    assert result.returncode == 0, result.stderr
    return folder / "runs" / "test"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "test"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need("chromium", "the page is tested in it (apt-get install chromium)")
    need_package("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield program
        program.close()


class Visit:
    """One look at a page; what the page says on the console, or asks of others, fails the test."""

    def __init__(self, browser: Browser, size: dict[str, int], **options: Any) -> None:
        self._context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type]
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def go(self, server: PageServer) -> Page:
        """Open the page, and wait until it shows the run."""
        self.page.goto(f"http://127.0.0.1:{server.port}/")
        self.page.wait_for_selector("#loss svg.chart, #loss .note")
        # The page's own policy does not let Playwright evaluate a function again and again.
        wait_for(lambda: self.page.inner_text("#state") not in ("", "reading"), "a run on the page")
        return self.page

    def close(self) -> None:
        """End the visit."""
        self._context.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def begin(size: dict[str, int] = DESK, **options: Any) -> Visit:
        visits.append(Visit(browser, size, **options))
        return visits[-1]

    yield begin
    for one in visits:
        one.close()


def predict(page: Page) -> None:
    """Ask what would be if nothing changed."""
    page.click("#what-if button[type=submit]")
    page.wait_for_selector("#what-if .compare, #what-if .error")
    assert page.locator("#what-if .compare").count(), page.inner_text("#what-if [role=status]")


def violations(page: Page) -> list[str]:
    """What axe finds wrong with a page, in words."""
    need_package("axe_selenium_python")
    axe = resources.files("axe_selenium_python") / "node_modules" / "axe-core" / "axe.min.js"
    page.evaluate(f"() => {{ {axe.read_text()} }}")  # the page's policy forbids scripts in elements
    # This version of axe does not know that a password's field may have autocomplete="off".
    rules = "{'autocomplete-valid': {enabled: false}}"
    found = page.evaluate(f"() => axe.run(document, {{resultTypes: ['violations'], rules: {rules}}})")
    assert found["passes"], "axe has looked at nothing"
    return [
        f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


def test_the_page_of_all_runs_compares_them_and_leads_to_each(run: Path, visit: Callable[..., Visit]) -> None:
    shutil.copytree(run, run.with_name("another"))
    with RunsServer(run.parent, ("127.0.0.1", 0)) as server:
        look = visit()
        page = look.page
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector("#training path.line")
        assert page.locator("#list tbody tr").count() == 2
        assert page.locator("#training path.line").count() == page.locator("#loss path.line").count() == 2
        assert violations(page) == []
        before = page.get_attribute("#training path.line", "d")
        page.check("#training input[type=checkbox]")
        page.locator("#training input[type=range]").fill("4")
        assert page.get_attribute("#training path.line", "d") != before
        page.uncheck("#list tbody tr:first-child input")
        wait_for(lambda: page.locator("#training path.line").count() == 1, "one curve less")
        page.click("#list a >> nth=0")
        wait_for(lambda: page.locator("#state").count() and page.inner_text("#state") == "finished", "the run's page")
        assert look.complaints == []
        assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in look.asked)


def test_the_page_shows_a_run_without_a_complaint_or_a_request_elsewhere(
    run: Path, visit: Callable[..., Visit]
) -> None:
    with PageServer(run, ("127.0.0.1", 0)) as server:
        look = visit()
        page = look.go(server)
        assert page.inner_text("#state") == "finished"
        assert page.locator("#loss path.line").count() == 2, "training and held-out loss"
        assert page.locator("#accuracy path.line").count() == 2
        assert page.locator("#topology svg g").count() == 3
        assert page.locator("#topology line").count() == 3 + page.locator("#topology line.pulse").count()
        assert page.locator("#split .chart rect").count() == 9
        assert page.locator("#timeline .chart rect").count() > 20
        assert "training is complete" in page.inner_text("#events")
        page.click("button:has-text('Show the predicted step')")
        page.wait_for_selector("#timeline .note:has-text('Simulated')")
        page.click("button:has-text('Show the predicted step')")
        page.wait_for_selector("#timeline .note:has-text('Step 45, as')")
        curve = page.get_attribute("#loss svg.chart", "aria-label")
        assert curve is not None
        assert curve.startswith("Loss over steps 1 to 46: training from 2.3")
        page.click("text=Links as a table")
        page.wait_for_selector("#topology td")
        assert page.locator("#topology td:has-text('Mbit/s')").count() == 3, "all links were measured"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/api/run") as answer:
            described = json.load(answer)
        assert described["alone"]["seconds"] > 0, described["alone"]
        assert described["worth"]["is_measured"]
        assert page.locator("#figures li:has-text('Against one device'):has-text('measured')").count() == 1
        assert look.complaints == []
        assert {url.split("/")[2] for url in look.asked} == {f"127.0.0.1:{server.port}"}
        assert len(look.asked) > 15


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_with_anything_opened(run: Path, visit: Callable[..., Visit], scheme: str) -> None:
    with PageServer(run, ("127.0.0.1", 0), make_token(), {"stop": lambda: "It stops."}) as server:
        look = visit(color_scheme=scheme)
        page = look.go(server)
        for summary in page.locator("summary").all():
            summary.click()
        predict(page)
        assert violations(page) == []
        assert look.complaints == []
        page.evaluate("document.querySelector('main').append(document.createElement('img'))")
        assert violations(page), "axe must be able to find something"


def test_a_phone_scrolls_in_one_direction_only(run: Path, visit: Callable[..., Visit]) -> None:
    with PageServer(run, ("127.0.0.1", 0)) as server:
        look = visit(PHONE, has_touch=True, is_mobile=True)
        page = look.go(server)
        for summary in page.locator("summary").all():
            summary.click()
        predict(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        small = page.evaluate(
            "[...document.querySelectorAll('button, input, select')].filter((one) => one.offsetParent && "
            "one.type !== 'checkbox' && one.getBoundingClientRect().height < 28).map((one) => one.id)"
        )
        assert small == [], "these are too small for a finger"
        assert violations(page) == []


def test_names_from_elsewhere_are_text_and_never_html(run: Path, visit: Callable[..., Visit]) -> None:
    evil = "<img src=x onerror=alert(1)>"
    (run / "planning.json").unlink()
    for path in run.glob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "run":
                line["host"] = evil
                line["job"]["name"] = evil
                line["layers"] = [evil] * len(line["layers"])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with PageServer(run, ("127.0.0.1", 0)) as server:
        look = visit()
        page = look.go(server)
        for summary in page.locator("summary").all():
            summary.click()
        assert page.inner_text("#name") == evil
        assert evil in page.inner_text("#topology")
        assert page.locator("img").count() == 0
        assert look.complaints == []


def test_the_page_says_when_nothing_is_there_yet_and_goes_on_by_itself(
    trained: Path, tmp_path: Path, visit: Callable[..., Visit]
) -> None:
    folder = tmp_path / "later"
    with PageServer(folder, ("127.0.0.1", 0), devices=lambda: [{"name": "pi", "cores": 4}]) as server:
        look = visit(reduced_motion="reduce")
        page = look.go(server)
        page.wait_for_selector("#notice:has-text('No step is done yet')")
        assert "pi" in page.inner_text("#lobby")
        shutil.copytree(trained, folder)
        page.wait_for_selector("#loss path.line")
        page.wait_for_selector("#state:has-text('finished')")  # files are copied one after the other
        page.wait_for_selector("#notice", state="hidden")
        assert page.evaluate("getComputedStyle(document.querySelector('.pulse')).display") == "none"
        append(folder / "rank-1.jsonl", "\x00rubbish\n")
        page.wait_for_selector("#notice:has-text('1 line of the records is damaged')")
        assert look.complaints == []


def test_a_live_run_grows_on_the_page_is_stopped_there_and_the_page_outlives_its_service(
    folder: Path, start: Callable[..., subprocess.Popen[str]], visit: Callable[..., Visit], free_port: int
) -> None:
    token = make_token().text
    (folder / "job.yaml").write_text(JOB.format(epochs=1000))
    training = start("train", "job.yaml")
    run = folder / "runs" / "test"
    wait_for(lambda: run.exists() and any(run.glob("rank-0.jsonl")), "the run begins")
    watching = start("watch", "runs/test", "--port", str(free_port), HORIZONML_TOKEN=token)
    assert watching.stdout is not None
    assert watching.stdout.readline() == f"the page of runs/test is at http://127.0.0.1:{free_port}/ (Ctrl-C ends it)\n"
    look = visit()
    page = look.page
    page.goto(f"http://127.0.0.1:{free_port}/")
    page.wait_for_selector("#state:has-text('running')")
    page.wait_for_selector("#loss path.line")
    drawn = page.get_attribute("#loss path.line", "d")
    now = "document.querySelector('#loss path.line').getAttribute('d')"
    page.wait_for_function(f"(before) => {now} !== before", arg=drawn)
    page.fill("#token", make_token().text)
    page.click("#actions button")
    page.wait_for_selector("#actions .error:has-text('not the token')")
    page.fill("#token", token)
    page.click("#actions button")
    page.wait_for_selector("#actions [role=status]:has-text('saves a checkpoint')")
    assert training.wait(60) == 130  # as after Ctrl-C
    assert training.stdout is not None
    assert "stopped as asked: a checkpoint is saved" in training.stdout.read()
    page.wait_for_selector("#state:has-text('stopped')")
    assert not page.is_visible("#actions"), "nothing is left to stop"
    said = [words for words in look.complaints if "401" not in words]
    assert said == []
    watching.send_signal(signal.SIGINT)
    assert watching.wait(20) == 0
    page.wait_for_selector("#notice:has-text('The connection to the service is lost; trying again')")
    with PageServer(run, ("127.0.0.1", free_port)):
        page.wait_for_selector("#notice:has-text('Stopped as asked')")
    assert token not in (run / "rank-0.jsonl").read_text()
    assert ours(folder) == []
