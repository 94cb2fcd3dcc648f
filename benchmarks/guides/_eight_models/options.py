# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What all processes must know."""

from pathlib import Path

PYRO = ("SVI", "JitTrace_ELBO", "CompiledSVI")
NUMPYRO = ("NumPyro", "NumPyro, scan")
CONTENDERS = PYRO + NUMPYRO
LEARNING_RATE = 1e-3
#: Steps in one turn.
BLOCK = 10
#: Draws of the final loss.
DRAWS = 50
#: Where processes start, and their environment.
ROOT = Path(__file__).parents[3]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}
