"""The board as a service of JupyterHub: kernels post lines with their own tokens, the instructor reads the page.

The hub says whose token it is, so nobody can write for another user; the page is only for the hub's administrators and
members of the instructors' group. Nothing is sent anywhere else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from jupyterhub.services.auth import HubAuth, HubOAuthCallbackHandler, HubOAuthenticated
from jupyterhub.utils import url_path_join
from msgspec.structs import replace
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.web import Application, HTTPError, RequestHandler, authenticated

from gpulab.board import page
from gpulab.board.live import read_folder
from gpulab.board.standing import standing
from gpulab.lessons.progress import LONGEST_LINE_BYTES, ClassFolder, Learner, parsed

RENEWED_S = 5
MOST_FILE_BYTES = 5_000_000  # per learner: far more than a course needs
NO_ACCESS = "This page is for the instructors of this hub."


def file_token(user: str) -> str:
    """Six hexadecimal digits of a hub's user name, so that names that look alike in a file name stay apart."""
    return hashlib.sha256(user.encode()).hexdigest()[:6]


class LinesHandler(RequestHandler):
    """`POST lines`: one line of progress, from the kernel of the user whose token is in the request."""

    folder: Path
    auth: HubAuth

    def initialize(self, folder: Path, auth: HubAuth) -> None:
        self.folder, self.auth = folder, auth

    def check_xsrf_cookie(self) -> None:
        """Requests have no cookie: only the token counts."""

    def post(self) -> None:
        user = self.auth.user_for_token(_token(self.request.headers)) if _token(self.request.headers) else None
        if user is None or not self.auth.check_scopes(self.auth.access_scopes, user):
            raise HTTPError(403, reason="No token of this hub that may reach the board")
        line = parsed(self.request.body) if len(self.request.body) <= LONGEST_LINE_BYTES else None
        if line is None:
            raise HTTPError(400, reason="Not a line of progress")
        name = str(user["name"])
        outlet = ClassFolder(self.folder, Learner(name, file_token(name)))
        path = self.folder / outlet.learner.file_name
        if path.exists() and path.stat().st_size > MOST_FILE_BYTES:
            raise HTTPError(413, reason="Too much progress")
        problem = outlet.write(replace(line, learner=name))
        if problem is not None:
            raise HTTPError(507, reason="The board cannot write")
        self.set_status(204)


class BoardHandler(HubOAuthenticated, RequestHandler):  # type: ignore[misc]
    """`GET`: the board, for instructors."""

    folder: Path
    group: str

    def initialize(self, folder: Path, group: str) -> None:
        self.folder, self.group = folder, group

    @authenticated
    def get(self) -> None:
        if not is_instructor(self.get_current_user(), self.group):
            raise HTTPError(403, reason=NO_ACCESS)
        now = datetime.now(UTC)
        body = page.html(standing(read_folder(self.folder)), now)
        self.set_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.finish(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="{RENEWED_S}">'
            f"<title>gpulab: the class</title>{body}"
        )


def is_instructor(user: Mapping[str, Any] | None, group: str) -> bool:
    """An administrator of the hub, or a member of the group."""
    return user is not None and (bool(user.get("admin")) or group in (user.get("groups") or ()))


def application(folder: Path, group: str, prefix: str) -> Application:
    """The service below `prefix`, the address that the hub gives it."""
    auth = HubAuth()
    return Application(
        [
            (url_path_join(prefix, "lines"), LinesHandler, {"folder": folder, "auth": auth}),
            (url_path_join(prefix, "oauth_callback"), HubOAuthCallbackHandler),
            (re.escape(prefix) + "/?", BoardHandler, {"folder": folder, "group": group}),
        ],
        cookie_secret=os.urandom(32),
    )


def serve(folder: Path, group: str, environment: Mapping[str, str] = os.environ) -> None:
    """Serve until the hub ends it, at the address and with the token that the hub sets in the environment."""
    prefix = environment.get("JUPYTERHUB_SERVICE_PREFIX", "/").rstrip("/")
    url = urlparse(environment.get("JUPYTERHUB_SERVICE_URL", "http://127.0.0.1:10101"))
    server = HTTPServer(application(folder, group, prefix))
    server.listen(url.port or 10101, url.hostname or "127.0.0.1")
    print(json.dumps({"gpulab board": str(folder), "at": prefix + "/"}), flush=True)
    with suppress(KeyboardInterrupt):  # how the hub ends a service
        IOLoop.current().start()


def _token(headers: Mapping[str, str]) -> str:
    """The token of "Authorization: token …"; empty without one."""
    kind, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() in ("token", "bearer") else ""
