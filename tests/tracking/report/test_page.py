"""report.html in headless Chromium, and what it says where folders are not as they should be."""

import base64
import http.server
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from dstrain.recipe import ConfigError
from dstrain.tracking.report import page, pictures, record, state
from tests.support.launch import here
from tests.tracking.report.folder import made

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"

# In the page: uses its switches, looks at it, and sends what it sees. 400 pixels are those of a frame, since a
# window has
# at least 500. It waits for charts and pictures, however long they take.
PROBE = """<script>
const errors = [];
addEventListener("error", event => errors.push(event.message));
console.error = (...words) => errors.push(words.join(" "));
const all = query => [...document.querySelectorAll(query)];
const until = (ready, then) => ready() ? then() : setTimeout(until, 50, ready, then);
addEventListener("load", () => until(() => all(".chart")[0].dataset.drawn, () => {
  const first = all(".chart")[0], slider = all("input[type=range]")[0];
  const xs = {steps: first.data.map(trace => trace.x)};
  for (const axis of ["samples", "hours"]) {
    all(`input[value=${axis}]`)[0].click(); xs[axis] = first.data.map(t => t.x);
  }
  const ranges = Object.fromEntries(all(".chart").filter(chart => chart.layout).map(chart =>
    [chart.closest(".card").querySelector("h3").textContent, chart.layout.yaxis.range]));
  all("#log")[0].click();
  slider.value = 0;
  slider.dispatchEvent(new Event("input"));
  until(() => all("img").every(image => image.complete), () => fetch("SERVER", {method: "POST", mode: "no-cors",
    body: JSON.stringify({errors, ranges, evil: window.evil, width: document.documentElement.scrollWidth, xs,
      titles: all(".charts h3").map(one => one.textContent), scale: first.layout.yaxis.type,
      lines: first.layout.shapes.map(one => one.x0), captions: all("figcaption").map(one => one.textContent),
      images: all("img").map(image => image.naturalWidth),
      inside: all(".main-svg").every(svg => svg.getBoundingClientRect().right <=
        svg.closest(".card").getBoundingClientRect().right), text: document.body.innerText})}));
}));
</script>"""
FRAME = '<!doctype html><iframe src="page.html" style="width:WIDTHpx;height:9000px"></iframe>'


def looked_at(report, folder, width: int) -> dict:
    """What a browser shows of a report that it opens as a file; it finds no host but this test."""
    if BROWSER is None:
        pytest.skip("no chromium here: apt-get install chromium")
    texts = report.read_text().partition("<script>")[0]  # all but scripts
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import""", texts)
    answers: queue.Queue[bytes] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    probe = PROBE.replace("SERVER", f"http://127.0.0.1:{server.server_port}/")
    (folder / "page.html").write_text(report.read_text().replace("<head>", "<head>" + probe, 1))
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    words = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder / 'browser'}",
        "--window-size=1400,9000",
        (folder / "frame.html").as_uri(),
    ]
    with open(folder / "browser.log", "w+b") as log:
        browser = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            return json.loads(answers.get(timeout=300))
        except queue.Empty:
            pytest.fail((folder / "browser.log").read_text(errors="replace")[-3000:])
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two runs, one of them with texts that are markup, and one of films."""
    folder = tmp_path_factory.mktemp("runs")
    made(folder / "one")
    made(folder / "two", lr=2e-3, clips=True, steps=32)
    (folder / "two" / "bad_files.txt").write_text(f"a.png\t{EVIL}\n")
    for name, line in (
        ("log.txt", EVIL),
        ("metrics.jsonl", json.dumps({"step": 32, EVIL: 1.0})),
        ("data.txt", EVIL),
        ("events.jsonl", json.dumps({"event": "start", "time": 3e9, "step": 9, "device": EVIL})),
    ):
        with open(folder / "two" / name, "a") as file:
            file.write(line + "\n")
    settings = json.dumps({"comment": EVIL, "zero_optimization": {"stage": 3}})
    (folder / "two" / "ds_config.json").write_text(settings)
    return folder


