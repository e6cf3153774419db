import re
from pathlib import Path

_source = (Path(__file__).parent.parent / "keras_gradwatch" / "__init__.py").read_text(encoding="utf-8")

project = "Keras GradWatch"
author = "The keras-gradwatch authors"
project_copyright = author
# Read, not imported: building the documentation needs neither Keras nor a backend.
release = re.search(r'^__version__ = "(.+)"$', _source, re.MULTILINE)[1]

extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
