# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Links that Sphinx does not find by itself, and what it cannot read."""

import filecmp
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import Element, TextElement, document, image, title
from docutils.nodes import section as Section
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.ext.intersphinx import resolve_reference_any_inventory
from sphinx.pycode import ModuleAnalyzer

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from reference import pages, public_name  # noqa: E402

# Names as they stand in ``:param Tensor x:``, and those under which torch and Pyro document what they define elsewhere.
OTHERS = {
    "Axes": "matplotlib.axes.Axes",
    "DataTree": "xarray.DataTree",
    "ELBO": "pyro.infer.elbo.ELBO",
    "Figure": "matplotlib.figure.Figure",
    "PyroModule": "pyro.nn.module.PyroModule",
    "Tensor": "torch.Tensor",
    "nn.Module": "torch.nn.Module",
    "pyro.infer.Predictive": "pyro.infer.predictive.Predictive",
    "pyro.infer.SVI": "pyro.infer.svi.SVI",
    "pyro.infer.TraceMeanField_ELBO": "pyro.infer.trace_mean_field_elbo.TraceMeanField_ELBO",
    "pyro.infer.Trace_ELBO": "pyro.infer.trace_elbo.Trace_ELBO",
    "pyro.nn.PyroModule": "pyro.nn.module.PyroModule",
    "torch.nn.modules.container.Sequential": "torch.nn.Sequential",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}
PROJECTS = ("botorch", "collections", "matplotlib", "numpy", "os", "pathlib", "pyro", "sklearn", "torch", "xarray")

# Files of the repository that are pages of the site too, by the name of the page.
RESULTS = "benchmarks/RESULTS.md"
FILES = {
    "contributing": "CONTRIBUTING.md",
    "experiments": "benchmarks/README.md",
    "index": "README.md",
    "past": "benchmarks/PAST.md",
    "results": RESULTS,
}
#: Names that lead the lists of their packages.
FIRST = ("fit", "predict")
#: Pages of one part of the results each, by the anchor that it begins with.
FILES |= {f"results/{path.stem}": RESULTS for path in (DOCS / "results").glob("*.md")}
PAGE_OF = {DOCS.parent / file: page for page, file in FILES.items() if "/" not in page}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect what follows; links after intersphinx has had its turn."""
    app.connect("config-inited", bring_notebooks)
    app.connect("builder-inited", lend_comments)
    app.connect("missing-reference", link, priority=900)
    app.connect("autodoc-process-bases", leave_private_bases_out)
    app.connect("autodoc-process-signature", make_readable)
    app.connect("source-read", take_file)
    app.connect("source-read", list_names)
    app.connect("doctree-read", describe_plots)
    return {"parallel_read_safe": True}


def link(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: TextElement) -> Element | None:
    """A link to the page of an object, by whatever name a docstring or an annotation has for it.

    What exists and has no page, such as another project's class in a build without a network, is its plain name. What
    does not exist is left to Sphinx, which warns.
    """
    if node.get("refdomain") != "py":
        return None
    target = OTHERS.get(node["reftarget"], node["reftarget"])
    if target.split(".")[0] in PROJECTS:
        node["reftarget"] = target
        return resolve_reference_any_inventory(env, False, node, content) or content
    found, name = public_name(target)
    if name is not None:
        domain = env.domains.python_domain
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content) or content
    return content if found is not None or is_defined(target) else None


def is_defined(name: str) -> bool:
    """Return whether a module of this project defines a bare name, such as the class of a result."""
    modules = [module for path, module in sys.modules.items() if path.startswith("pyro_radial.")]
    return any(name in vars(module) for module in modules)


def leave_private_bases_out(app: Sphinx, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Classes are shown with the bases that a user can write."""
    bases[:] = [base for base in bases if not base.__name__.startswith("_")]