def test_one_run_in_a_browser(two, tmp_path):
    """Oracle: the run's own values; no error, no foreign text taken for markup, nothing wider than 400 pixels."""
    read = record.read_record(two / "two")
    seen = looked_at(page.write_report([two / "two"], tmp_path / "out" / "report.html"), tmp_path, 400)
    assert seen["errors"] == [] and seen.get("evil") is None and seen["width"] <= 400 and seen["inside"]
    assert seen["titles"][:4] == ["loss", "loss by quarter of the timesteps", "held_out/loss", "lr"]
    assert EVIL in seen["titles"] and EVIL in seen["text"] and seen["scale"] == "log"
    assert seen["xs"]["steps"] == [[8, 16, 24, 32]] and seen["xs"]["samples"] == [[32, 64, 96, 128]]
    assert all(hours >= 0 for hours in seen["xs"]["hours"][0])
    assert len(seen["lines"]) == 3  # two resumes and a rollback
    level, low, high = float(read.metrics.find_last_finite_value("lr")), *seen["ranges"]["lr"]
    assert low == 0 and high == pytest.approx(2 * level) and seen["ranges"]["samples_per_second"][0] == 0
    assert seen["captions"] == ["step 8"] and len(seen["images"]) == 2 and min(seen["images"]) > 0
    for text in ("optimizer.lr", "a loss of <NaN>", "0.002", "deepspeed", "total", "back from step 38 to 32"):
        assert text in seen["text"], text


def test_two_runs_in_a_browser(two, tmp_path):
    """Oracle: both runs' values and their differences; the same step of both is shown side by side."""
    seen = looked_at(page.write_report([two / "one", two / "two"], tmp_path / "report.html"), tmp_path, 1200)
    assert seen["errors"] == [] and seen.get("evil") is None and seen["width"] <= 1200
    assert seen["xs"]["steps"] == [[8, 16, 24, 32, 40], [8, 16, 24, 32]]
    assert seen["captions"] == ["one, step 8", "two, step 8"] and len(seen["images"]) == 4 and min(seen["images"]) > 0
    table = re.search("Differences\n(.*?)\none\n", seen["text"], re.DOTALL)[1]
    rows = [line.split("\t") for line in table.splitlines() if "\t" in line]
    assert ["steps", "40", "32"] in rows and ["optimizer.lr", "0.001", "0.002"] in rows
    assert ["deepspeed.zero_optimization.stage", "2", "3"] in rows and not any(row[0] == "seed" for row in rows)


def test_runs_of_one_name(two, tmp_path):
    """Oracle: their folders, from the one that holds both on."""
    for place in ("first", "second/deep"):
        shutil.copytree(two / "one", tmp_path / place / "one")
    runs = [tmp_path / "first" / "one", tmp_path / "second" / "deep" / "one"]
    text = page.write_report(runs, tmp_path / "report.html").read_text()
    assert "<title>first/one, second/deep/one</title>" in text
    assert str(tmp_path) not in text.partition("<h2>first/one")[0]


def test_a_loss_that_is_no_number(tmp_path):
    """Oracle: the last line of metrics.jsonl: the page's head says nan, and not the loss of an earlier step."""
    made(tmp_path / "run", steps=32)
    with open(tmp_path / "run" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 40, "loss": NaN}\n')
    assert ">nan<" in page.write_report([tmp_path / "run"], tmp_path / "report.html").read_text(encoding="utf-8")


def test_curves_that_tell_nothing(tmp_path):
    """Oracle: the columns of two runs, by hand: zeros, and copies of an earlier one, where no run has other values."""
    zeros = {"skipped": 0, "vb": 0.0}
    for name, other in (("one", 0.0), ("two", 3.0)):
        made(tmp_path / name, steps=8)
        with open(tmp_path / name / "metrics.jsonl", "w", encoding="utf-8") as file:
            for step in (8, 16, 24):
                values = {"loss": 1 / step, "mse": 1 / step, "aux": 1 / step + other, "late": other, **zeros}
                file.write(json.dumps({"step": step, **values}) + "\n")
    for runs, left, text in (
        (["one"], {"loss"}, "mse (as loss), aux (as loss), late (0 throughout), skipped (0 throughout)"),
        (["one", "two"], {"loss", "aux", "late"}, "mse (as loss), skipped (0 throughout), vb (0 throughout)."),
    ):
        page.write_report([tmp_path / run for run in runs], tmp_path / "report.html")
        shown = (tmp_path / "report.html").read_text(encoding="utf-8")
        drawn = json.loads(re.search(r'id="data">(.*?)</script>', shown, re.DOTALL)[1])
        assert {chart["title"] for chart in drawn["charts"]} == left and text in shown


