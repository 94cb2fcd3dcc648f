# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Settings of the site, which ``make docs`` builds."""

import os
import sys
from pathlib import Path

import pyro_radial

# Where links.py is.
sys.path.insert(0, str(Path(__file__).parent))

project = html_title = "pyro_radial"
author = copyright = "Contributors to the pyro_radial project"
release = pyro_radial.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "links",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# Notebooks are shown with the outputs they have.
nb_execution_mode = "off"
nb_merge_streams = True

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True, "light_css_variables": {"code-font-size": "76%"}}
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Prompts and outputs of doctests are not copied.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autosummary_generate = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# DOCS_ONLINE=1 links what other projects document; a build without a network has their plain names.
nitpicky = True
if os.environ.get("DOCS_ONLINE", "0") != "0":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "pyro": ("https://docs.pyro.ai/en/stable", None),
        "sklearn": ("https://scikit-learn.org/stable", None),
        "botorch": ("https://botorch.readthedocs.io/en/stable", None),
    }
