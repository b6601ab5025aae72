"""The page's server, over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from agentrl import UserError
from agentrl.cli import main
from agentrl.cli.view import PORT, listen
from agentrl.view import server
from tests.helpers import runs
from tests.helpers.sites import Site

STATIC = Path(server.STATIC)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("runs")
    runs.broken(folder / "broken", steps=12)
    runs.of(folder / "small", [runs.solved(7), runs.stuck(7), runs.lost(7)])
    made = Site(folder / "broken", folder / "small")
    yield made
    assert made.close() == 0


def test_runs_are_told_and_not_sent_again_while_nothing_changes(site: Site) -> None:
    broken, small = site.json("runs")
    assert (broken["name"], broken["episodes"], broken["step"], broken["env"]) == ("broken", 12 * 32, 12, "shop")
    assert (small["name"], small["progress"]) == ("small", 1.0)
    _, headers, _ = site.get("/api/runs")
    assert site.get("/api/runs", if_none_match=headers["etag"])[0] == 304


def test_only_new_lines_of_the_curves_are_sent(site: Site) -> None:
    whole = site.json("metrics?run=0")
    assert whole["series"]["reward"][0] == list(range(1, 13))
    new = site.json(f"metrics?run=0&since=10&generation={whole['generation']}")
    assert (new["since"], new["series"]["reward"][0]) == (10, [11, 12])
    assert site.json("metrics?run=0&since=10&generation=9")["since"] == 0  # lines were taken back: all


def test_episodes_come_in_pages(site: Site) -> None:
    found = site.json("episodes?run=0&q=failed+tool%3Dcatalogue&offset=3&limit=2")
    assert (found["total"], found["offset"], len(found["rows"])) == (384, 3, 2)
    assert found["matched"] > 100
    assert found["rows"][0].keys() >= {"id", "reward", "advantage", "stop", "n_calls", "seconds"}
    assert len(site.json("episodes?run=0&limit=100000")["rows"]) == 384


def test_groups_have_all_their_members(site: Site) -> None:
    found = site.json("groups?run=1&q=solved")
    assert (found["matched"], [m["reward"] for m in found["rows"][0]["members"]]) == (1, [1.0, 0.0, None])


def test_an_episode_its_tokens_and_why(site: Site) -> None:
    told = site.json("episode?run=1&id=train-1:0")
    assert (told["reward"], told["stop"], len(told["group"]), told["not_trained"]) == (1.0, "terminated", 3, "")
    assert told["advantage_explained"].startswith("advantage +0.707")
    tokens = site.json("tokens?run=1&id=train-1:0")
    assert len(tokens["texts"]) == len(tokens["ids"]) == len(tokens["logprobs"]) == tokens["total"]
    assert "What do 7 hats cost?" in "".join(tokens["texts"])
    assert len(tokens["log_ratios"]) == tokens["total"]
    assert site.json("tokens?run=1&id=1:0&from=5")["ids"] == tokens["ids"][5:]
    assert "written by the model" in site.json(f"explain?run=1&id=1:0&token={tokens['total'] - 1}")[1]


def test_findings_and_failures(site: Site) -> None:
    assert any("a call of tool catalogue failed" in f["text"] for f in site.json("findings?run=0"))
    failures = site.json("failures?run=1")
    assert failures["faults"] == [
        {"kind": "tool_timeout", "episodes": 1, "first": 1, "last": 1, "message": "price took more than 30 s"}
    ]
    assert [(t["tool"], t["calls"], t["errors"], t["faults"]) for t in failures["tools"]] == [
        ("price", 2, 0, 1),
        (None, 4, 4, 0),  # every call failed: no tool
    ]
    assert (failures["waits"][0]["id"], failures["waits"][0]["waited"]) == ("train-1:2", 30.0)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("episodes?q=rewrd%3C1", "did you mean 'reward'?"),
        ("episodes?run=9", "there are 2 runs here, and no run 9"),
        ("episodes?run=-1", "run is a whole number from 0 on, not '-1'"),
        ("episodes?offset=%C2%B2", "offset is a whole number"),
        ("episode?id=..%2F..%2Fx-1:0", "an episode is SPLIT-STEP:ROW"),
        ("episode?id=train-99:0", "has no train-000099.parquet"),
        ("text?id=train-1:0&message=99", "the episode has no message 99"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(site: Site, path: str, sentence: str) -> None:
    status, _, body = site.get(f"/api/{path}")
    assert status == 400
    assert sentence in json.loads(body)["error"]


def test_other_hosts_names_and_methods_are_refused(site: Site) -> None:
    assert site.get("/api/runs", Host="evil.example:80")[0] == 400  # a name that was made to point here
    assert site.get("/api/runs", Host=f"localhost:{site.url.rpartition(':')[2]}")[0] == 200
    headers = {"Authorization": f"Bearer {site.token}"}
    with pytest.raises(HTTPError, match="405"):
        urlopen(Request(f"{site.url}/api/runs", data=b"x", method="POST", headers=headers), timeout=120)
    assert site.get("/static/../server.py")[0] == 404
    assert site.get("/static/%2e%2e/server.py")[0] == 404


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/nothing", "/api/episode?id=x"])
def test_every_answer_forbids_what_the_page_does_not_do(site: Site, path: str) -> None:
    _, headers, _ = site.get(path)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_only_who_has_the_url_sees_the_runs(site: Site) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/nothing"):
        status, headers, body = site.get(path, Authorization="Bearer wrong")
        assert (status, body.count(b"\n")) == (403, 1)
        assert b"open the whole URL that agentrl view printed" in body
        assert "set-cookie" not in headers
    _, headers, _ = site.get(f"/?token={site.token}", Authorization="none")
    cookie, *flags = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(flags)
    assert site.get("/api/runs", Authorization="none", Cookie=cookie)[0] == 200
    assert site.get("/api/runs", Origin="http://evil.example")[0] == 403


def test_it_listens_on_this_machine_alone(site: Site) -> None:
    port = int(site.url.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    heard = {line.split()[1] for line in lines if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")}
    assert heard == {f"0100007F:{port:04X}"}


def test_the_page_never_parses_text_and_asks_nobody_else() -> None:
    for file in STATIC.iterdir():
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), file
        assert "style=" not in text
        assert not re.search(r"<script(?! type=\"module\" src=\"/static/)", text), file


def test_a_free_port_is_found_and_a_taken_one_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken or not allowed; give another --port"):
            listen(port)
    with listen(None) as first, listen(None) as second:
        assert first.getsockname() != second.getsockname()
        assert first.getsockname()[1] >= PORT


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["view", str(tmp_path / "no")], "no run folder"),
        (["view", "--port", "1"], "agentrl view takes: RUN..."),
        (["view", str(tmp_path), "--prot", "1"], "prot: unknown setting; did you mean 'port'?"),
        (["view", str(tmp_path), "--port", "99999"], "--port: "),
        (["explain", str(tmp_path)], "agentrl explain takes: RUN EPISODE [TOKEN]"),
        (["explain", str(tmp_path), "1:0", "x"], "is no run folder"),
        (["viwe"], "no command 'viwe'; did you mean 'view'?"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
    for verb in ("view", "report", "explain"):
        assert main([verb, "--help"]) == 0
        assert f"usage: agentrl {verb} RUN" in capsys.readouterr().out


def test_what_is_not_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.of(tmp_path / "run", [runs.solved(7)])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["view", str(folder)]) == 2
    assert "agentrl view needs the package uvicorn: pip install 'agentrl-gym[view]'" in capsys.readouterr().err


def test_explain_prints_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.of(tmp_path / "run", [runs.solved(7), runs.wrong(7)])
    assert main(["explain", str(folder), "1:0"]) == 0
    assert "advantage +0.707" in capsys.readouterr().out
    assert main(["explain", str(folder), "train-1:0", "0"]) == 0
    assert "masked: it is read and never learned from" in capsys.readouterr().out
    assert main(["explain", str(folder), "1:0", "x"]) == 2
    assert "TOKEN is the number of a token" in capsys.readouterr().err


def test_looking_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = runs.of(tmp_path / "run", [runs.solved(7), runs.wrong(7)])
    code = (
        "import sys; from pathlib import Path; from agentrl.view.server import build_app;"
        "from agentrl.view.store import Store;"
        "from agentrl.view import explain, report; from agentrl.view.tokens import TokenTexts;"
        f"s = Store(Path({str(folder)!r})); s.refresh(); build_app([s]);"
        "report.render_report(s); explain.explain_token(s, TokenTexts(s), '1:0', 0);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=60)


def test_a_page_that_is_terminated_ends_as_with_ctrl_c(tmp_path: Path) -> None:
    site = Site(runs.of(tmp_path / "run", [runs.solved(7), runs.wrong(7)]))
    site.process.send_signal(signal.SIGTERM)
    _, said = site.process.communicate(timeout=60)
    assert (site.process.returncode, said) == (0, "")