ODD = {
    "a time far away": {"time": 1e300},
    "a time before all": {"time": -1e300},
    "a time of hundreds of digits": {"time": 10**400},
    "a time that is a text": {"time": "now"},
    "a time that is true": {"time": True},
    "facts of any kind": {"versions": [1], "weights": {"a": "b"}, "device": {"a": [None]}, "commit": 3, "world": 1e999},
    "a step of hundreds of digits": {"step": 10**300},
}


@pytest.mark.parametrize("kind", ODD)
def test_events_of_others(tmp_path, kind):
    """Oracle: the page of the same folder without the line: what no calendar can show is passed over."""
    folder = tmp_path / "run"
    made(folder, steps=8)
    before = len(record.read_record(folder).starts)
    line = {"event": "start", "time": 1.7e9, "step": 8} | ODD[kind]
    with open(folder / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        timing = {"time": line["time"], "step": None}
        file.write(json.dumps({"step": 9, "loss": 1.0, "timing": timing}) + "\n")
    text = page.write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1], parse_constant=pytest.fail)
    assert drawn["charts"] and state.read_run_state(folder).step == 9
    assert len(record.read_record(folder).starts) == before + (not kind.startswith("a time"))


EVALUATIONS = {
    "an empty curve": {"curves": {"mse": []}},
    "a number of hundreds of digits": {"figures": {"loss": 10**400}},
    "no figures": {"figures": None},
    "a list": [],
}


@pytest.mark.parametrize("kind", EVALUATIONS)
def test_evaluations_of_others(two, tmp_path, kind):
    """Oracle: a remark that names the file, and the other evaluation on the page."""
    folder = shutil.copytree(two / "one", tmp_path / "run")
    path = next((folder / "evaluation").glob("*.json"))
    changes = EVALUATIONS[kind]
    odd = json.loads(path.read_text()) | changes if isinstance(changes, dict) else changes
    (folder / "evaluation" / "odd.json").write_text(json.dumps(odd))
    found = record.read_record(folder)
    assert [name for name, *_ in found.evaluations] == [path.stem] and "odd.json" in " ".join(found.remarks)
    assert "</html>" in page.render_page([found])


def test_a_folder_of_rubbish(two, tmp_path):
    """Oracle: a remark for each file that cannot be read, and a page all the same."""
    folder = shutil.copytree(two / "one", tmp_path / "run")
    for path in [*folder.iterdir(), *folder.glob("*/*")]:
        if path.is_file():
            path.write_bytes(b"\xff{[\0")
    os.mkfifo(folder / "bad_files.txt")
    found = record.read_record(folder)
    text = page.render_page([found])
    assert "</html>" in text
    for name in (
        "run.yaml",
        "ds_config.json",
        "bad_files.txt",
        "lines of metrics.jsonl, which are left out: 1",
        "samples/step_00000008.png",
        "evaluation/step_00000040_ema0.99.json",
        "events.jsonl",
    ):
        assert any(name in remark for remark in found.remarks), name


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name the folder of a run"),
        (["empty"], "empty is not a run's folder: it holds no run.yaml"),
        (["absent"], "absent is not a run's folder"),
        (["run", "--out", "run"], "run is a folder: name a file in it"),
        (["run", "--out", "run/run.yaml/x.html"], "x.html cannot be written (Not a directory)"),
    ],
)
def test_wrong_words(tmp_path, monkeypatch, capsys, words, message):
    """Oracle: exit code 2 and the one line, written by hand."""
    (tmp_path / "empty").mkdir()
    made(tmp_path / "run", steps=8)
    monkeypatch.chdir(tmp_path)
    code, _, error = here("report.py", words, monkeypatch, capsys)
    assert code == 2 and message in error.replace("File exists", "Not a directory"), error