def bring_notebooks(app: Sphinx, config: Config) -> None:
    """Copies of the notebooks of ``tutorials/``, with their outputs, among the pages."""
    copies = DOCS / "tutorials"
    copies.mkdir(exist_ok=True)
    notebooks = {path.name: path for path in (DOCS.parent / "tutorials").glob("*.ipynb")}
    for stale in set(copies.iterdir()) - {copies / name for name in notebooks}:
        stale.unlink()
    for name, notebook in notebooks.items():
        if not (copies / name).exists() or not filecmp.cmp(notebook, copies / name, shallow=False):
            shutil.copy(notebook, copies / name)


def lend_comments(app: Sphinx) -> None:
    """Comments of values and type aliases, from the modules that make them to the packages that have them."""
    for package, names in pages().items():
        known = ModuleAnalyzer.for_module(package).find_attr_docs()
        for name in names:
            for lines in comments_of(name, vars(sys.modules[package])[name]):
                # A table of sources is long, and its comment says what it has.
                known["", name] = [*lines, ":meta hide-value:", ""]


def comments_of(name: str, value: Any) -> list[list[str]]:
    """The lines of ``#:`` above a name, where a module of ours gives it this value."""
    made = [module for module in sys.modules if module.startswith("pyro_radial.")]
    found = [ModuleAnalyzer.for_module(m).find_attr_docs() for m in made if vars(sys.modules[m]).get(name) is value]
    return [docs["", name] for docs in found if ("", name) in docs]


def make_readable(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """What a data class makes anew for each instance is "..." in its signature."""
    return signature and signature.replace("<factory>", "..."), returned


def take_file(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a file of the repository in the place of "FILE" on its page, with anchors, plots and links that lead on."""
    if docname not in FILES:
        return
    path = DOCS.parent / FILES[docname]
    app.env.note_dependency(str(path))
    text = path.read_text()
    if FILES[docname] == RESULTS:
        summary, *parts = re.split(r'(?=<a id="results\.[a-z]+"></a>\n)', text)
        anchor = f'"{docname.replace("/", ".")}"'
        text = next((re.sub("^### ", "## ", part, flags=re.M) for part in parts if anchor in part), summary)
    # The page has a title of its own.
    text = re.sub(r"^##? .*\n", "", text, count=1, flags=re.M)
    text = re.sub(r'<a id="([^"]+)"></a>', r"(\1)=", text)
    to_file = r"(?<!!)\[([^\]]+)\]\(([^)#]+\.md)(?:#([^)]*))?\)"
    text = re.sub(to_file, lambda match: _to_page(path.parent, *match.groups()), text)
    text = re.sub(r"(!\[[^\]]*\]\()", rf"\1{os.path.relpath(path.parent, (DOCS / docname).parent)}/", text)
    source[0] = source[0].replace("FILE", text, 1)


def list_names(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a list of its names, with the first line of each docstring, at the top of a package's page."""
    package = docname.removeprefix("api/")
    if package in pages():
        names = sorted(pages()[package], key=lambda name: name not in FIRST)
        lines = "\n".join(f"   ~{package}.{name}" for name in names)
        listed = f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{lines}\n\n.. automodule"
        source[0] = source[0].replace("```{eval-rst}\n.. automodule", listed, 1)


def describe_plots(app: Sphinx, doctree: document) -> None:
    """Give the plots of notebooks, which have no text of their own, the title of their section for screen readers."""
    for plot in doctree.findall(image):
        section = plot.parent
        while section is not None and not isinstance(section, Section):
            section = section.parent
        if "alt" not in plot and section is not None:
            plot["alt"] = f"Plot: {section.next_node(title).astext()}"


def _to_page(folder: Path, text: str, target: str, anchor: str | None) -> str:
    """A link to a file as one to its page, or to its anchor on the site, or its bare text where it has neither."""
    file = (folder / target).resolve()
    # Anchors of experiments have a dot; others are those of headings, which the page may have elsewhere.
    if anchor and "." in anchor:
        return f"[{text}](#{anchor})"
    if DOCS in file.parents:
        return f"[{text}](/{file.relative_to(DOCS)})"
    page = PAGE_OF.get(file)
    return text if page is None else f"[{text}](/{page}.md)"
