# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every public name has a docstring and one page."""

import importlib
import inspect
import pkgutil
from collections import Counter
from types import ModuleType

import pyro_radial
from tests.helpers.pages import DOCS, module_of_site

reference = module_of_site("reference")


def exporting():
    """The packages, and the modules of public names, that ``__all__`` of a package names."""
    packages = ["pyro_radial"]
    for module in pkgutil.walk_packages(pyro_radial.__path__, "pyro_radial."):
        if module.ispkg and hasattr(importlib.import_module(module.name), "__all__"):
            packages.append(module.name)
    named = [
        f"{package}.{name}"
        for package in packages
        for name in importlib.import_module(package).__all__
        if isinstance(getattr(importlib.import_module(package), name), ModuleType)
    ]
    return sorted({*packages, *named})


def is_documented(found):
    """Whether a public object has a docstring of its own, and a page."""
    if isinstance(found, ModuleType):
        return found.__name__ in reference.pages() and bool(found.__doc__)
    # A class without a docstring would show that of its base.
    has_docstring = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    needs_docstring = inspect.isclass(found) or inspect.isroutine(found)
    return id(found) in reference.public_names() and (bool(has_docstring) or not needs_docstring)


def test_each_public_name_has_a_docstring_and_a_page():
    names = [(package, name) for package in exporting() for name in importlib.import_module(package).__all__]
    undocumented = [
        f"{package}.{name}"
        for package, name in names
        if name != "__version__" and not is_documented(getattr(importlib.import_module(package), name))
    ]
    assert undocumented == []


def test_no_name_is_on_two_pages():
    named = [
        id(getattr(importlib.import_module(package), name))
        for package, names in reference.pages().items()
        for name in names
    ]
    assert max(Counter(named).values()) == 1


def test_the_first_page_of_the_reference_has_what_the_package_exports():
    page = (DOCS / "api" / "index.md").read_text()
    for name in pyro_radial.__all__:
        if name != "__version__":
            assert f"`~{reference.public_name(f'pyro_radial.{name}')[1]}`" in page, name
    for package in reference.pages():
        assert f"\n{package}\n" in page


def test_a_name_is_found_wherever_it_is_exported_from():
    assert reference.public_name("pyro_radial.fit")[1] == "pyro_radial.infer.fit"
    assert reference.public_name("pyro_radial.functional.priors.GaussianProcess.fit")[1] == (
        "pyro_radial.functional.GaussianProcess.fit"
    )
    assert reference.public_name("pyro_radial.infer.loss.elbo.TermsELBO")[1] == "pyro_radial.infer.TermsELBO"
    assert reference.public_name("pyro_radial.infer.no_such_name") == (None, None)
    private, name = reference.public_name("pyro_radial.infer.loss.not_finite.first_not_finite")
    assert private is not None
    assert name is None