def test_a_new_folder_is_said(two, monkeypatch, capsys):
    """Oracle: the folders that are there: one that the command had to make, as a wrong --out may have it, is named."""
    monkeypatch.chdir(two)
    for word in ("new is a new folder\n", ""):
        code, out, error = here("report.py", ["one", "--out", "new/x.html"], monkeypatch, capsys)
        assert (code, out, error) == (0, "new/x.html\n", word) and (two / "new" / "x.html").exists()


def test_many_steps_fit(tmp_path):
    """Oracle: the sizes of files: 20,000 lines and 240 large pictures make a page that is no larger than its bounds."""
    made(tmp_path / "run", steps=8)
    values = np.random.default_rng(0).random(20_000)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.writelines(
            json.dumps({"step": 9 + step, "loss": value, "lr": value}) + "\n" for step, value in enumerate(values)
        )
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "run" / "samples" / "step_00000100.png")
    large = tmp_path / "run" / "samples" / "step_00000100.png"
    for step in range(200, 24_000, 100):
        os.link(large, large.with_name(f"step_{step:08d}.png"))
    text = page.write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    curve = next(chart for chart in drawn["charts"] if chart["title"] == "loss")["traces"][0]["values"]
    assert len(curve) <= 2002 and max(curve) == pytest.approx(values.max(), abs=1e-5)
    grids = drawn["grids"][0]["runs"][0]
    assert len(grids["steps"]) == 200 and (grids["steps"][0], grids["steps"][-1]) == (8, 23_900)
    assert len(text) < 4 / 3 * page._PICTURE_BYTES + 6e6


def test_a_large_picture_becomes_smaller(tmp_path):
    """Oracle: the bytes that were asked for; a film stays a film of as many frames; a small picture stays as it is."""
    noise = np.random.default_rng(0).integers(0, 256, (8, 300, 400), np.uint8)
    frames = [Image.fromarray(frame) for frame in noise]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:], duration=100)
    frames[0].save(tmp_path / "still.png")
    for name, count, most in (("film.gif", 8, 250_000), ("still.png", 1, 60_000)):
        path = tmp_path / name
        assert pictures.make_picture_data_url(path, 10**7).startswith(f"data:image/{path.suffix[1:]};base64,")
        small = pictures.make_picture_data_url(path, most)
        assert small.startswith("data:image/webp;base64,") and len(small) < 1.35 * most
        content = base64.b64decode(small.partition(",")[2])
        (tmp_path / "small").write_bytes(content)
        with Image.open(tmp_path / "small") as image:
            assert getattr(image, "n_frames", 1) == count
    with pytest.raises((OSError, ValueError)):
        (tmp_path / "torn.png").write_bytes((tmp_path / "still.png").read_bytes()[:5000])
        pictures.make_picture_data_url(tmp_path / "torn.png", 10**7)


def test_without_plotly(two, tmp_path, monkeypatch):
    """Oracle: the line that names what to install."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match="pip install plotly"):
        page.write_report([two / "one"], tmp_path / "report.html")


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_is_taken_away(tmp_path, monkeypatch, linked):
    """Oracle: the folders that are there: a run's own report does not make its folder anew, by a link neither."""
    made(tmp_path / ("real" if linked else "run"), steps=8)
    if linked:
        (tmp_path / "run").symlink_to("real")
    whole = page.render_page

    def slow(records):
        (tmp_path / "run").rename(tmp_path / "away")
        return whole(records)

    monkeypatch.setattr(page, "render_page", slow)
    with pytest.raises(ConfigError, match=r"report.html cannot be written \(No such file"):
        page.write_report([tmp_path / "run"], tmp_path / "run" / "report.html")
    assert {path.name for path in tmp_path.iterdir()} == ({"away", "real"} if linked else {"away"})
    assert not (tmp_path / "away" / "report.html").exists()
