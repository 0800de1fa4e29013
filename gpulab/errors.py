"""gpulab's errors: each names the user's input and the next step."""


class GpulabError(Exception):
    """Base of everything gpulab raises on purpose. Its text is one or two sentences for the user."""


class UsageError(GpulabError):
    """An option, a value or a combination that cannot work. The cell did not run."""


class StoreError(GpulabError):
    """A run could not be written, read or found in the run store."""


class TraceError(GpulabError):
    """A file is not a profiler trace that can be read."""


class RankError(GpulabError):
    """Ranks of a cell failed; the measurements of all ranks so far are stored and shown.

    A notebook shows one line: the ranks have printed their own tracebacks.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class DeviceLost(GpulabError):
    """A persistent GPU error: from now on every CUDA call of this process fails. `cuda_error`: its message."""

    NEXT_STEP = "Restart the kernel: after this error the CUDA context is lost."

    def __init__(self, cuda_error: str) -> None:
        self.cuda_error = cuda_error.strip().partition("\n")[0].rstrip(".")
        super().__init__(f"{self.cuda_error}. {self.NEXT_STEP}")
