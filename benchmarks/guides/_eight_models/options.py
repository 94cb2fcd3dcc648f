# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What all processes must know."""

__all__ = ["BLOCK", "CONTENDERS", "DRAWS", "LEARNING_RATE", "NUMPYRO", "PYRO"]

PYRO = ("SVI", "JitTrace_ELBO", "CompiledSVI")
NUMPYRO = ("NumPyro", "NumPyro, scan")
CONTENDERS = PYRO + NUMPYRO
LEARNING_RATE = 1e-2
#: Steps in one turn.
BLOCK = 10
#: Draws of the final loss.
DRAWS = 50
