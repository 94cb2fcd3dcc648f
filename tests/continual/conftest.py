# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest

from tests.helpers.streams import MODULE


@pytest.fixture
def fits(monkeypatch):
    """The calls of ``fit``: sites, rows, what the likelihood took for their number, and options."""
    calls, fit = [], MODULE.fit

    def recorded(chain, guide, data, **options):
        result = fit(chain, guide, data, **options)
        num_data = chain.likelihood.num_data
        calls.append({"sites": sorted(guide.posterior()), "rows": len(data[0]), "num_data": num_data, **options})
        return result

    monkeypatch.setattr(MODULE, "fit", recorded)
    return calls
