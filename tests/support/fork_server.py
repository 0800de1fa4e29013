"""A Python that has torch imported already: a server imports it once, and each program is a fork of it.

Importing torch takes two seconds of a core and torch's compiler another; some hundred programs of the tests need both.
`python_with_torch()` is the path of a command that takes what Python takes (`-c`, `-m`, a script) and ends as its
program ends; where its environment names an `EXECUTABLE`, that is its `sys.executable`. Not for a program whose own
start is what is tested: it finds modules imported, reads no `sitecustomize`, and is another process than the command;
nor for one that needs other OpenMP threads.

The server has one thread and has run no operator of torch when it forks: no thread pool is lost in a child.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import marshal
import os
import shutil
import signal
import socket
import sys
from typing import Any

MODULES = (
    "torch._dynamo",
    "torch.distributed.run",
    "torch.nn.parallel",
    "torch.profiler",
    "torch.utils.data",
    "gpulab.api.profile",
    "gpulab.cli.record",
)
EXECUTABLE = "TESTS_EXECUTABLE"
KERNEL_MODULES = (*MODULES, "ipykernel.ipkernel", "ipykernel.kernelapp", "gpulab.magics")
LENGTH_BYTES = 4
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


@functools.cache
def python_with_torch(modules: tuple[str, ...] = MODULES, **environment: str) -> str:
    """The path of the command. `environment`: variables that Python or a library reads only when it starts."""
    import shlex
    import subprocess
    import tempfile

    if not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = tempfile.mkdtemp(prefix="forks")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ends, _ = os.pipe()  # its other end closes with this process
    address = os.path.join(folder, "socket")
    command = [sys.executable, __file__, "serve", address, *modules]
    started = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    subprocess.run(command, stdin=ends, stdout=subprocess.DEVNULL, check=True, env=started)
    os.close(ends)
    path = os.path.join(folder, "python")
    words = [sys.executable, "-I", "-S", __file__, "ask", address]
    new = f'exec {shlex.quote(sys.executable)} "$@"'  # options that only a new Python takes
    with open(path, "w", encoding="utf-8") as script:
        script.write(f'#!/bin/sh\ncase "$1" in -[IPSBW]*) {new};; esac\nexec {shlex.join(words)} "$@"\n')
    os.chmod(path, 0o700)
    return path


# -- the command: asks for a fork and stands in for it -----------------------------------------------------------------


def ask(address: str, words: list[str]) -> None:
    """Have the program run on this process's files; pass signals on to it, and end as it has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    leads = os.getpgrp() == os.getpid()
    request = marshal.dumps((words, os.getcwd(), dict(os.environ), 0 if leads else os.getpgrp()))
    socket.send_fds(server, [len(request).to_bytes(LENGTH_BYTES, "little")], [0, 1, 2])
    server.sendall(request)
    pid = int.from_bytes(_received(server, LENGTH_BYTES), "little")
    send = os.killpg if leads else os.kill
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: send(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int.from_bytes(_received(server, LENGTH_BYTES), "little", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("the other side is gone")
        data += piece
    return data


# -- the server --------------------------------------------------------------------------------------------------------


def serve(address: str, modules: list[str]) -> list[str]:
    """Fork at each request. Returns only in the fork: what it is to run."""
    import gc
    import importlib
    import selectors

    for module in modules:
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in each fork"
    gc.collect()
    gc.freeze()
    if os.fork():
        os._exit(0)  # not a child of the tests: who looks for children that are left looks at none
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ)
    ready.register(listener, selectors.EVENT_READ)
    forks: dict[int, tuple[int, socket.socket, bool]] = {}  # by the descriptors of the process and of its connection
    while True:
        for key, _ in ready.select():
            if key.fd == 0:
                for pid, _, leads in forks.values():
                    (os.killpg if leads else os.kill)(pid, signal.SIGKILL)
                os._exit(0)
            if key.fileobj is not listener:
                pidfd = key.data
                pid, connection, leads = forks.pop(pidfd)
                if key.fd != pidfd:  # the command was killed
                    (os.killpg if leads else os.kill)(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                ready.unregister(pidfd)
                ready.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(code.to_bytes(LENGTH_BYTES, "little", signed=True))
                connection.close()
                os.close(pidfd)
                break  # the other descriptor of this process may be ready too
            connection, _ = listener.accept()
            length, files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
            request = marshal.loads(_received(connection, int.from_bytes(length, "little")))
            pid = os.fork()
            if not pid:
                ready.close()
                listener.close()
                connection.close()
                for pidfd, (_, other, _) in forks.items():
                    other.close()
                    os.close(pidfd)
                return _become(request, files)
            for file in files:
                os.close(file)
            pidfd, leads = os.pidfd_open(pid), request[3] == 0
            if leads:
                os.setpgid(pid, pid)
            forks[pidfd] = (pid, connection, leads)
            for readable in (pidfd, connection):
                ready.register(readable, selectors.EVENT_READ, pidfd)
            connection.sendall(pid.to_bytes(LENGTH_BYTES, "little"))


def _become(request: tuple[list[str], str, dict[str, str], int], files: list[int]) -> list[str]:
    words, folder, environment, group = request
    try:
        os.setpgid(0, group)
    except OSError:  # of another session
        os.setpgid(0, 0)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get(EXECUTABLE, sys.executable)
    return words


def run(words: list[str], at_start: list[str]) -> None:
    """What Python does with its command line. `at_start`: where Python itself looks for modules."""
    import runpy
    import types

    main: Any = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *words]
    if "-u" in words[:1] or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while words[0] == "-u" or words[0].startswith("-X"):
        words = words[1:]
    kind, *rest = words
    added = os.environ.get("PYTHONPATH")
    sys.path[:] = [*(added.split(os.pathsep) if added else []), *at_start]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        assert not kind.startswith("-"), f"an option that only a new Python takes: {kind}"
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        sys.argv = [kind, *rest]
        main.__file__ = os.path.abspath(kind)
        with open(kind, "rb") as source:
            exec(compile(source.read(), main.__file__, "exec"), vars(main))


def end(words: list[str], at_start: list[str]) -> None:
    """Run it and end as Python does, but for taking a thousand modules apart, which takes most of a second."""
    import threading

    code = 0
    try:
        run(words, at_start)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        code, shown = 1, error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _paths_at_start() -> list[str]:
    added = len(os.environ["PYTHONPATH"].split(os.pathsep)) if os.environ.get("PYTHONPATH") else 0
    return sys.path[1 + added :]


if __name__ == "__main__":
    role, where, *more = sys.argv[1:]
    if role == "ask":
        ask(where, more)
    paths = _paths_at_start()
    sys.path.pop(0)
    end(serve(where, more), paths)
