"""One family of errors: each names what the user gave and the next step."""


class GpulabError(Exception):
    """Base of everything gpulab raises on purpose. Its text is one or two sentences for the user."""


class UsageError(GpulabError):
    """An option, a value or a combination that cannot work. The cell did not run."""


class StoreError(GpulabError):
    """A run could not be written, read or found in the run store."""


class TraceError(GpulabError):
    """A file is not a profiler trace that can be read."""


class RankError(GpulabError):
    """Ranks of a cell have failed; what all of them measured until then is stored and shown.

    A notebook shows one line of it: the ranks have printed their tracebacks themselves.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class DeviceLost(GpulabError):
    """An error of the GPU that stays: every CUDA call of this process fails from now on. `cuda_error`: its words."""

    NEXT_STEP = "Restart the kernel: after this error the CUDA context is lost."

    def __init__(self, cuda_error: str) -> None:
        self.cuda_error = cuda_error.strip().partition("\n")[0].rstrip(".")
        super().__init__(f"{self.cuda_error}. {self.NEXT_STEP}")
