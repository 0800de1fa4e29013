"""The board as a service of a real JupyterHub: three users; the teacher sees the class, a student does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

pytest.importorskip("jupyterhub", reason="JupyterHub is not installed")

from tests.board.hub import PROXY, Hub

pytestmark = [
    pytest.mark.hub,
    pytest.mark.skipif(not PROXY.exists(), reason="configurable-http-proxy is not installed: it needs npm"),
]

LESSON = """
from gpulab.lessons import open_lesson
lesson = open_lesson("03")
lesson.name = {name!r}
my_loader, slow_loader, train = [], ..., ...
print(lesson.check("loader").state)
print(lesson.progress.problems)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    running = Hub(tmp_path_factory.mktemp("hub"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def written(hub: Hub) -> dict[str, list[dict[str, str]]]:
    paths = sorted(hub.folder.glob("*.jsonl"))
    return {path.name.rpartition("-")[0]: [*map(json.loads, path.read_text().splitlines())] for path in paths}


@pytest.mark.timeout(900)
@pytest.mark.slow("a JupyterHub and the servers of its users")
def test_a_class_on_a_hub(hub: Hub) -> None:
    for user in ("ada", "ben"):
        assert hub.run_in_notebook(user, LESSON.format(name="teacher")) == "wrong\n{}\n"
    lines = written(hub)
    assert {name: {line["learner"] for line in of} for name, of in lines.items()} == {"ada": {"ada"}, "ben": {"ben"}}, (
        "whatever name a notebook gives, the hub knows whose token it is"
    )
    assert [line.get("state") for line in lines["ada"]] == [None, "wrong"]

    board = hub.browse("teacher", "/services/gpulab-board/")
    assert board.status_code == 200, board.text
    assert "2 learners" in board.text and ">ada<" in board.text and ">ben<" in board.text
    refused = hub.browse("ada", "/services/gpulab-board/")
    assert refused.status_code == 403 and "ben" not in refused.text


@pytest.mark.timeout(300)
def test_nobody_writes_without_a_token_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    before = written(hub)
    lines = f"{hub.url}/services/gpulab-board/lines"
    line = json.dumps({"lesson": "03_starving_gpu", "exercise": "loader", "kind": "check", "state": "right"})
    for headers in ({}, {"Authorization": "token wrong"}, {"Authorization": "nonsense"}):
        assert requests.post(lines, data=line, headers=headers, timeout=30).status_code == 403
    assert requests.get(f"{hub.url}/services/gpulab-board/", timeout=30, allow_redirects=False).status_code == 302
    assert written(hub) == before
