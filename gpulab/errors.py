"""One family of errors: each names what the user gave and the next step."""


class GpulabError(Exception):
    """Base of everything gpulab raises on purpose. Its text is one or two sentences for the user."""


class UsageError(GpulabError):
    """An option, a value or a combination that cannot work. The cell did not run."""


class StoreError(GpulabError):
    """A run could not be written, read or found in the run store."""


class TraceError(GpulabError):
    """A file is not a profiler trace that can be read."""
