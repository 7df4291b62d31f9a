"""The dashboard's server: who may read, what cannot be reached, and the page in a real Chromium."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading

import pytest

from slipstream.view.dashboard.__main__ import main
from slipstream.view.dashboard.run import RunReader
from slipstream.view.dashboard.server import FILES, STATIC, VIEWS, Dashboard
from tests.support import chromium, dashboard_runs

TOKEN = "a-token-of-the-test"


@contextlib.contextmanager
def serving(*folders):
    dashboard = Dashboard([RunReader(folder) for folder in folders], token=TOKEN)
    thread = threading.Thread(target=dashboard.serve)
    thread.start()
    try:
        yield dashboard
    finally:
        dashboard.stop()
        thread.join(10)
        dashboard.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dashboard_runs.write(tmp_path_factory.mktemp("dashboard") / "run", hostile=True)


@pytest.fixture(scope="module")
def dashboard(folder):
    with serving(folder) as found:
        yield found


def ask(dashboard, path, *, method="GET", cookie=TOKEN, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=10)
    given = {"Cookie": f"{dashboard.cookie}={cookie}"} if cookie else {}
    connection.request(method, path, headers={**given, **{name.replace("_", "-"): v for name, v in headers.items()}})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_it_listens_on_the_loopback_alone(dashboard):
    assert dashboard._http.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", [*FILES, "/api/runs", *VIEWS, "/nothing"])
def test_nothing_is_served_without_the_token(dashboard, path):
    for cookie in ("", "wrong", TOKEN[:-1], TOKEN + "x", "\xff"):
        answer, body = ask(dashboard, path, cookie=cookie)
        assert answer.status == 401 and b"token" in body and b"reward" not in body
    assert ask(dashboard, path)[0].status in (200, 400, 404)


def test_the_token_of_the_url_becomes_a_cookie_that_scripts_cannot_read(dashboard):
    answer, body = ask(dashboard, f"/?token={TOKEN}", cookie="")
    assert answer.status == 200 and b"<main>" in body
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith(f"{dashboard.cookie}={TOKEN};") and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(dashboard, f"/api/runs?token={TOKEN}", cookie="")[0].status == 401  # of the page alone


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1", "localhost.evil:80", "["])
def test_a_host_that_is_not_the_loopback_is_refused(dashboard, host):
    assert ask(dashboard, f"/?token={TOKEN}", Host=host)[0].status == 403


@pytest.mark.parametrize("host", ["localhost:8700", "127.0.0.1", "[::1]:9"])
def test_a_tunnel_may_end_at_another_port(dashboard, host):
    assert ask(dashboard, "/api/runs", Host=host)[0].status == 200


def test_another_sites_page_is_refused(dashboard):
    assert ask(dashboard, "/api/runs", Sec_Fetch_Site="cross-site")[0].status == 403
    assert ask(dashboard, "/api/runs", Sec_Fetch_Site="same-origin")[0].status == 200


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/static/app.js", "/%2e%2e/server.py", "//etc/passwd", "/app.js/../../server.py", "/app.js%00"],
)
def test_no_path_reaches_the_disk(dashboard, path):
    assert ask(dashboard, path)[0].status == 404


def test_a_merged_trace_can_be_fetched_and_nothing_else(tmp_path):
    folder = dashboard_runs.write(tmp_path / "run", steps=2)
    (folder / "trace").mkdir()
    (folder / "trace" / "steps_1_2.json.gz").write_bytes(b"packed")
    (folder / "trace" / "replay.jsonl").write_text("{}")
    with serving(folder) as dashboard:
        answer, body = ask(dashboard, "/trace?name=steps_1_2.json.gz")
        assert (answer.status, body) == (200, b"packed") and answer.headers["Content-Type"] == "application/gzip"
        assert ask(dashboard, "/trace?name=steps_1_2.json.gz", cookie="")[0].status == 401
        for name in ("replay.jsonl", "../config.yaml", "steps_1_3.json.gz", "", "/etc/passwd"):
            assert ask(dashboard, f"/trace?name={name}")[0].status == 404, name
        assert ask(dashboard, "/trace?run=7&name=steps_1_2.json.gz")[0].status == 404


@pytest.mark.parametrize("query", ["run=1", "run=-1", "run=x", "start=nan&run=0", "start=x"])
def test_a_bad_question_is_refused_with_its_reason(dashboard, query):
    answer, body = ask(dashboard, f"/api/pipeline?{query}")
    assert answer.status in (400, 404) and body.strip()


def test_what_no_view_can_show_is_said_and_the_other_views_go_on(tmp_path, caplog):
    folder = dashboard_runs.write(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": "x"}\n')
    with serving(folder) as dashboard:
        answer, body = ask(dashboard, "/api/metrics")
        assert answer.status == 500 and b"a file of the run holds what this view cannot show: unsupported op" in body
        assert ask(dashboard, "/api/trajectories")[0].status == 200
    assert "/api/metrics cannot be shown" in caplog.text


def test_nothing_can_be_written(dashboard):
    assert {ask(dashboard, "/api/runs", method=method)[0].status for method in ("POST", "PUT", "DELETE")} == {501}


def test_the_policy_of_the_page_allows_no_code_but_its_files(dashboard):
    policy = ask(dashboard, "/")[0].headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert set(STATIC.iterdir()) == set(FILES.values())
    for path in STATIC.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text, f"{path.name}: {way}"


def test_json_has_no_number_that_json_does_not_know(dashboard):
    body = ask(dashboard, "/api/trajectories?kind=evaluation")[1]
    (row,) = json.loads(body, parse_constant=pytest.fail)["rows"]
    assert row["advantage"] is None


def test_the_command_prints_a_url_that_works_and_ends_with_ctrl_c(folder, tmp_path):
    command = [sys.executable, "-m", "slipstream.view.dashboard", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = re.match(r".* at http://(127\.0\.0\.1):(\d+)(/\?token=\S+)", process.stdout.readline())
        assert said is not None
        host, port, path = said.groups()
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_what_cannot_be_served_is_refused_in_one_line(dashboard, folder, tmp_path, capsys):
    for arguments, reason in (
        ([tmp_path], "name a run folder"),
        ([folder] * 3, "3 run folders given"),
        ([folder, "--port", dashboard.port], "take another one"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        said = capsys.readouterr().err
        assert reason in said and said.count("\n") == 1


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """A run whose third step has an episode of two samples, of which two sampled tokens were not trained."""
    folder = dashboard_runs.write(tmp_path_factory.mktemp("episodes") / "run", steps=3)
    path = folder / "rollouts" / "step_3" / "rank_0.jsonl"
    dashboard_runs.write_lines(path, [dashboard_runs.trajectory(3, 1), *dashboard_runs.compacted(3, 0)])
    with serving(folder) as found:
        found.runs[0].trajectories.scan()
        assert found.runs[0].trajectories.wait(30)
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = chromium.find()
    if program is None:
        pytest.skip(chromium.MISSING)
    with chromium.Chromium(program, tmp_path_factory.mktemp("profile")) as found:
        found.look(1400, 900)
        yield found


def visit(browser, dashboard, view):
    """The page at a view; its token is gone from the address."""
    browser.events.clear()
    browser.open("about:blank")
    browser.open(f"{dashboard.url}#{view}")
    browser.until(f"document.body?.dataset.ready === {view.split('?')[0]!r}")
    assert browser.run("location.search") == ""


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)")


def test_the_views_show_the_run(browser, dashboard):
    visit(browser, dashboard, "overview")
    assert {"Reward", "Evaluation", "Entropy", "Effective sample size"} <= set(texts(browser, "figcaption > span"))
    assert browser.run("document.querySelectorAll('path.line').length") >= 9
    narrow = browser.run("document.querySelector('.chart').getBoundingClientRect().width")
    browser.run("document.querySelector('.chart .resize').click()")
    assert browser.run("document.querySelector('.chart.large').getBoundingClientRect().width") > 1.8 * narrow
    browser.run("document.querySelector('.chart.large .resize').click()")
    browser.run("location.hash = 'pipeline'")
    browser.until("document.body.dataset.ready === 'pipeline'")
    assert texts(browser, ".names span") == ["learner", "weight bus", "rollout-0"]
    assert browser.run("document.querySelectorAll('rect.span.wait').length") == 20
    browser.run("[...document.querySelectorAll('button')].find((b) => b.textContent === 'zoom in').click()")
    browser.until("document.querySelectorAll('rect.span.wait').length < 15")
    browser.run("location.hash = 'fleet'")
    browser.until("document.body.dataset.ready === 'fleet'")
    assert "is gone: silent" in browser.run("document.body.innerText")
    assert browser.errors() == []


def test_a_reader_finds_any_metric_smooths_it_and_takes_a_log_axis(browser, dashboard):
    visit(browser, dashboard, "overview?find=TIMING_s+up")
    assert "1 of 16 metrics" in texts(browser, ".hint") and "timing_s/update_actor" in texts(
        browser, "figcaption > span"
    )
    visit(browser, dashboard, "overview")
    drawn_first = len(texts(browser, "figcaption"))
    browser.run("[...document.querySelectorAll('button.pick')].find((b) => b.textContent === 'timing_s/').click()")
    browser.until("document.querySelectorAll('.others .chart').length === 5")
    reward = "document.querySelectorAll('.chart')[1].querySelector('path.line:not(.raw)').getAttribute('d')"
    before = browser.run(reward)
    for name, value in (("smooth", "'0.9'"), ("log", "true")):
        browser.run(
            f"{{ const field = document.querySelector('[name={name}]'); field.value = field.checked = {value};"
            " field.dispatchEvent(new Event('change')) }"
        )
        browser.until(f"location.hash.includes('{name}=') && document.body.dataset.at === location.hash")
    assert browser.run("document.querySelectorAll('path.line.raw').length") >= 9
    assert browser.run(reward) != before
    assert {"0.1", "0.2"} & set(texts(browser, ".others svg text"))
    assert len(texts(browser, "figcaption")) == drawn_first + 5
    assert browser.errors() == []


def test_a_reader_filters_sorts_and_opens_a_trajectory(browser, dashboard):
    visit(browser, dashboard, "trajectories?kind=trained")
    browser.until("document.querySelector('.found')?.textContent.startsWith('1–50 of 80')")
    browser.run(
        "{ const low = document.querySelector('[name=reward_min]');"
        " low.value = '0.5'; low.dispatchEvent(new Event('change')) }"
    )
    browser.until("document.querySelector('.found')?.textContent.startsWith('1–40 of 40')")
    browser.run("[...document.querySelectorAll('th button')].find((b) => b.textContent === 'tokens').click()")
    browser.until(
        "location.hash.includes('sort=length') && document.querySelector('[aria-sort]').innerText.includes('tokens')"
    )
    lengths = [int(text) for text in texts(browser, ".list tbody td:nth-child(4)")]
    assert lengths == sorted(lengths, reverse=True)
    browser.run("document.querySelector('.list tbody tr').click()")
    browser.until("document.querySelectorAll('.token').length === 6")
    assert texts(browser, ".turn h4") == ["prompt", "turn 1", "environmentnot trained", "turn 2"]
    for colour, family in (("ratio", "d"), ("advantage", "d"), ("version", "q"), ("logprob", "q")):
        browser.run(
            "{ const list = document.querySelector('[name=colour]');"
            f" list.value = '{colour}'; list.dispatchEvent(new Event('change')) }}"
        )
        browser.until(
            f"location.hash.includes('colour={colour}') && document.querySelector('[name=colour]').value === '{colour}'"
        )
        browser.until(f"document.querySelectorAll('.token[class*=\\' {family}\\']').length === 5")
    assert browser.errors() == []


def test_a_reader_goes_from_a_sample_to_the_other_one_and_to_its_group(browser, episodes):
    visit(browser, episodes, "trajectories?kind=trained&step_min=3&sort=length")
    browser.until("document.querySelector('.list tbody tr')")
    browser.run("document.querySelector('.list tbody tr').click()")
    browser.until("document.querySelectorAll('button.sample').length === 2")
    before = browser.run("location.hash")
    browser.run("document.querySelector('button.sample[aria-pressed=false]').click()")
    browser.until(f"location.hash !== {json.dumps(before)} && document.body.dataset.at === location.hash")
    assert texts(browser, ".badge")[-1] == "not trained" and len(texts(browser, ".token.untrained")) in (1, 3)
    browser.run("document.querySelector('button.group').click()")
    browser.until("location.hash.includes('index_min=0') && document.body.dataset.at === location.hash")
    assert texts(browser, ".found")[0].startswith("1–3 of 3") and browser.errors() == []


def test_turns_samples_and_tokens_outside_the_loss_are_marked(browser, episodes):
    rows = json.loads(ask(episodes, "/api/trajectories?step_min=3&kind=trained&sort=length")[1])["rows"]
    assert [row["length"] for row in rows] == [8, 6, 6] and {row["turns"] for row in rows} == {2}
    samples = json.loads(ask(episodes, f"/api/trajectory?id={rows[0]['id']}")[1])["samples"]
    places = [int(name.rpartition(":")[2]) for name in samples]
    assert samples[1] == rows[0]["id"] and places == sorted(places), "in the order of the file"
    assert {row["prompt"] for row in rows} == {"prompt 0", "prompt 1"} and {row["index"] for row in rows} == {0}
    visit(browser, episodes, f"trajectories?kind=trained&id={rows[0]['id']}")
    browser.until("document.querySelectorAll('.token').length === 8")
    assert texts(browser, ".turn h4")[0] == "prompt" and len(texts(browser, ".turn h4")) == 4
    assert texts(browser, ".badge") == ["2 of 4 tokens not trained", "not trained"]
    assert texts(browser, "button.sample") == ["sample 1 of 2", "sample 2 of 2"]
    marked = "[...document.querySelectorAll('.token')].map((node) => node.classList.contains('untrained'))"
    assert browser.run(marked) == [True, True, False, False, True, False, False, False]
    assert "8 tokens, 5 of them trained" in browser.run("document.body.innerText")


def test_a_chosen_line_whose_file_was_deleted_leaves_the_list_as_it_is(browser, tmp_path):
    folder = dashboard_runs.write(tmp_path / "run", steps=2)
    with serving(folder) as dashboard:
        index = dashboard.runs[0].trajectories
        index.scan()
        assert index.wait(30)
        rows = json.loads(ask(dashboard, "/api/trajectories?kind=trained")[1])["rows"]
        assert index.wait(30)
        chosen = rows[0]["id"]
        (folder / rows[0]["file"]).unlink()
        answer, body = ask(dashboard, f"/api/trajectory?id={chosen}")
        assert answer.status == 400 and body.decode().startswith(f"{rows[0]['file']} was deleted since")
        visit(browser, dashboard, f"trajectories?kind=trained&id={chosen}")
        browser.until("document.querySelector('.detail.bad')")
        (said,) = texts(browser, ".detail.bad")
        assert rows[0]["file"] in said and "was deleted" in said
        assert "prompt 0" in browser.run("document.querySelector('.list').innerText")


def test_the_overview_says_which_row_it_lacks(browser, tmp_path):
    folder = dashboard_runs.write(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": "x"}\n')
    (folder / "trace").mkdir()
    (folder / "trace" / "steps_1_2.json.gz").write_bytes(b"packed")
    with serving(folder) as dashboard:
        visit(browser, dashboard, "overview")
        (said,) = texts(browser, ".bad")
        assert said.endswith("step 'x' is no number")
        visit(browser, dashboard, "pipeline")
        assert "trace of steps 1 to 2 (for Perfetto)" in texts(browser, ".trace")


def test_a_hostile_answer_is_text(browser, dashboard):
    for kind in ("trained", "evaluation"):
        visit(browser, dashboard, f"trajectories?kind={kind}")
        browser.until("document.querySelector('.list tbody tr')")
        browser.run("document.querySelector('.list tbody tr').click()")
        browser.until("document.querySelector('.detail h3')")
        shown = browser.run("document.querySelector('.detail').innerText + document.querySelector('.list').innerText")
        assert dashboard_runs.HOSTILE in shown.replace("⏎", "")
        assert browser.run(
            "window.hacked === undefined && document.querySelectorAll('main img, main script').length === 0"
        )
        assert browser.errors() == []


def test_an_inline_script_is_kept_from_running_by_the_policy(browser, dashboard):
    visit(browser, dashboard, "overview")
    browser.run(
        "{ const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s) }"
    )
    assert browser.run("window.hacked === undefined")
    assert any("Content Security Policy" in error for error in browser.errors())


def test_two_runs_stand_side_by_side_and_a_live_one_moves(browser, folder, tmp_path):
    other = dashboard_runs.write(tmp_path / "other", steps=4)
    with serving(folder, other) as dashboard:
        visit(browser, dashboard, "overview")
        assert texts(browser, ".tiles h2") == ["A: run", "B: other"]
        assert browser.run("document.querySelectorAll('path.line.dashed').length") >= 9
        with (other / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dashboard_runs.metrics_row(5)) + "\n")
        browser.until("[...document.querySelectorAll('.run1 .tile b')][0].textContent === '5'")
        assert browser.run("document.querySelector('#state').textContent") == "live"
        browser.run("location.hash = 'trajectories'")
        browser.until("document.querySelectorAll('.list').length === 2")
        assert browser.errors() == []
