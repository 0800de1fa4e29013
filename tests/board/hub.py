"""A real JupyterHub with its proxy on this machine: dummy authenticator, simple spawner, the board as its service."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import requests
from jupyterhub.utils import random_port
from msgspec import Struct, field

from tests.support.paths import ROOT

USERS = ("ada", "ben", "teacher")
PASSWORD = secrets.token_hex(8)
PATIENCE_S = 120
PROXY = Path(sys.prefix) / "share" / "gpulab-hub" / "node_modules" / ".bin" / "configurable-http-proxy"

CONFIGURATION = """
c.JupyterHub.bind_url = "http://127.0.0.1:{public}"
c.JupyterHub.hub_port = {hub}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy}"
c.ConfigurableHTTPProxy.command = [{proxy_command!r}]
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = {password!r}
c.Authenticator.allowed_users = {users!r}
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = {homes!r} + "/{{username}}"
c.Spawner.environment = {environment!r}
c.Spawner.args = ["--allow-root"]
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120
c.JupyterHub.load_groups = {{"instructors": {{"users": ["teacher"]}}}}
c.JupyterHub.services = [
    {{
        "name": "gpulab-board",
        "url": "http://127.0.0.1:{board}",
        "command": [{python!r}, "-m", "gpulab.board", {folder!r}],
        "environment": {service_environment!r},
        "oauth_no_confirm": True,
        "oauth_client_allowed_scopes": ["read:users:groups!user"],
    }},
    {{"name": "test", "api_token": {token!r}}},
]
c.JupyterHub.load_roles = [
    {{"name": "user", "scopes": ["self", "access:services!service=gpulab-board"]}},
    {{"name": "server", "scopes": [
        "users:activity!user", "access:servers!server", "access:services!service=gpulab-board"
    ]}},
    {{"name": "test", "scopes": ["admin:users", "admin:servers", "access:servers"], "services": ["test"]}},
]
"""


def of_user(user: str, hub: psutil.Process) -> Iterator[tuple[dict[str, str], str]]:
    """Environment and folder of the user's server, then of what it has started itself."""
    for process in hub.children(recursive=True):
        with suppress(psutil.Error):  # it may just have ended
            environment = process.environ()
            if environment.get("JUPYTERHUB_USER") == user:
                yield environment, process.cwd()


class Hub(Struct, dict=True):
    """The running hub. `folder` is where the board keeps the lines."""

    home: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return self.home / "class"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.public}"

    def start(self) -> None:
        """Start it, and wait until hub and board answer."""
        self.public, hub, proxy, board = (random_port() for _ in range(4))
        homes = self.home / "homes"
        for user in USERS:
            (homes / user).mkdir(parents=True)
        path = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        configuration = self.home / "jupyterhub_config.py"
        configuration.write_text(
            CONFIGURATION.format(
                public=self.public,
                hub=hub,
                proxy=proxy,
                proxy_command=str(PROXY),
                password=PASSWORD,
                users=set(USERS),
                homes=str(homes),
                environment={**path, "GPULAB_CLASS": f"{self.url}/services/gpulab-board/"},
                service_environment=path,
                board=board,
                python=sys.executable,
                folder=str(self.folder),
                token=self.token,
            )
        )
        with (self.home / "hub.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", str(configuration)],
                cwd=self.home,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            )
        self._until(lambda: requests.get(f"{self.url}/hub/health", timeout=5).ok)
        self._until(lambda: requests.get(f"{self.url}/services/gpulab-board/lines", timeout=5).status_code == 405)

    def stop(self) -> None:
        """End it with all that it has started."""
        if self.process is not None:
            for user in USERS:
                self._api("delete", f"users/{user}/server")
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)

    def run_in_notebook(self, user: str, code: str) -> str:
        """What code prints that has the environment and the folder of the user's own notebook server, as kernels do."""
        self._api("post", f"users/{user}")
        started = self._api("post", f"users/{user}/server")
        assert started.ok and self.process is not None, started.text
        environment, folder = next(of_user(user, psutil.Process(self.process.pid)))
        command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", code]
        ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def browse(self, user: str, path: str) -> requests.Response:
        """The page that the user sees, logged in as in a browser."""
        session = requests.Session()
        session.get(f"{self.url}/hub/login", timeout=30)
        answer = session.post(
            f"{self.url}/hub/login",
            params={"_xsrf": session.cookies["_xsrf"]},
            data={"username": user, "password": PASSWORD, "_xsrf": session.cookies["_xsrf"]},
            timeout=60,
            allow_redirects=False,
        )
        assert answer.status_code == 302, answer.text
        return session.get(f"{self.url}{path}", timeout=60)

    def _api(self, method: str, path: str) -> requests.Response:
        headers = {"Authorization": f"token {self.token}"}
        return requests.request(method, f"{self.url}/hub/api/{path}", headers=headers, timeout=120)

    def _until(self, ready: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            assert self.process is not None and self.process.poll() is None, (self.home / "hub.log").read_text()[-4000:]
            try:
                if ready():
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        raise AssertionError((self.home / "hub.log").read_text()[-4000:])
