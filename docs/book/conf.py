"""The book: the lessons with their outputs, the documentation and the reference as a static site. `make book`."""

from gpulab import __version__

project = "gpulab"
author = "the gpulab contributors"
copyright = author
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "docs/book/index"
include_patterns = ["docs/**", "notebooks/*.ipynb", "notebooks/README.md", "benchmarks/README.md", "CHANGELOG.md"]
exclude_patterns = ["docs/README.md"]

html_theme = "furo"
html_title = f"gpulab {release}"
html_show_sourcelink = False
html_static_path: list[str] = []
templates_path: list[str] = []

nb_execution_mode = "off"  # the notebooks are shipped as run
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "image/png", 1), ("html", "text/plain", 5)]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = [
    "myst.xref_missing",  # links to files that are no pages, such as ../LICENSE; `make lint` checks them
    "misc.highlighting_failure",  # magics are no Python
]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
