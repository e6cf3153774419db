import os
import re
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_source = (Path(__file__).parent.parent / "keras_gradwatch" / "__init__.py").read_text(encoding="utf-8")

project = "Keras GradWatch"
author = "The keras-gradwatch authors"
project_copyright = author
release = re.search(r'^__version__ = "(.+)"$', _source, re.MULTILINE)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
maximum_signature_line_length = 90

autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
